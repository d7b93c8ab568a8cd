"""State dicts of timm models, named by the user or by files beside them, or recognised by names and shapes."""

import re
from typing import Any

from cdc_plugin.checkpoints.branches import take_bare_branch
from cdc_plugin.checkpoints.formats import _vit
from cdc_plugin.checkpoints.formats.base import CheckpointFormat, Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.timm.fit import find_distinct, fit, fit_or_guess, settings_changed
from cdc_plugin.checkpoints.formats.timm.index import names_like
from cdc_plugin.checkpoints.formats.torchvision import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    NAME_KEYS,
    TORCHVISION,
    is_resnet,
    torchvision_knows,
)
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.checkpoints.weights import HEAD_PREFIXES, build_backbone
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import timm_input
from cdc_plugin.models.backbone import Backbone

# Settings of a model that are taken from a run; others, such as a path of weights to load, are ignored.
SETTINGS = (
    *("img_size", "patch_size", "window_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "global_pool"),
    *("class_token", "reg_tokens", "no_embed_class", "dynamic_img_size", "strict_img_size", "output_stride"),
    *("qkv_bias", "qk_norm", "init_values", "pre_norm", "stem_type", "act_layer", "norm_layer", "in_chans"),
)
# Released by their authors with mean and std 0.5, and trained by many others with ImageNet's.
PLAIN_VIT = re.compile(r"vit_[a-z]+_patch\d+_\d+")


def stated_arch(checkpoint: Checkpoint) -> str | None:
    """Return the timm name that the checkpoint states, or a file that timm wrote beside it."""
    payload = payload_fields(checkpoint.payload)
    # timm's train.py writes a version and its arguments; a name alone is as often one of torchvision's.
    names = [name for name in map(payload.get, NAME_KEYS) if isinstance(name, str)]
    own = next((name for name in names if {"version", "args"} & set(payload) or not torchvision_knows(name)), None)
    config = payload_fields(checkpoint.sidecar.get("config.json")).get("architecture")
    beside = payload_fields(checkpoint.sidecar.get("args.yaml"))
    named = [name for name in (own, config, beside.get("model")) if isinstance(name, str)]
    return next((name for name in named if knows(name)), None)


def knows(name: str) -> bool:
    """Return whether timm has a model of this name; a pretraining tag after a dot is ignored."""
    import timm

    return bool(timm.is_model(name.split(".")[0]))


def identify(checkpoint: Checkpoint) -> str:
    """Return the timm name of a bare state dict: the one in the file's name, or the only network that fits."""
    state = checkpoint.state
    for name in _names_in(checkpoint.path.stem):
        if fit(name, state):
            return name
    if variant := _vit.find_variant(state):
        return variant[0]
    similar = names_like(state)
    names = sorted((name for name in similar if fit(name, state)), key=lambda name: settings_changed(name, state))
    if not names:
        hint = f" (perhaps of the kind of {', '.join(similar[:4])})" if similar else ""
        raise CheckpointError(
            f"cannot recognise the timm model of {checkpoint.path}{hint}; pass {option('arch', 'NAME')}"
        )
    kinds = find_distinct(names, state)
    if len(kinds) > 1:
        raise CheckpointError(
            f"{checkpoint.path} fits {', '.join(kinds[:4])} by names and shapes, yet they compute "
            f"different features; pass {option('arch', kinds[0])} or another, the one it was trained as"
        )
    return names[0]


def load_timm(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return a backbone from timm weights, with the input that the run or the model's settings state."""
    checkpoint, branch = take_bare_branch(checkpoint, wanted.branch)
    of_run = stated_arch(checkpoint)
    name = wanted.arch or of_run or identify(checkpoint)
    settings = _read_settings(checkpoint) if name == of_run else _vit.infer_settings(checkpoint.state)
    if name != of_run and not wanted.partial and _vit.has_odd_depth(checkpoint.state):
        raise CheckpointError(
            f"{checkpoint.path} has {settings['depth']} blocks, unlike any known transformer of this kind: copy it "
            f"again or, if it was built so, pass {option('partial_weights')}"
        )
    spec, state = fit_or_guess(name, checkpoint.state, settings)
    if _vit.CONV_STEM in state:
        spec["family"] = "conv_stem_vit"
    mean, std, size = _usual_input(name)
    stated = _read_input(checkpoint)
    size = _side(spec["kwargs"].get("img_size")) or stated.get("input_size", size)
    why = {fact: "stated by the run" if fact in stated else "timm's settings of this model" for fact in INPUT_FACTS}
    # A run that states its model uses timm's settings for the rest; bare weights may have been trained differently.
    known = {*stated, *(INPUT_FACTS if of_run else ())}
    if "pos_embed" in state:
        known.add("input_size")
        why["input_size"] = "inferred from its position embeddings"
    authors = "" if of_run or _vit.TRANSFORMER not in state else _vit.find_authors(checkpoint)
    headless = not any(key.startswith(HEAD_PREFIXES) for key in state)
    if not of_run and "mean" not in stated and (authors or (headless and PLAIN_VIT.fullmatch(name))):
        mean, std = IMAGENET_MEAN, IMAGENET_STD
        known |= {"mean", "std"} if _vit.fixes_input(authors, size) else set()
        trained = f"as {authors} trains" if "mean" in known else "assumed for weights without a classifier"
        why |= dict.fromkeys(("mean", "std"), f"ImageNet's, {trained}")
    still_open = [*(fact for fact in INPUT_FACTS if fact not in known), *(["heads"] if _vit.hides_heads(state) else ())]
    facts = (stated.get("mean", mean), stated.get("std", std), size, still_open)
    backbone, matched = build_backbone(spec, state, str(checkpoint.path), *facts, wanted.partial)
    if _vit.TRANSFORMER in state:
        why |= _describe_vit(backbone, authors)
    epoch = whole_number(payload_fields(checkpoint.payload).get("epoch"))
    writer = f"{authors}'s code or one like it" if authors else "timm"
    return Loaded(backbone, Origin(writer, epoch, why | branch), matched=matched)


def _describe_vit(backbone: Backbone, authors: str) -> dict[str, str]:
    """Return what a transformer's features are, and its attention heads where others are as likely."""
    network: Any = backbone.module
    pooled = {"token": "class token", "avg": "mean of the patch tokens"}.get(getattr(network, "global_pool", ""))
    source = f"as {authors} evaluates" if authors else "timm's pooling of this model"
    why = {"features": f"{pooled}, {source}"} if pooled else {}
    if "heads" in backbone.inferred:
        heads = network.blocks[0].attn.num_heads
        usual = "as MoCo v3 has at every width" if heads == 12 else "usual for this width"
        why["heads"] = f"{heads} attention heads assumed, {usual}; no weight reveals them"
    return why


def load_bare(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone of timm or torchvision that bare weights, as inside files of other formats, belong to."""
    arch = wanted.arch
    candidates = [entry for entry in (TIMM, TORCHVISION) if arch is None or (entry.knows and entry.knows(arch))]
    if not candidates:
        raise CheckpointError(f"neither torchvision nor timm has an architecture {arch!r}; check the name")
    chosen = next((entry for entry in candidates if entry.matches(checkpoint)), candidates[0] if arch else None)
    if chosen is None:
        sample = ", ".join(list(checkpoint.state)[:4])
        raise CheckpointError(
            f"cannot recognise the network of {checkpoint.path} by its {len(checkpoint.state)} weights ({sample}); "
            f"pass {option('arch', 'NAME')} (a torchvision or timm name)"
        )
    return chosen.load(checkpoint, wanted)


def _read_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    *runs, config = _read_records(checkpoint)
    stated: dict[str, Any] = {}
    for source in (config.get("model_args"), *(run.get("model_kwargs") for run in runs)):
        stated |= {key: value for key, value in payload_fields(source).items() if key in SETTINGS}
    pools = [run["gp"] for run in runs if isinstance(run.get("gp"), str)]
    if pools:
        stated["global_pool"] = pools[0]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in stated.items() if _is_plain(v)}


def _read_records(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the arguments of a training run, in the file and beside it, and a hub config; empty where missing."""
    beside = checkpoint.sidecar
    records = (payload_fields(checkpoint.payload).get("args"), beside.get("args.yaml"), beside.get("config.json"))
    return [payload_fields(record) for record in records]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (bool, int, float, str))


def _read_input(checkpoint: Checkpoint) -> dict[str, Any]:
    *runs, config = _read_records(checkpoint)
    flat = config if "architecture" in config else {}  # an older one
    stated: dict[str, Any] = {}
    for source in (*runs, payload_fields(config.get("pretrained_cfg")), flat):
        facts: dict[str, Any] = {name: three_numbers(source.get(name)) for name in ("mean", "std")}
        facts["input_size"] = _side(source.get("img_size")) or _side(source.get("input_size"))
        stated = {key: value for key, value in facts.items() if value} | stated
    return stated


def _side(size: Any) -> int | None:
    """Return the side of square images that a setting means: a number, or the last of several."""
    last = size[-1] if isinstance(size, (list, tuple)) and size else size
    return last if isinstance(last, int) and last > 0 else None


def _usual_input(name: str) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    try:
        return timm_input(name)
    except RuntimeError:  # a tag of weights that this timm does not know
        return timm_input(name.split(".")[0])


def three_numbers(value: Any) -> list[float] | None:
    """Return numbers for the three channels; one number stands for all of them, anything else gives None."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(number, (int, float)) for number in value):
        return None
    return [float(number) for number in value] * (3 // len(value)) if len(value) in (1, 3) else None


def _names_in(stem: str) -> list[str]:
    """Return the timm names that occur in a file name as whole words, longest first."""
    import timm

    words = [name for name in timm.list_models() if name in stem]
    whole = [name for name in words if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", stem)]
    return sorted(whole, key=len, reverse=True)


def _matches(checkpoint: Checkpoint) -> bool:
    if stated_arch(checkpoint) is not None:
        return True
    plain = is_resnet(checkpoint.state)  # torchvision's names, which some of timm's ResNets share
    if names_like(checkpoint.state) and not plain:
        return True
    named = [name for name in _names_in(checkpoint.path.stem) if not (plain and torchvision_knows(name))]
    return any(fit(name, checkpoint.state) for name in named)


TIMM = CheckpointFormat(_matches, load_timm, knows)
