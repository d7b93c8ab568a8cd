"""The settings of a run: every field with its help text and the values it takes. A *recipe* is the YAML of these.

The help serves ``--help``, the table in the README and the error messages. ``None`` means "choose for me": `resolve`
puts a value in its place once the data are known, without labels.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

LARGEST_SIDE = 2048  # of images, in pixels: twice that of the largest published network
PRECISIONS = ("auto", "float32", "bfloat16", "float16")


def setting(
    default: Any,
    help: str,
    *,
    auto: str = "",
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    length: int | None = None,
    symbol: str = "",
    metavar: str = "",
) -> Any:
    """Return a dataclass field that says what it is for and which values it takes.

    ``auto`` says what None means, ``symbol`` is the paper's, ``metavar`` stands for the value in ``--help``. Limits are
    those of a number, or of every number in a list, which holds ``length`` of them.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    if any(choice not in help for choice in choices):
        metadata["help"] = f"{help} ({', '.join(choices)})"
    words = str(default).lower() if isinstance(default, (bool, list, type(None))) else str(default)
    metadata["default"] = auto or words  # as the help shows it
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class AugmentConfig:
    """The weak and strong views (Sec. 4.1 and its appendix: those of SCAN)."""

    flip: bool | None = setting(
        None, "mirror left and right", auto="only if the backbone's features do not change with it"
    )
    crop_scale: float | None = setting(
        None,
        "smallest share of the area that random crops keep",
        auto="as small as the backbone's features bear",
        above=0,
        at_most=1,
    )
    operations: int = setting(4, "random operations of a strong view", at_least=0, at_most=100)
    exclude: list[str] = setting([], "operations that do not suit the data")
    cutout: int | None = setting(
        None,
        "largest side of the hole in a strong view, in pixels",
        auto="half the image size, at most 32",
        at_least=0,
        at_most=10_000,
    )


