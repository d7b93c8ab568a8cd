"""Turn what was asked for into what a run uses: every open choice is made here, once, without labels."""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import ConfigError, option

PAPER_LR_HEADS, PAPER_LR_BACKBONE = 1e-4, 5e-5  # made for 12,000 steps on CIFAR-10
FULL_RATE_STEPS = 4_500  # shorter runs take larger rates, in proportion
IMAGES_SEEN = 50_000  # images times epochs of a round on small data
ROUNDS = 6  # at most, where the epochs are left open; most runs have settled earlier
CROP_SCALE = 0.2  # SCAN's; until the augmentation is chosen


@dataclass
class ResolvedConfig(RefineConfig):
    """The settings a run uses: nothing is left to choose, but for an augmentation that suits the initial heads."""

    backbone: str = ""
    data: str = ""
    init: str = "prototypes"
    clusters: int = 2
    mini_clusters: int = 0  # their number follows the confidence of every batch
    calibration_strength: float = 0.0
    epochs: int = 0
    rounds: int = 1
    batch_size: int = 2
    sub_batch_size: int = 2
    lr_heads: float = 0.0
    lr_backbone: float = 0.0
    input_size: int = 1
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    track: list[str] = field(default_factory=list)
    sync_batchnorm: bool = False


@dataclass(frozen=True)
class Facts:
    """What is known of images and backbone when the settings are resolved."""

    image_count: int
    input_size: int  # of the backbone, as mean and std
    mean: Sequence[float]
    std: Sequence[float]
    head_clusters: tuple[int, ...] = ()  # for every clustering head in the checkpoint, how many clusters it has
    calibration_strength: float = 0.0  # of the calibration asked for, unless the user states another
    processes: int = 1  # that train together


