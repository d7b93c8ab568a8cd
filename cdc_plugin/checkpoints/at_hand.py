"""Backbones that lie on this machine already, for whoever names none: the caches of the hub and of torch."""

import re
from pathlib import Path

from cdc_plugin.checkpoints.formats import clip, transformers
from cdc_plugin.checkpoints.formats.timm.published import find_cached_weights
from cdc_plugin.checkpoints.read import payload_fields, read_sidecars
from cdc_plugin.errors import ConfigError, option

# Best first: what clustered photos best without labels, by the names under which it is published.
KINDS = ("dinov3", "dinov2", "siglip", "clip", "dino", "convnext", "vit", "efficientnet", "resnet")
LARGE = 400_000_000  # bytes; a network beyond takes minutes for a thousand photos on a CPU
OFFER = "hf-hub:facebook/dinov2-small"


def list_at_hand() -> list[str]:
    """Return the names and files of backbones that need no network, the most suitable first."""
    found: list[tuple[int, bool, int, str]] = []
    for name, file in (*_in_hub_cache(), *_in_torch_cache()):
        kind = next((place for place, word in enumerate(KINDS) if re.search(word, name.lower())), None)
        if kind is not None:
            size = file.stat().st_size
            found.append((kind, size > LARGE, size if size > LARGE else -size, name))
    return [name for *_, name in sorted(found)]


def choose_at_hand() -> tuple[str, list[str]]:
    """Return the best backbone that is at hand, and the others; refuse with what to type if there is none."""
    found = list_at_hand()
    if not found:
        raise ConfigError(
            f"missing {option('backbone', '...')}, and no known backbone is in the caches of this machine; type "
            f"{option('backbone', OFFER)} (88 MB, fetched once), timm:NAME, or the path of a checkpoint or folder; "
            "without a network or weights, train one on your images: cdc-pretrain"
        )
    return found[0], found[1:]


def _in_hub_cache() -> list[tuple[str, Path]]:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache, found = Path(HF_HUB_CACHE), []
    for folder in sorted(cache.glob("models--*--*")) if cache.is_dir() else ():
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        weights = find_cached_weights(name)
        if weights is not None and weights.is_file() and _is_readable(weights):
            found.append((f"hf-hub:{name}", weights))
    return found


def _is_readable(weights: Path) -> bool:
    """Return whether the settings beside weights are those of a network that one of the formats reads."""
    beside = read_sidecars(weights)
    config = payload_fields(beside.get(transformers.CONFIG))
    known = config.get("model_type") in transformers.FAMILIES and not config.get("auto_map")
    return known or isinstance(config.get("architecture"), str) or clip.CONFIG in beside


def _in_torch_cache() -> list[tuple[str, Path]]:
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    files = sorted(folder.glob("*.pth")) if folder.is_dir() else []
    return [(str(file), file) for file in files]