@dataclass
class RefineConfig:
    """One run of the self-labeling stage. The paper's symbols: C, B, B_s, K, H and w_en."""

    RECIPES: ClassVar[str] = "cdc"

    backbone: str | None = setting(None, "checkpoint, run folder, timm:NAME or hf-hub:NAME", metavar="FILE")
    format: str | None = setting(None, "what wrote the checkpoint", auto="recognised by its content", metavar="NAME")
    arch: str | None = setting(None, "network of the checkpoint", auto="recognised by its weights", metavar="NAME")
    branch: str | None = setting(None, "online or momentum (EMA, teacher), where a checkpoint has both", metavar="B")
    head: int | None = setting(None, "which of several clustering heads, from 0", metavar="N")
    pool: str | None = setting(
        None,
        "vector of the backbone that is the embedding",
        auto="what its authors evaluate",
        choices=("class", "mean", "attention", "projection"),
        metavar="WORD",
    )
    init: str | None = setting(
        None,
        "how the heads start: keep those of an old clustering model, grow (keep them, and add clusters for new kinds "
        "of images), prototypes or random",
        auto="keep where there are any, else prototypes",
        choices=("keep", "grow", "prototypes", "random"),
        metavar="HOW",
    )
    trust_checkpoint: bool = setting(False, "open pickled modules, which runs the code in them")
    partial_weights: bool = setting(False, "accept a checkpoint that lacks weights of the backbone")
    features: list[str] | None = setting(
        None,
        "vectors that other networks have computed, in place of a backbone: .npy, .npz, .parquet or data sets of the "
        "same samples; --data are then pictures for the report",
        auto="none",
        metavar="FILE",
    )
    data: str | None = setting(None, "folder, .npz, .npy, tar shards, hf:NAME:SPLIT or a name", metavar="PATH_OR_NAME")
    data_root: str | None = setting(None, "where named data sets are", auto="$CDC_DATA, else data")
    labels: bool = setting(True, "use class sub-folders and label arrays for the report, never for training")
    out: str | None = setting(None, "result folder", auto="a new one below cdc-runs", metavar="DIR")
    track: list[str] | None = setting(
        None, "log also to tensorboard or wandb; may be given twice", auto="none", metavar="NAME"
    )

    clusters: int | None = setting(
        None,
        "number of clusters; auto finds it, auto:5-50 within a range",
        at_least=2,
        at_most=1_000_000,
        symbol="C",
    )
    clusters_between: list[int] | None = setting(
        None,
        "range in which the number of clusters is looked for, as --clusters auto:LOW-HIGH states it",
        auto="2 to 50, where it is looked for",
        at_least=2,
        at_most=1000,
        length=2,
    )
    mini_clusters: int | None = setting(
        None,
        "mini-clusters of a batch; fewer penalise confidence more",
        auto="follows the confidence of every batch",
        at_least=0,
        at_most=10_000_000,
        symbol="K",
    )
    hidden: int = setting(512, "width of the heads", at_least=1, at_most=100_000, symbol="H")
    entropy_weight: float = setting(1.0, "weight of the negative entropy", symbol="w_en")
    heads: str = setting(
        "dual",
        "dual, or one head only: clu (trained on pseudo-labels) or clu+cal (with both losses)",
        choices=("dual", "clu", "clu+cal"),
    )
    stop_gradient: bool = setting(True, "keep the calibration loss from moving the backbone")
    calibration: str = setting("mini-clusters", "calibration loss: mini-clusters, label-smoothing, focal, l1 or none")
    calibration_strength: float | None = setting(
        None,
        "smoothing, gamma or weight of the norm, for the losses that have one",
        auto="that of the loss",
        at_least=0,
    )
    level: str = setting(
        "estimated",
        "mean confidence that a run ends with: estimated (the shape is learned, the level follows from what the "
        "features before training know of the clusters) or learned (as in the paper)",
        choices=("estimated", "learned"),
    )
    selection: str = setting(
        "confident",
        "which images are trusted: confident, fixed, flexmatch or freematch; with add-ons, as confident+gsf",
    )
    sizes: str = setting(
        "equal",
        "of the clusters: equal (as in the paper) or estimated (from the calibrated predictions), for unbalanced sets "
        "whose kinds lie well apart",
        choices=("equal", "estimated"),
    )
    threshold: float = setting(0.95, "confidence that fixed and flexmatch ask for", at_least=0, at_most=1)
    selection_momentum: float = setting(
        0.9,
        "share of the past in moving averages, per batch: those of freematch and of estimated sizes",
        at_least=0,
        at_most=1,
    )

    passes: str = setting(
        "fast",
        "fast: one pass for selection and targets, and three of four images in training, trusted ones first; "
        "full: two passes and all images, as in the paper",
        choices=("fast", "full"),
    )
    epochs: int | None = setting(
        None, "epochs of training", auto="until the clusters settle", at_least=0, at_most=1_000_000, metavar="N"
    )
    rounds: int | None = setting(
        None,
        "rounds that the epochs are divided into; after each, in which the rates fall to 0, the clusters are checked "
        "without labels: the heads start again where they are stuck, and training ends where little moves any more",
        auto="at most 6, but 1 where epochs are given or the backbone is frozen",
        at_least=1,
        at_most=1000,
        metavar="N",
    )
    batch_size: int | None = setting(
        None,
        "images per batch, over which selection and mini-clusters are computed",
        auto="from images and clusters",
        at_least=1,
        at_most=10_000_000,
        symbol="B",
    )
    sub_batch_size: int | None = setting(
        None,
        "images per step of both optimisers; BatchNorm has no statistics of one image",
        auto="a half or a quarter of the batch",
        at_least=2,
        at_most=10_000_000,
        symbol="B_s",
    )
    lr_heads: float | None = setting(
        None, "learning rate of the heads", auto="the paper's, higher for short runs", at_least=0, at_most=10
    )
    lr_backbone: float | None = setting(
        None, "learning rate of the backbone", auto="the paper's, higher for short runs", at_least=0, at_most=10
    )
    schedule: str = setting("cosine", "course of the rates; constant in the paper", choices=("cosine", "constant"))
    freeze_backbone: bool = setting(False, "train the heads only, on cached features")
    train_blocks: int | None = setting(
        None,
        "last blocks of the backbone that are trained, with what follows them; the others stay as they are",
        auto="all",
        at_least=1,
        at_most=1000,
        metavar="N",
    )
    recompute_blocks: bool = setting(
        False, "compute the blocks of a transformer or ConvNeXt again in the backward pass, which saves memory"
    )
    frozen_views: int = setting(
        4,
        "weak and strong views per image that a frozen backbone computes once; with 0 the features of images near by "
        "take the place of strong views, one pass does for nine, and confidence is less reliable",
        at_least=0,
        at_most=10_000,
    )

    input_size: int | None = setting(
        None, "side of the images, in pixels", auto="the backbone's", at_least=1, at_most=LARGEST_SIDE
    )
    mean: list[float] | None = setting(None, "mean of every channel", auto="the backbone's", length=3)
    std: list[float] | None = setting(
        None, "standard deviation of every channel", auto="the backbone's", above=0, length=3
    )
    # Which of these three a recipe states, not the user: they yield to what the checkpoint states.
    from_recipe: list[str] = setting([], "")
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    seed: int = setting(0, "seed of all random numbers", at_least=-(2**63), at_most=2**63 - 1, metavar="S")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", metavar="D")
    precision: str = setting(
        "auto", "of the backbone: auto is bfloat16 on GPUs that have it, else float32", choices=PRECISIONS
    )
    deterministic: bool = setting(False, "the same bits again on the same GPU, which takes longer; CPUs always do so")
    compile: bool = setting(
        False, "compile the backbone by torch.compile: a minute at the start; no gain on the CPUs it was tried on"
    )
    sync_batchnorm: bool | None = setting(
        None, "BatchNorm over the images of all processes of torchrun", auto="where there are several"
    )
    on_collapse: str = setting(
        "stop", "what to do when clusters have died and nothing more is learned", choices=("stop", "warn")
    )


