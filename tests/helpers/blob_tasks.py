"""A task that takes a second: "images" are points around three centres, views are the points with noise."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.task import MakeView, Task
from cdc_plugin.config.schema import RefineConfig, resolve

CLUSTERS, EACH, SIZE, FEATURES = 3, 40, 6, 8


def blob_task(
    backbone: nn.Module, logs: list[dict[str, float]] | None = None, **settings: object
) -> tuple[Task, Tensor]:
    """The task, on a copy of the backbone, and which blob (N,) every point is of, for the test only."""
    randomness = torch.Generator().manual_seed(0)
    truth = torch.arange(CLUSTERS * EACH) % CLUSTERS
    points = 2.0 * torch.eye(SIZE)[truth] + 0.3 * torch.randn(len(truth), SIZE, generator=randomness)
    given: dict[str, object] = {"clusters": CLUSTERS, "batch_size": 60, "sub_batch_size": 30, "epochs": 5, "seed": 0}
    config = resolve(RefineConfig(**{**given, **settings}), len(points), 32)  # type: ignore[arg-type]
    backbone = copy.deepcopy(backbone)
    with torch.no_grad():
        features = backbone(points)

    def view(noise: float) -> MakeView:
        return lambda rows, drawn: points[rows] + noise * torch.randn(len(rows), SIZE, generator=drawn)

    def note(log: dict[str, float]) -> None:
        if logs is not None:
            logs.append(log)

    views = (view(0.0), view(0.1), view(0.3))
    return Task(backbone, features.shape[1], len(points), *views, features, config, torch.device("cpu"), note), truth


def linear_backbone() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(SIZE, FEATURES)


def predictions(task: Task, head: nn.Module) -> Tensor:
    """Clusters (N,) of all points by the backbone and head as they are now."""
    with torch.no_grad():
        found: Tensor = head(task.backbone(task.plain(torch.arange(task.images), torch.Generator()))).argmax(dim=1)
    return found


def purity(found: Tensor, truth: Tensor) -> float:
    """Share of points whose blob is the commonest of their cluster; 1/3 for a single cluster."""
    table = torch.bincount(found * CLUSTERS + truth, minlength=CLUSTERS**2).reshape(CLUSTERS, CLUSTERS)
    return table.max(dim=1).values.sum().item() / len(truth)
