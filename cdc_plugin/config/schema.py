"""What a run is made of: defaults < recipe < flags < key=value. A *recipe* is the YAML of these fields.

``None`` means "choose for me": `resolve` puts numbers in their place once the data are known, without labels,
and the result is what ``config.yaml`` in the result folder holds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from cdc_plugin.errors import UserError


@dataclass
class AugmentConfig:
    """The weak and strong views (Sec. 4.1 and its appendix: those of SCAN)."""

    flip: bool | None = None  # mirror left and right; None: only if the backbone takes no notice of it
    crop_scale: float | None = None  # least share of the area that random crops keep; None: likewise
    operations: int = 4  # random operations of a strong view
    exclude: list[str] = field(default_factory=list)  # operations that do not suit the data
    cutout: int | None = None  # largest side of the hole in a strong view, in pixels


@dataclass
class RefineConfig:
    """One run of the self-labeling stage. The paper's symbols: C, B, B_s, K, H and w_en."""

    backbone: str | None = None  # checkpoint file, result folder, or timm:NAME
    format: str | None = None  # what wrote the checkpoint; None: found out from its content
    arch: str | None = None  # network of a checkpoint that does not say
    branch: str | None = None  # online or momentum (EMA, teacher), where a checkpoint holds both
    head: int | None = None  # which of several clustering heads in the checkpoint
    init: str | None = None  # keep (the old model's heads), prototypes or random; None: keep where there are heads
    trust_checkpoint: bool = False  # open pickled modules, which runs the code they name
    partial_weights: bool = False  # go on although weights of the backbone are missing
    data: str | None = None  # folder, .npz, .npy or the name of a data set
    data_root: str | None = None  # where named data sets lie
    labels: bool = True  # use class sub-folders or label arrays for the report (never for training)
    out: str | None = None  # result folder; None: a new one below cdc-runs
    track: list[str] | None = None  # tensorboard, wandb; None: none, or at --resume those that the run began with

    clusters: int | None = None  # C
    mini_clusters: int | None = None  # K
    hidden: int = 512  # H
    entropy_weight: float = 1.0  # w_en
    heads: str = "dual"  # or one head only: clu (pseudo-labels), clu+cal (both losses)
    stop_gradient: bool = True  # the calibration loss does not move the backbone
    calibration: str = "mini-clusters"  # or label-smoothing, focal, l1, none
    calibration_strength: float | None = None  # of those that have one: smoothing, gamma, weight of the norm
    selection: str = "confident"  # or fixed, flexmatch, freematch; with add-ons, as confident+gsf
    threshold: float = 0.95  # confidence that fixed and flexmatch ask for
    selection_momentum: float = 0.9  # share of the past in freematch's moving averages, a batch

    # fast: one pass for selection and targets, and three of four images in training, those that are trusted first;
    # full: two passes, and all images, as in the paper.
    passes: str = "fast"
    epochs: int | None = None
    batch_size: int | None = None  # B: selection and mini-clusters are computed over it
    sub_batch_size: int | None = None  # B_s: one step of both optimisers
    lr_heads: float | None = None
    lr_backbone: float | None = None
    schedule: str = "cosine"  # or constant, as in the paper
    freeze_backbone: bool = False
    frozen_views: int = (
        4  # weak and strong views a sample whose features a frozen backbone gives once; at most `epochs`
    )

    input_size: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    # Which of these three a recipe states, not the user: they yield to what the checkpoint states.
    from_recipe: list[str] = field(default_factory=list)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    seed: int = 0
    device: str = "auto"
    precision: str = "float32"  # or bfloat16 / float16: autocast
    compile: bool = False  # the backbone by torch.compile: a minute at the start; no gain on the CPUs it was tried on
    # BatchNorm over the images of all processes of torchrun; None: where there are several. True: also in one process,
    # by the same arithmetic. On CPUs the results of any number of processes are then the same bit for bit.
    sync_batchnorm: bool | None = None
    on_collapse: str = "stop"  # or warn: what to do when clusters have died and nothing is learned any more


INPUT_FACTS = ("mean", "std", "input_size")
HEADS = ("dual", "clu", "clu+cal")
SCHEDULES = ("cosine", "constant")
PRECISIONS = ("float32", "bfloat16", "float16")
PAPER_LR_HEADS, PAPER_LR_BACKBONE = 1e-4, 5e-5  # made for 12,000 steps on CIFAR-10
FULL_RATE_STEPS = 4_500  # shorter runs take larger rates, in proportion
IMAGES_SEEN = 50_000  # images times epochs of a run on small data