INPUT_FACTS = ("mean", "std", "input_size")
# What files may set. The folder of a stranger states how to train and nothing else; a recipe, which the user names,
# states the inputs as well. Everything else is for the command line or the caller alone: what lowers a guard
# (trust_checkpoint, partial_weights), where results go (out, track) and which device computes.
METHOD_SETTINGS = (
    *(
        "clusters",
        "clusters_between",
        "mini_clusters",
        "hidden",
        "entropy_weight",
        "heads",
        "stop_gradient",
        "calibration",
    ),
    *(
        "calibration_strength",
        "level",
        "selection",
        "sizes",
        "threshold",
        "selection_momentum",
        "passes",
        "epochs",
        "batch_size",
    ),
    *(
        "rounds",
        "sub_batch_size",
        "lr_heads",
        "lr_backbone",
        "schedule",
        "freeze_backbone",
        "train_blocks",
        "recompute_blocks",
        "frozen_views",
        "augment",
        "seed",
    ),
    *("precision", "deterministic", "sync_batchnorm", "on_collapse", "init", "labels", *INPUT_FACTS),
)
RECIPE_SETTINGS = (
    *METHOD_SETTINGS,
    *("backbone", "format", "arch", "branch", "head", "pool", "features", "data", "data_root", "from_recipe"),
    "compile",
)


@functools.cache
def list_settings(schema: type) -> dict[str, dataclasses.Field[Any]]:
    """Return every setting of a schema by its full name, such as ``augment.flip``.

    >>> list(list_settings(AugmentConfig))
    ['flip', 'crop_scale', 'operations', 'exclude', 'cutout']
    """
    settings = {}
    for item in dataclasses.fields(schema):
        if item.metadata:
            settings[item.name] = item
        else:
            inner = list_settings(item.default_factory)  # type: ignore[arg-type]
            settings |= {f"{item.name}.{name}": field for name, field in inner.items()}
    return settings


def settings_table(schema: type = RefineConfig) -> str:
    """Render the settings as a Markdown table, for the README."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, item in list_settings(schema).items():
        rule = item.metadata
        symbol = f" ({rule['symbol']})" if rule["symbol"] else ""
        if rule["help"]:
            lines.append(f"| `{name}`{symbol} | {rule['default']} | {rule['help']} |")
    return "\n".join(lines)
