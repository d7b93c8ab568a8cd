"""Checkpoints of solo-learn, 1.0.2 to today, and of the version of it that CDC was developed with.

A run writes a Lightning ``.ckpt``, which does not say what the network is, and beside it ``args.json``, which does.
"""

from __future__ import annotations

from cdc_plugin.checkpoints.formats.bare import load_bare
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.solo_learn.args import (
    CIFAR10,
    IMAGENET,
    RunArgs,
    input_size,
    parse_args,
    statistics,
)
from cdc_plugin.checkpoints.formats.solo_learn.networks import NAMES, Network, find_network, kind_of
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, read_as_inert, strip_prefix
from cdc_plugin.checkpoints.weights import build_with_weights
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import describe, image_size_default
from cdc_plugin.models.backbone import Backbone

ONLINE, MOMENTUM = ("backbone.", "encoder."), ("momentum_backbone.", "momentum_encoder.")
# Parts that stand beside the network in the modules of solo-learn; its online classifier is in all of them.
CLASSIFIER = "classifier"
COMPANIONS = {
    *("backbone", "encoder", "momentum_backbone", "momentum_encoder", "classifier", "momentum_classifier"),
    *("projector", "momentum_projector", "predictor", "predictor2", "momentum_predictor", "prototypes"),
    *("head", "momentum_head", "decoder", "transformer_encoder", "pos_enc", "whitening", "conversion_map"),
    *("dino_loss_func", "loss_func"),
    *("queue", "queue_y", "queue_ptr", "queue_index", "local_memory_index", "local_memory_embeddings"),
}
LIGHTNING = "pytorch-lightning_version"

# What its runs leave in the optimiser's part of the file.
read_as_inert(
    *("omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata", "omegaconf.dictconfig.DictConfig"),
    *("omegaconf.listconfig.ListConfig", "typing.Any", "functools.partial", "builtins.getattr", "pathlib.PosixPath"),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path")),
    *(f"{package}.methods.base.static_lr" for package in ("solo", "pretrain")),
    *(f"{package}.utils.lars.{kind}" for package in ("solo", "pretrain") for kind in ("LARS", "LARSWrapper")),
    "solo.utils.lr_scheduler.LinearWarmupCosineAnnealingLR",
    "pl_bolts.optimizers.lr_scheduler.LinearWarmupCosineAnnealingLR",
    *("torch.optim.sgd.SGD", "torch.optim.adam.Adam", "torch.optim.adamw.AdamW"),
    *("torch.optim.lr_scheduler.MultiStepLR", "torch.optim.lr_scheduler.ReduceLROnPlateau"),
)


def load_solo_learn(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """The backbone of a run, with the stem, the statistics and the image size that its ``args.json`` implies."""
    run = parse_args(checkpoint.sidecar.get("args.json"))
    prefix = _branch(checkpoint, wanted)
    part = checkpoint.below(prefix)
    network = _network(part, checkpoint, run, wanted)
    if network is None:  # one that solo-learn does not have, put in by the user
        found = load_bare(part, wanted).backbone
        assert found.spec is not None
        open_facts = tuple(fact for fact in found.inferred if fact.startswith("stem."))
        network = Network(found.spec, part.state, open_facts, found.input_size if run is None else None)
    source = str(checkpoint.path)
    module, feature_dim, matched = build_with_weights(network.spec, network.weights, source, wanted.partial)

    said = statistics(run, called_encoder="encoder." in prefix) if run else None
    size = network.size or (input_size(run) if run else None)
    usual = 32 if network.spec["family"] == "wide_resnet" else image_size_default(network.spec)
    mean, std = said or (CIFAR10 if (size or usual) <= 32 else IMAGENET)
    inferred = [*network.inferred, *(() if said else ("mean", "std")), *(() if size else ("input_size",))]
    backbone = Backbone(
        module, feature_dim, mean, std, size or usual, network.spec, inferred=tuple(dict.fromkeys(inferred))
    )
    stated = f"as solo-learn has them for {run.dataset}" if run and said else "usual, nothing beside the file says"
    why = dict(network.why) | {"mean": stated, "std": stated, "branch": prefix.rstrip(".")}
    why["input_size"] = "usual, nothing beside the file says" if "input_size" in inferred else "stated by the run"
    epoch = payload_fields(checkpoint.payload).get("epoch")
    origin = Origin(_writer(run), describe(network.spec), epoch if isinstance(epoch, int) else None, why)
    return Loaded(backbone, origin, matched=matched)


def _branch(checkpoint: Checkpoint, wanted: Wanted) -> str:
    """The prefix of the network that is meant; the online one is what solo-learn evaluates."""
    prefixes = MOMENTUM if wanted.branch == "momentum" else ONLINE
    for prefix in prefixes:
        if any(key.startswith(prefix) for key in checkpoint.state):
            return prefix
    present = ", ".join(sorted({key.split(".")[0] for key in checkpoint.state})[:8])
    hint = "leave --branch out" if wanted.branch == "momentum" else "pass another --format"
    raise UserError(
        f"expected weights below {' or '.join(prefixes)} in {checkpoint.path}, found {present}; "
        f"{'this method keeps no moving average, ' if wanted.branch == 'momentum' else ''}{hint}"
    )


def _network(part: Checkpoint, whole: Checkpoint, run: RunArgs | None, wanted: Wanted) -> Network | None:
    name = wanted.arch or (run.network if run else None)
    known_name = any(name in names for names in NAMES.values())
    if not known_name and (wanted.arch is not None or kind_of(part.state) is None):
        return None
    return find_network(part.state, run, name, reconstructs="decoder.mask_token" in whole.state)


def _writer(run: RunArgs | None) -> str:
    if run is None:
        return "solo-learn, without its args.json"
    name = "solo-learn as CDC has it" if run.fork else "solo-learn"
    stage = "linear evaluation" if run.linear else run.method
    return f"{name} ({stage})" if stage else name


def matches(checkpoint: Checkpoint) -> bool:
    state = checkpoint.state
    branches = [prefix for prefix in (*ONLINE, *MOMENTUM) if any(key.startswith(prefix) for key in state)]
    if not branches:
        return False
    if parse_args(checkpoint.sidecar.get("args.json")) is not None:
        return True
    parts = {key.split(".")[0] for key in state}
    if LIGHTNING not in payload_fields(checkpoint.payload) or CLASSIFIER not in parts or not parts <= COMPANIONS:
        return False
    # Either branch will do: of a damaged file one may be beyond recognition, and then loading says so.
    return any(kind_of(strip_prefix(state, prefix)) is not None for prefix in branches)