def resolve(request: RefineConfig, facts: Facts) -> ResolvedConfig:
    """Return the settings of a run on these data and this backbone; resolving them again changes nothing.

    B follows the paper: 1,000 for small images, 500 for large ones, at least 25 images per cluster, but at least four
    batches per epoch on small sets; B_s is B / 2 from 1,000 images on and B / 4 below, as there. The paper's rates are
    made for 12,000 steps; a round on a few thousand images gives a few hundred in reasonable time, at rates that grow
    with the steps that are missing, up to twentyfold.
    """
    clusters = choose_clusters(request.clusters, facts.head_clusters)
    batch_size = choose_batch_size(request.batch_size, facts.image_count, facts.input_size, clusters)
    sub_batch_size = min(request.sub_batch_size or max(32, batch_size // (2 if batch_size >= 1000 else 4)), batch_size)
    epochs, rounds = choose_epochs(request, facts.image_count)
    steps = epochs / rounds * steps_per_epoch(facts.image_count, batch_size, sub_batch_size)
    speed_up = min(20.0, max(1.0, FULL_RATE_STEPS / max(1, steps)))
    augment = dataclasses.replace(
        request.augment,
        flip=True if request.augment.flip is None else request.augment.flip,
        crop_scale=request.augment.crop_scale or CROP_SCALE,
    )
    defaults: dict[str, Any] = {
        "calibration_strength": facts.calibration_strength,
        "lr_heads": PAPER_LR_HEADS * speed_up,
        "lr_backbone": PAPER_LR_BACKBONE * speed_up,
        "mean": list(facts.mean),
        "std": list(facts.std),
        "sync_batchnorm": facts.processes > 1,
    }
    # What the user gave is kept to the digit, so that the same command can resume the run.
    stated = {k: v for k, v in vars(request).items() if v is not None and k not in request.from_recipe}
    decided: dict[str, Any] = {
        "init": choose_init(request.init, facts.head_clusters, clusters),
        "clusters": clusters,
        "mini_clusters": check_mini_clusters(request.mini_clusters or 0, batch_size, request.batch_size or batch_size),
        "epochs": epochs,
        "rounds": rounds,
        "batch_size": batch_size,
        "sub_batch_size": sub_batch_size,
        # An epoch looks at one of them; features that others have computed have none.
        "frozen_views": 0 if request.features else min(request.frozen_views, max(1, epochs)),
        "input_size": facts.input_size,
        "from_recipe": [],
        "augment": augment,
    }
    return ResolvedConfig(**{**defaults, **stated, **decided})


def choose_clusters(requested: int | None, head_clusters: Sequence[int]) -> int:
    """Return C: the user's number, else the old model's.

    >>> choose_clusters(None, [10])
    10
    """
    if requested is not None:
        return requested
    if not head_clusters:
        raise ConfigError(f"missing {option('clusters', 10)}: the checkpoint is a backbone and does not say how many")
    return head_clusters[-1]


def choose_init(requested: str | None, head_clusters: Sequence[int], clusters: int) -> str:
    """Return how the heads begin: as requested, else from the old heads where their size is right.

    >>> choose_init(None, [10], 10), choose_init(None, [10], 12)
    ('keep', 'prototypes')
    """
    sizes = set(head_clusters)
    if requested == "grow" and not (sizes and clusters >= max(sizes)):
        grow, known = option("init", "grow"), ", ".join(map(str, sorted(sizes)))
        if not sizes:
            raise ConfigError(f"{grow} needs a checkpoint with a clustering head, this one is a backbone; leave it out")
        raise ConfigError(
            f"{grow} adds clusters to the {known} of the old model, {option('clusters', clusters)} are fewer; take "
            f"{option('clusters', max(sizes) + 1)} or more"
        )
    if requested == "keep" and sizes != {clusters}:
        keep, known = option("init", "keep"), ", ".join(map(str, sorted(sizes)))
        if not sizes:
            raise ConfigError(f"{keep} needs a checkpoint with a clustering head, this one is a backbone; leave it out")
        raise ConfigError(
            f"{keep} keeps the {known} clusters of the old model; leave {option('clusters', clusters)} out"
        )
    return requested or ("keep" if sizes == {clusters} else "prototypes")


def choose_epochs(request: RefineConfig, image_count: int) -> tuple[int, int]:
    """Return how many epochs a run has at most, and how many rounds they are divided into.

    >>> choose_epochs(RefineConfig(), 5000), choose_epochs(RefineConfig(rounds=1), 5000)
    ((60, 6), (10, 1))
    >>> choose_epochs(RefineConfig(epochs=30), 5000), choose_epochs(RefineConfig(epochs=30, rounds=3), 5000)
    ((30, 1), (30, 3))
    """
    rounds = request.rounds or (ROUNDS if request.epochs is None else 1)
    rounds = 1 if request.freeze_backbone else rounds  # features that stay the same have nothing to review
    if request.epochs is None:
        return rounds * round_epochs(image_count), rounds
    return request.epochs, max(1, min(rounds, request.epochs))


def round_epochs(image_count: int) -> int:
    """Return how many epochs a round has where they are left open.

    >>> [round_epochs(count) for count in (100, 2000, 60_000)]
    [100, 25, 10]
    """
    return min(100, max(10, round(IMAGES_SEEN / image_count)))


def find_round(epoch: int, epochs: int, rounds: int) -> tuple[int, int]:
    """Return the first epoch, from 0, of the round that an epoch belongs to, and that of the next round.

    >>> [find_round(epoch, epochs=5, rounds=2) for epoch in range(5)]
    [(0, 2), (0, 2), (2, 5), (2, 5), (2, 5)]
    """
    ends = [epochs * number // rounds for number in range(rounds + 1)]
    number = bisect.bisect_right(ends, min(epoch, epochs - 1))
    return ends[number - 1], ends[number]


def choose_batch_size(requested: int | None, image_count: int, input_size: int, clusters: int) -> int:
    """Return B, so that every batch holds at least one image per cluster."""
    usual = max(25 * clusters, min(1000 if input_size <= 128 else 500, image_count // 4), 64)
    batch_size = min(requested or usual, image_count)
    if batch_size < clusters:
        raise ConfigError(
            f"a batch of {batch_size} cannot hold one for each of {clusters} clusters; "
            f"found {image_count} in all; take batch_size={4 * clusters} or more, or fewer clusters"
        )
    while min(batch_sizes(image_count, batch_size)) < clusters:  # near-equal batches can be smaller than asked for
        batch_size += 1
    return batch_size


def check_mini_clusters(stated: int, batch_size: int, asked: int) -> int:
    """Return K as it was stated; refuse more than a batch has images, each of which would then be its own target.

    ``asked`` is the batch that was asked for, which small data cut: of its K the same share is proposed.

    >>> check_mini_clusters(40, batch_size=1000, asked=1000)
    40
    """
    if stated <= batch_size:
        return stated
    fitting = max(1, min(stated * batch_size // asked, batch_size // 2))
    raise ConfigError(
        f"mini_clusters={stated} is more than the {batch_size} images of a batch: nothing would calibrate the "
        f"confidence; take mini_clusters={fitting}, or 0 for a number that follows the confidence"
    )


def batch_sizes(image_count: int, batch_size: int) -> list[int]:
    """Return the sizes of an epoch's near-equal batches: no image is left out and none is used twice.

    >>> batch_sizes(10, 4)
    [5, 5]
    """
    count = max(1, round(image_count / batch_size))
    return [image_count // count + (index < image_count % count) for index in range(count)]


def count_sub_batches(batch_size: int, sub_batch_size: int) -> int:
    """Return into how many near-equal sub-batches a batch is cut; none holds a single image.

    >>> count_sub_batches(100, 30), count_sub_batches(3, 1)
    (3, 1)
    """
    return max(1, min(round(batch_size / sub_batch_size), batch_size // 2))


def steps_per_epoch(image_count: int, batch_size: int, sub_batch_size: int) -> int:
    """Return how many steps both optimisers take in an epoch."""
    return sum(count_sub_batches(size, sub_batch_size) for size in batch_sizes(image_count, batch_size))
