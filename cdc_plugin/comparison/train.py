"""How each method trains. All start from the same backbone, features and views, with the same rates and epochs."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.cc import train_cc
from cdc_plugin.comparison.baselines.classic import cut_graph, find_dense, fit_mixture
from cdc_plugin.comparison.baselines.dcboost import train_dcboost
from cdc_plugin.comparison.baselines.loop import BaselineSettings, BaselineTask, MakeView
from cdc_plugin.comparison.baselines.pseudocal import calibrate_by_mixing
from cdc_plugin.comparison.baselines.scan import train_scan, train_self_label
from cdc_plugin.comparison.baselines.secu import train_secu, train_secu_size
from cdc_plugin.comparison.baselines.spice import train_spice
from cdc_plugin.comparison.baselines.temi import train_temi
from cdc_plugin.comparison.baselines.turtle import train_turtle
from cdc_plugin.comparison.supervised import calibrate_by_temperature, split_labelled, train_linear, train_supervised
from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.core.random_streams import FINAL, INITIALISATION, generator
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.views import channels_last, plain_view, strong_view, weak_view
from cdc_plugin.errors import CheckpointError, DataError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.initialise import InitialHeads, build_initial_heads
from cdc_plugin.training.batches import (
    cached_views,
    fetch_pixels,
    fresh_views,
    load_pixels,
    make_batches,
    training_views,
)
from cdc_plugin.training.features import head_probabilities, kmeans_assignment
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.runtime import Runtime


@dataclass(frozen=True)
class TrainingSetup:
    """What one training is given; all of it is its own to change."""

    config: ResolvedConfig
    backbone: Backbone
    heads: tuple[nn.Module, ...]  # of the model it continues; none for a bare backbone
    images: ImageSet
    features: Tensor  # (N, D) of the plain views before training, on the CPU
    device: torch.device
    start: InitialHeads | None  # the prototype heads that all methods with this seed share, if they fit this one
    views: Tensor | None  # cached features of the views, if the backbone is frozen
    after_epoch: Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Outcome:
    """A trained model: its heads, the last of which predicts; or its predictions if it has none."""

    heads: tuple[nn.Module, ...] = ()
    probs: NDArray[np.float64] | None = None  # (N, C) instead of heads
    assignment: Tensor | None = None  # (N,) instead of heads, if it states no probabilities
    reported: Tensor | None = None  # rows to compute figures on, without those whose labels were used; None for all


def train_cdc(setup: TrainingSetup) -> Outcome:
    """Train the stage itself as the pipeline does; settings exchange its parts."""
    config, runtime, count = setup.config, Runtime(setup.device, setup.config.precision), len(setup.images)
    heads = setup.start
    if heads is None:
        features, randomness = setup.features.to(setup.device), generator(config.seed, INITIALISATION)
        old = head_probabilities(setup.heads[-1].to(setup.device), features) if setup.heads else None
        heads = build_initial_heads(config.init, setup.heads, features, old, config.clusters, config.hidden, randomness)
    trained = nn.Identity() if config.freeze_backbone else setup.backbone
    refiner = Refiner(trained, heads.clustering, heads.calibration, config, runtime, count)
    fresh = fresh_views(config, setup.backbone, setup.images, runtime)
    make = fresh if setup.views is None else cached_views(setup.views, config.clusters, setup.device)
    fetch = fetch_pixels(config, setup.images, runtime) if setup.views is None else None
    batches = make_batches(make, count, config.batch_size, config.seed, fetch)
    refiner.fit(batches, lambda stats: None, setup.after_epoch)
    return Outcome((refiner.networks.clustering_head, refiner.networks.calibration_head))


def cluster_by_kmeans(setup: TrainingSetup) -> Outcome:
    """Cluster the features by k-means, which states no confidence."""
    features, randomness = setup.features.to(setup.device), generator(setup.config.seed, FINAL)
    return Outcome(assignment=torch.from_numpy(kmeans_assignment(features, setup.config.clusters, randomness)))


def keep_heads(setup: TrainingSetup) -> Outcome:
    """Return the clustering heads of the checkpoint untrained."""
    if not setup.heads:
        raise CheckpointError("method 'old' needs a checkpoint with a clustering head, this one is a backbone; omit it")
    return Outcome(setup.heads)


def train_baseline(train: Callable[[BaselineTask], nn.Module], setup: TrainingSetup) -> Outcome:
    """Train a baseline that builds its own head."""
    return Outcome((train(build_task(setup)),))


def assign_clusters(assign: Callable[[BaselineTask], Tensor], setup: TrainingSetup) -> Outcome:
    """Cluster by a baseline that states no confidence."""
    return Outcome(assignment=assign(build_task(setup)).cpu())


def fit_posteriors(setup: TrainingSetup) -> Outcome:
    """Cluster by the posteriors of a mixture."""
    return Outcome(probs=fit_mixture(build_task(setup)).numpy())


def continue_scan(setup: TrainingSetup) -> Outcome:
    """Train SCAN's third stage from the head of the second."""
    return Outcome((train_self_label(build_task(setup), setup.heads[-1].to(setup.device)),))


