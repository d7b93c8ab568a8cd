"""Published weights: ``timm:NAME`` for timm's own, ``hf-hub:OWNER/NAME`` for any timm model on the hub."""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from cdc_plugin.checkpoints.formats.base import Loaded, Origin
from cdc_plugin.checkpoints.read import HUB_SETTINGS, PART, payload_fields
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import build, timm_features
from cdc_plugin.models.backbone import Backbone

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
INDEX = "model.safetensors.index.json"  # of weights in several parts


def load_from_timm(path: str) -> Loaded:
    """Return a timm model with the weights that timm publishes for it, downloaded or cached."""
    import timm

    name = path.removeprefix("timm:")
    base = name.split(".")[0]
    if not timm.is_model(base):
        build({"family": "timm", "name": base})  # raises with the nearest names
    if not timm.is_model_pretrained(name):
        raise CheckpointError(
            f"timm has no pretrained weights for {name!r}; timm.list_pretrained() lists what there is"
        )
    offline = CheckpointError(
        f"could not fetch timm's weights for {name!r}; with no network, download the file elsewhere and "
        f"give its path with {option('arch', base)}"
    )
    hub_id = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    if hub_id and find_cached_weights(hub_id) is None and not _reachable():
        raise offline
    try:
        network: Any = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # the hub's client raises its own errors, which vary with its version
        raise offline from error
    config = network.pretrained_cfg
    size = int(config["input_size"][-1])
    spec = {"family": "timm", "name": base, "kwargs": {}}
    backbone = Backbone(network, timm_features(network), config["mean"], config["std"], size, spec)
    why = dict.fromkeys(("mean", "std", "input_size"), "published with the weights")
    return Loaded(backbone, Origin(f"timm, published weights of {name}", why=why))


def fetch_from_hub(path: str) -> Path:
    """Return the local copy of a repository's weights, with its settings beside it; download them if needed."""
    name, _, revision = path.removeprefix("hf-hub:").partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise CheckpointError(f"expected hf-hub:OWNER/NAME, found {path!r}; the hub's page of a model shows both")
    cached = find_cached_weights(name, revision or None)
    if cached is not None:
        return cached
    unreachable = CheckpointError(
        f"could not fetch {name!r} from the hub and it is not cached; with no network, download its weights and "
        "config files into one folder elsewhere and give that folder"
    )
    if not _reachable():
        raise unreachable
    from huggingface_hub import hf_hub_download

    for file in HUB_SETTINGS:  # a repository has some of them
        with contextlib.suppress(Exception):
            hf_hub_download(name, file, revision=revision or None)
    problem: Exception | None = None
    for file in (*WEIGHT_FILES, INDEX):
        try:
            fetched = Path(hf_hub_download(name, file, revision=revision or None))
            parts = [Path(hf_hub_download(name, part, revision=revision or None)) for part in _list_parts(fetched)]
            return parts[0]
        except Exception as error:  # the client's own errors vary with its version
            problem = error
    raise unreachable from problem


def find_cached_weights(hub_id: str, revision: str | None = None) -> Path | None:
    """Return weights of a repository that were downloaded before; None without them."""
    from huggingface_hub import try_to_load_from_cache

    for file in (*WEIGHT_FILES, INDEX):
        try:
            cached = try_to_load_from_cache(hub_id, file, revision=revision)
        except ValueError:  # a name that no repository can have
            return None
        if isinstance(cached, str):
            paths = [Path(cached).with_name(part) for part in _list_parts(Path(cached))]
            return paths[0] if paths and all(path.is_file() for path in paths) else None
    return None


def _list_parts(file: Path) -> list[str]:
    """Return the names of the files that weights lie in: its own, or those that an index names (none if broken)."""
    if file.name != INDEX:
        return [file.name]
    try:
        weights = payload_fields(json.loads(file.read_text(encoding="utf-8"))).get("weight_map")
    except (ValueError, RecursionError):
        return []
    parts = sorted({str(part) for part in payload_fields(weights).values()})
    return parts if all(PART.fullmatch(part) and "/" not in part for part in parts) else []


def _reachable() -> bool:
    """Return whether the hub's host has an address; its client would retry for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    if any(variable.lower() == "https_proxy" for variable in os.environ):
        return True
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
