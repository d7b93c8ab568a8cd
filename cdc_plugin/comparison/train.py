"""How each method trains. All begin with the same backbone, features and views, at the same rates and epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.cc import train_cc
from cdc_plugin.comparison.baselines.scan import train_scan, train_self_label
from cdc_plugin.comparison.baselines.secu import train_secu, train_secu_size
from cdc_plugin.comparison.baselines.spice import train_spice
from cdc_plugin.comparison.baselines.task import Task
from cdc_plugin.comparison.supervised import calibrate_by_temperature, split, train_linear, train_supervised
from cdc_plugin.config.schema import RefineConfig, steps_per_epoch
from cdc_plugin.core.random_streams import FINAL, INITIALISATION, generator
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.views import channels_last, plain_view, strong_view, weak_view
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.initialise import InitialHeads, initial_heads
from cdc_plugin.training.batches import batches_of, cached_views, fresh_views, training_views
from cdc_plugin.training.features import head_probabilities, kmeans_assignment
from cdc_plugin.training.refiner import Refiner

AfterEpoch = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Bench:
    """What one training is given; all of it is its own to change.

    Args:
        heads: of the model it goes on with; none for a bare backbone.
        features: (N, D) of the plain views as it begins, on the CPU.
        start: the prototype heads that all methods with this seed share, where they fit this one.
        views: cached features of the views, where the backbone is frozen.
    """

    config: RefineConfig
    backbone: Backbone
    heads: tuple[nn.Module, ...]
    images: ImageSet
    features: Tensor
    device: torch.device
    start: InitialHeads | None
    views: Tensor | None
    after_epoch: AfterEpoch


@dataclass(frozen=True)
class Outcome:
    """A trained model: its heads, the last of which predicts; or what it says of the images where it has none.

    Args:
        probs: (N, C) in place of heads.
        assignment: (N,) in place of heads, where it states no probabilities.
        reported: rows that the figures are of; None for all. Those that labels were used of are left out.
    """

    heads: tuple[nn.Module, ...] = ()
    probs: NDArray[np.float64] | None = None
    assignment: Tensor | None = None
    reported: Tensor | None = None


def train_cdc(bench: Bench) -> Outcome:
    """The stage itself, as the pipeline runs it; settings exchange its parts."""
    config, device = bench.config, bench.device
    heads = bench.start or _initial(bench)
    frozen, count = config.freeze_backbone, len(bench.images)
    steps = (config.epochs or 0) * steps_per_epoch(count, config)
    trained = nn.Identity() if frozen else bench.backbone
    refiner = Refiner(trained, heads.clustering, heads.calibration, config, device, count, steps)
    make = fresh_views(config, bench.backbone, bench.images, device)
    if bench.views is not None:
        make = cached_views(bench.views, device)
    refiner.fit(batches_of(make, count, config), lambda stats: None, bench.after_epoch)
    return Outcome((refiner.clustering_head, refiner.calibration_head))


def _initial(bench: Bench) -> InitialHeads:
    config, features = bench.config, bench.features.to(bench.device)
    assert config.init is not None
    old = head_probabilities(bench.heads[-1].to(bench.device), features) if bench.heads else None
    return initial_heads(config.init, bench.heads, features, old, config, generator(config.seed, INITIALISATION))


def by_kmeans(bench: Bench) -> Outcome:
    assert bench.config.clusters is not None
    features, randomness = bench.features.to(bench.device), generator(bench.config.seed, FINAL)
    return Outcome(assignment=torch.from_numpy(kmeans_assignment(features, bench.config.clusters, randomness)))


def as_it_is(bench: Bench) -> Outcome:
    if not bench.heads:
        raise UserError("method 'old' needs a checkpoint with a clustering head, this one is a backbone; leave it out")
    return Outcome(bench.heads)


def by_baseline(train: Callable[[Task], nn.Module]) -> Callable[[Bench], Outcome]:
    return lambda bench: Outcome((train(task_of(bench)),))


def by_self_label(bench: Bench) -> Outcome:
    return Outcome((train_self_label(task_of(bench), bench.heads[-1].to(bench.device)),))


def by_temperature(bench: Bench) -> Outcome:
    labelled, others = split(len(bench.images), bench.config.seed)
    probs = head_probabilities(bench.heads[-1], bench.features)
    return Outcome(probs=calibrate_by_temperature(probs, _labels(bench), labelled), reported=others)


def by_linear(bench: Bench) -> Outcome:
    labelled, others = split(len(bench.images), bench.config.seed)
    return Outcome((train_linear(task_of(bench), _labels(bench), labelled),), reported=others)


def by_supervised(bench: Bench) -> Outcome:
    labelled, others = split(len(bench.images), bench.config.seed)
    return Outcome((train_supervised(task_of(bench), _labels(bench), labelled),), reported=others)


TRAININGS: dict[str, Callable[[Bench], Outcome]] = {
    "cdc": train_cdc,
    "kmeans": by_kmeans,
    "old": as_it_is,
    "cc": by_baseline(train_cc),
    "secu": by_baseline(train_secu),
    "secu-size": by_baseline(train_secu_size),
    "scan2": by_baseline(train_scan),
    "scan3": by_self_label,
    "spice": by_baseline(train_spice),
    "temperature": by_temperature,
    "linear": by_linear,
    "supervised": by_supervised,
}


def task_of(bench: Bench) -> Task:
    """The same bench without any label in reach."""
    config, device, pixels = bench.config, bench.device, bench.images.batch
    backbone: nn.Module = bench.backbone
    settings = training_views(config, bench.backbone)

    def image(rows: Tensor) -> Tensor:
        return pixels(rows).to(device, non_blocking=True)

    plain, weak, strong = (
        lambda rows, randomness: channels_last(plain_view(image(rows), settings)),
        lambda rows, randomness: channels_last(weak_view(image(rows), settings, randomness)),
        lambda rows, randomness: channels_last(strong_view(image(rows), settings, randomness)),
    )
    if bench.views is not None:
        backbone, pick = nn.Identity(), cached_views(bench.views, device)
        plain, weak, strong = (
            lambda rows, randomness: pick(rows, randomness).plain,
            lambda rows, randomness: pick(rows, randomness).weak,
            lambda rows, randomness: pick(rows, randomness).strong_of(torch.arange(len(rows), device=device)),
        )
    return Task(
        backbone,
        bench.backbone.feature_dim,
        len(bench.images),
        plain,
        weak,
        strong,
        bench.features.to(device),
        config,
        device,
        bench.after_epoch,
    )


def _labels(bench: Bench) -> Tensor:
    if bench.images.labels is None:
        raise UserError(f"{bench.images.source} has no labels, which this reference method needs; leave it out")
    return torch.from_numpy(bench.images.labels)


def fits(start: InitialHeads, config: RefineConfig) -> bool:
    """Whether the common prototype heads are those that a config would make."""
    head = start.clustering
    return config.init == "prototypes" and (head.layers[0][2], head.clusters) == (config.hidden, config.clusters)  # type: ignore[index]