def mix_images(setup: TrainingSetup) -> Outcome:
    """Calibrate the head of the model on mixtures of images, without labels."""
    task = build_task(setup)
    return Outcome(probs=calibrate_by_mixing(task, setup.heads[-1].to(setup.device)).cpu().double().numpy())


def scale_temperature(setup: TrainingSetup) -> Outcome:
    """Calibrate the head of the model by temperature scaling on the labelled half."""
    labelled, others = split_labelled(len(setup.images), setup.config.seed)
    probs = head_probabilities(setup.heads[-1], setup.features)
    return Outcome(probs=calibrate_by_temperature(probs, _require_labels(setup), labelled), reported=others)


def train_reference(train: Callable[[BaselineTask, Tensor, Tensor], nn.Module], setup: TrainingSetup) -> Outcome:
    """Train a supervised reference on the labelled half."""
    labelled, others = split_labelled(len(setup.images), setup.config.seed)
    return Outcome((train(build_task(setup), _require_labels(setup), labelled),), reported=others)


TRAININGS: dict[str, Callable[[TrainingSetup], Outcome]] = {
    "cdc": train_cdc,
    "kmeans": cluster_by_kmeans,
    "old": keep_heads,
    "cc": partial(train_baseline, train_cc),
    "secu": partial(train_baseline, train_secu),
    "secu-size": partial(train_baseline, train_secu_size),
    "scan2": partial(train_baseline, train_scan),
    "scan3": continue_scan,
    "spice": partial(train_baseline, train_spice),
    "temi": partial(train_baseline, train_temi),
    "turtle": partial(train_baseline, train_turtle),
    "dcboost": partial(assign_clusters, train_dcboost),
    "gmm": fit_posteriors,
    "spectral": partial(assign_clusters, cut_graph),
    "hdbscan": partial(assign_clusters, find_dense),
    "pseudocal": mix_images,
    "temperature": scale_temperature,
    "linear": partial(train_reference, train_linear),
    "supervised": partial(train_reference, train_supervised),
}
# They look at the plain features, or at images, but at no augmented view.
PLAIN_ONLY = {"kmeans", "old", "temi", "turtle", "gmm", "spectral", "hdbscan", "pseudocal", "temperature", "linear"}


def build_task(setup: TrainingSetup) -> BaselineTask:
    """Build the same setup without any label in reach."""
    device, load = setup.device, partial(load_pixels, setup.images, device=setup.device)
    backbone: nn.Module = setup.backbone
    views = training_views(setup.config.augment, setup.backbone)

    makers: tuple[MakeView, MakeView, MakeView] = (
        lambda rows, randomness: channels_last(plain_view(load(rows), views)),
        lambda rows, randomness: channels_last(weak_view(load(rows), views, randomness)),
        lambda rows, randomness: channels_last(strong_view(load(rows), views, randomness)),
    )
    if setup.views is not None:
        backbone, pick = nn.Identity(), cached_views(setup.views, setup.config.clusters, device)
        makers = (
            lambda rows, randomness: pick(rows, randomness).plain,
            lambda rows, randomness: pick(rows, randomness).weak,
            lambda rows, randomness: pick(rows, randomness).strong_of(torch.arange(len(rows))),
        )
    features, dim, count = setup.features.to(device), setup.backbone.feature_dim, len(setup.images)
    settings = BaselineSettings(**{item.name: getattr(setup.config, item.name) for item in fields(BaselineSettings)})
    return BaselineTask(backbone, dim, count, *makers, features, settings, device, setup.after_epoch)


def _require_labels(setup: TrainingSetup) -> Tensor:
    if setup.images.labels is None:
        raise DataError(f"{setup.images.source} has no labels, which this reference method needs; omit it")
    return torch.from_numpy(setup.images.labels)
