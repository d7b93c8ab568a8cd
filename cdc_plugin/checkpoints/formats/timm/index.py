"""Which timm models a set of names and shapes may belong to, looked up in a table instead of building them all."""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from cdc_plugin.checkpoints.formats._vit import find_variant
from cdc_plugin.checkpoints.weights import HEAD_PREFIXES

TABLE = Path(__file__).with_name("index.json")
# What depends on the image size, on the number of register tokens or on the pooling, not on the model's name.
ADJUSTABLE = re.compile(
    r"(^norm\.|^fc_norm\.|(^|\.)(pos_embed|reg_token|register_tokens|mask_token|attn_mask|relative_\w+|rel_pos\w*)(\.|$)"
    r"|num_batches_tracked$)"
)
# Of models with the same weights those named after another one, or after where their weights came from.
DERIVED = ("deit", "tf_", "legacy_", "gluon_", "tv_")
PATCHES = "patch_embed.proj.weight"
# Of networks that their authors release under names of their own.
RELEASED = {
    "storage_tokens": (
        *(f"vit_{size}_patch16_dinov3_qkvb" for size in ("tiny", "small", "small_plus", "base", "large", "huge_plus")),
        "vit_7b_patch16_dinov3",
    ),
    "cls_attn_blocks.0.attn.qkv.weight": tuple(
        f"xcit_{size}_p{patch}_224"
        for size in ("nano_12", "tiny_12", "tiny_24", "small_12", "small_24", "medium_24", "large_24")
        for patch in (16, 8)
    ),
    "downsample_layers.0.0.weight": tuple(f"convnext_{size}" for size in ("tiny", "small", "base", "large")),
}


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a short digest of names and shapes, leaving out what a model's settings may change."""
    kept = [key for key in state if not key.startswith(HEAD_PREFIXES) and not ADJUSTABLE.search(key)]
    lines = [f"{key}:{tuple(state[key].shape)[: 2 if key == PATCHES else None]}" for key in kept]
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="replace")).hexdigest()[:10]


def names_like(state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the timm models whose weights have these names and shapes, plain ones first; build them to be sure."""
    variant = find_variant(state)
    released = next((names for mark, names in RELEASED.items() if mark in state), ())
    return released or _table().get(fingerprint(state), (variant[0],) if variant else ())


def make_table(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[str]]:
    """Return the table for models by name, to write it again when timm has new ones."""
    table: dict[str, list[str]] = {}
    for name in sorted(states, key=lambda name: (name.startswith(DERIVED), len(name), name)):
        table.setdefault(fingerprint(states[name]), []).append(name)
    return dict(sorted(table.items()))


@lru_cache(maxsize=1)
def _table() -> dict[str, tuple[str, ...]]:
    return {key: tuple(names) for key, names in json.loads(TABLE.read_text(encoding="utf-8")).items()}