def check(config: RefineConfig) -> None:
    """Refuse values that no run can use."""
    if config.clusters is not None and config.clusters < 2:
        raise UserError(f"clusters must be at least 2, found {config.clusters}")
    for name in ("mini_clusters", "batch_size", "sub_batch_size", "input_size", "hidden", "frozen_views"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, found {value}")
    if config.epochs is not None and config.epochs < 0:
        raise UserError(f"epochs must be 0 or more, found {config.epochs}")
    for name in ("lr_heads", "lr_backbone"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < 10:
            raise UserError(f"{name} must lie between 0 and 10, found {value}")
    if config.sub_batch_size == 1:
        raise UserError("sub_batch_size must be at least 2: BatchNorm has no statistics of one image")
    for name in ("threshold", "selection_momentum"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"{name} must lie between 0 and 1, found {getattr(config, name)}")
    if config.calibration_strength is not None and config.calibration_strength < 0:
        raise UserError(f"calibration_strength must be 0 or more, found {config.calibration_strength}")
    _one_of("heads", config.heads, HEADS)
    _one_of("passes", config.passes, ("fast", "full"))
    _one_of("schedule", config.schedule, SCHEDULES)
    _one_of("precision", config.precision, PRECISIONS)
    _one_of("on_collapse", config.on_collapse, ("stop", "warn"))
    scale = config.augment.crop_scale
    if scale is not None and not 0 < scale <= 1:
        raise UserError(f"augment.crop_scale is a share of the area above 0 and up to 1, found {scale}")
    for name in ("mean", "std"):
        value = getattr(config, name)
        if value is not None and len(value) != 3:
            raise UserError(f"{name} takes 3 numbers, one a channel, found {len(value)}")


def resolve(config: RefineConfig, images: int, input_size: int) -> RefineConfig:
    """Put a number in place of every None that depends on the size of the data.

    B follows the paper: 1,000 for small images, 500 for large ones, at least 25 images a cluster, but at
    least four batches an epoch on small sets; B_s is B / 2 from 1,000 images on and B / 4 below, as there.
    The paper's rates are made for 12,000 steps; a set of a few thousand images gives a few hundred in
    reasonable time, at rates that grow with the steps that are missing, up to twentyfold. K stays None: it
    follows the confidence of every batch (`core.targets.mini_cluster_count`).
    """
    assert config.clusters is not None
    clusters = config.clusters
    batch = config.batch_size or max(25 * clusters, min(1000 if input_size <= 128 else 500, images // 4), 64)
    batch = min(batch, images)
    if batch < clusters:
        raise UserError(
            f"a batch of {batch} images cannot hold one image for each of {clusters} clusters; "
            f"found {images} images; take batch_size={4 * clusters} or more, or fewer --clusters"
        )
    while min(batch_sizes(images, batch)) < clusters:  # near-equal batches can be smaller than asked for
        batch += 1
    sub_batch = min(config.sub_batch_size or max(32, batch // (2 if batch >= 1000 else 4)), batch)
    config = dataclasses.replace(config, batch_size=batch, sub_batch_size=sub_batch)
    epochs = config.epochs
    if epochs is None:
        epochs = min(100, max(10, round(IMAGES_SEEN / images)))
    faster = min(20.0, max(1.0, FULL_RATE_STEPS / max(1, epochs * steps_per_epoch(images, config))))
    return dataclasses.replace(
        config,
        mini_clusters=None if config.mini_clusters is None else min(config.mini_clusters, batch),
        epochs=epochs,
        frozen_views=min(config.frozen_views, max(1, epochs)),  # an epoch looks at one of them
        lr_heads=PAPER_LR_HEADS * faster if config.lr_heads is None else config.lr_heads,
        lr_backbone=PAPER_LR_BACKBONE * faster if config.lr_backbone is None else config.lr_backbone,
        input_size=input_size,
    )


def batch_sizes(images: int, batch: int) -> list[int]:
    """An epoch in near-equal batches, so that no image is left out and none is used twice."""
    count = max(1, round(images / batch))
    return [images // count + (index < images % count) for index in range(count)]


def steps_per_epoch(images: int, config: RefineConfig) -> int:
    """Steps of both optimisers in an epoch of a resolved config."""
    assert config.batch_size is not None
    assert config.sub_batch_size is not None
    return sum(sub_batches(size, config.sub_batch_size) for size in batch_sizes(images, config.batch_size))


def sub_batches(images: int, part: int) -> int:
    """Into how many near-equal sub-batches a batch is cut; never so many that one holds a single image."""
    return max(1, min(round(images / part), images // 2))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} is one of {', '.join(known)}; found {value!r}")
