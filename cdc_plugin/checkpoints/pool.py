"""Choose which vector of a network is the embedding: its class token, a mean, its attention's or its projection."""

from dataclasses import replace
from typing import Any

from cdc_plugin.checkpoints.formats.base import Loaded
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import ConfigError
from cdc_plugin.models.architectures import build, timm_features
from cdc_plugin.models.backbone import Backbone

WORDS = {
    "class": "class token",
    "mean": "mean of its last map or patch tokens",
    "attention": "its attention pool",
    "projection": "the projection into the space it shares with texts",
}
TIMM = {"class": "token", "mean": "avg", "attention": "map"}


def find_pools(backbone: Backbone) -> tuple[str, list[str]]:
    """Return which vector a network gives, and all that it can give."""
    network: Any = backbone.module
    spec = backbone.spec or {}
    if spec.get("family") == "timm_tower":
        trunk = _find_trunk(backbone)
        return "projection", ["projection", *(find_pools(trunk)[1] if trunk else ())]
    if spec.get("family") != "timm" or not hasattr(network, "num_prefix_tokens") or not hasattr(network, "blocks"):
        return "mean", ["mean"]
    present = {
        "class": getattr(network, "cls_token", None) is not None,
        "mean": True,
        "attention": getattr(network, "attn_pool", None) is not None,
        "projection": "projection" in spec,
    }
    used = next((word for word, name in TIMM.items() if name == network.global_pool), "mean")
    return "projection" if present["projection"] else used, [word for word, there in present.items() if there]


def choose_pool(loaded: Loaded, word: str) -> Loaded:
    """Return the network with the vector that a user asks for."""
    backbone = loaded.backbone
    used, possible = find_pools(backbone)
    if word not in possible:
        raise ConfigError(f"pool is one of {', '.join(possible)} for this network; found {word!r}")
    if word == used:
        return loaded
    if trunk := _find_trunk(backbone):
        why = {**loaded.origin.why, "features": f"{WORDS[word]}, as asked"}
        return choose_pool(replace(loaded, backbone=trunk, origin=replace(loaded.origin, why=why)), word)
    spec = dict(backbone.spec or {})
    spec.pop("projection", None)
    rotary = "rope_temperature" in spec["kwargs"] or "dinov3" in spec["name"] or "eva" in spec["name"]
    kwargs = {**spec["kwargs"], "global_pool": TIMM[word], "use_fc_norm" if rotary else "fc_norm": False}
    spec["kwargs"] = kwargs
    network, features = build(spec)
    state = {key.replace("fc_norm.", "norm."): value for key, value in backbone.module.state_dict().items()}
    load_strictly(network, {key: state[key] for key in network.state_dict() if key in state}, "the network")
    mean, std = backbone.mean.tolist(), backbone.std.tolist()
    changed = Backbone(network, features, mean, std, backbone.input_size, spec, backbone.inferred)
    why = {**loaded.origin.why, "features": f"{WORDS[word]}, as asked"}
    return replace(loaded, backbone=changed, origin=replace(loaded.origin, why=why))


def _find_trunk(backbone: Backbone) -> Backbone | None:
    """Return the network of a tower before its projection; None where that is part of the network."""
    spec = backbone.spec or {}
    if spec.get("family") != "timm_tower" or spec["head"] == "own":
        return None
    network: Any = backbone.module.trunk
    plain = {"family": "timm", "name": spec["name"], "kwargs": spec["kwargs"]}
    facts = (backbone.mean.tolist(), backbone.std.tolist(), backbone.input_size, plain, backbone.inferred)
    return Backbone(network, timm_features(network), *facts)
