"""Runs of solo-learn from 1.0.2 on and of CDC's version: a Lightning ``.ckpt``, and ``args.json`` that describes it."""

from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.solo_learn.args import (
    CIFAR10,
    IMAGENET,
    RunArgs,
    find_input_size,
    find_statistics,
    parse_args,
)
from cdc_plugin.checkpoints.formats.solo_learn.networks import NAMES, Network, find_kind, find_network
from cdc_plugin.checkpoints.formats.timm import load_bare
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.checkpoints.weights import build_backbone
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import image_size_default

ONLINE, MOMENTUM = ("backbone.", "encoder."), ("momentum_backbone.", "momentum_encoder.")
# Parts that stand beside the network in the modules of solo-learn; its online classifier is in all of them.
COMPANIONS = {
    *("backbone", "encoder", "momentum_backbone", "momentum_encoder", "classifier", "momentum_classifier"),
    *("projector", "momentum_projector", "predictor", "predictor2", "momentum_predictor", "prototypes"),
    *("head", "momentum_head", "decoder", "transformer_encoder", "pos_enc", "whitening", "conversion_map"),
    *("dino_loss_func", "loss_func"),
    *("queue", "queue_y", "queue_ptr", "queue_index", "local_memory_index", "local_memory_embeddings"),
}
LIGHTNING = "pytorch-lightning_version"


def load_solo_learn(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone of a run, with the stem, the statistics and the image size that its ``args.json`` implies."""
    run = parse_args(checkpoint.sidecar.get("args.json"))
    prefix = _find_prefix(checkpoint, wanted)
    part = checkpoint.below(prefix)
    name = wanted.arch or (run.network if run else None)
    known = any(name in names for names in NAMES.values())
    if known or (wanted.arch is None and find_kind(part.state) is not None):
        network = find_network(part.state, run, name, reconstructs="decoder.mask_token" in checkpoint.state)
    else:  # one that solo-learn does not have, added by the user
        bare = load_bare(part, wanted).backbone
        open_facts = tuple(fact for fact in bare.inferred if fact.startswith("stem."))
        network = Network(bare.spec or {}, part.state, open_facts, bare.input_size if run is None else None)
    stated = find_statistics(run, called_encoder="encoder." in prefix) if run else None
    size = network.size or (find_input_size(run) if run else None)
    usual = 32 if network.spec["family"] == "wide_resnet" else image_size_default(network.spec)
    mean, std = stated or (CIFAR10 if (size or usual) <= 32 else IMAGENET)
    inferred = [*network.inferred, *(() if stated else ("mean", "std")), *(() if size else ("input_size",))]
    facts = (str(checkpoint.path), mean, std, size or usual, tuple(dict.fromkeys(inferred)), wanted.partial)
    backbone, matched = build_backbone(network.spec, network.weights, *facts)
    usual_ones = "usual, no file states them"
    source_of_both = f"as solo-learn has them for {run.dataset}" if run and stated else usual_ones
    why = dict(network.why) | {"mean": source_of_both, "std": source_of_both, "branch": prefix.rstrip(".")}
    why["input_size"] = "usual, no file states it" if "input_size" in inferred else "stated by the run"
    epoch = whole_number(payload_fields(checkpoint.payload).get("epoch"))
    return Loaded(backbone, Origin(_describe_writer(run), epoch, why), matched=matched)


def _find_prefix(checkpoint: Checkpoint, wanted: Wanted) -> str:
    """Return the prefix of the requested network; by default the online one, which solo-learn evaluates."""
    prefixes = MOMENTUM if wanted.branch == "momentum" else ONLINE
    for prefix in prefixes:
        if any(key.startswith(prefix) for key in checkpoint.state):
            return prefix
    present = ", ".join(sorted({key.split(".")[0] for key in checkpoint.state})[:8])
    hint = f"pass another {option('format', 'FORMAT')}"
    if wanted.branch == "momentum":
        hint = f"this method keeps no moving average, leave out {option('branch', 'momentum')}"
    raise CheckpointError(
        f"expected weights below {' or '.join(prefixes)} in {checkpoint.path}, found {present}; {hint}"
    )


def _describe_writer(run: RunArgs | None) -> str:
    if run is None:
        return "solo-learn, without its args.json"
    name = "solo-learn as CDC has it" if run.fork else "solo-learn"
    stage = "linear evaluation" if run.linear else run.method
    return f"{name} ({stage})" if stage else name


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether this is a network of solo-learn's with its ``args.json``, or with solo-learn's companions."""
    state = checkpoint.state
    branches = [prefix for prefix in (*ONLINE, *MOMENTUM) if any(key.startswith(prefix) for key in state)]
    if not branches:
        return False
    if parse_args(checkpoint.sidecar.get("args.json")) is not None:
        return True
    parts = {key.split(".")[0] for key in state}
    if LIGHTNING not in payload_fields(checkpoint.payload) or "classifier" not in parts or not parts <= COMPANIONS:
        return False
    # Either branch will do: in a damaged file one may be beyond recognition, and then loading reports it.
    return any(find_kind(checkpoint.below(prefix).state) is not None for prefix in branches)
