"""Build a task that takes a second: "images" are points around three centres, views are the points with noise."""

import copy

import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import BaselineSettings, BaselineTask, MakeView

CLUSTERS, EACH, SIZE, FEATURES = 3, 40, 6, 8


def blob_task(
    backbone: nn.Module, logs: list[dict[str, float]] | None = None, **settings: object
) -> tuple[BaselineTask, Tensor]:
    """Return the task, on a copy of the backbone, and the blob (N,) of every point, for the test only."""
    randomness = torch.Generator().manual_seed(0)
    truth = torch.arange(CLUSTERS * EACH) % CLUSTERS
    points = 2.0 * torch.eye(SIZE)[truth] + 0.3 * torch.randn(len(truth), SIZE, generator=randomness)
    defaults = {"batch_size": 60, "sub_batch_size": 30, "epochs": 5, "lr_heads": 1e-3, "lr_backbone": 1e-4}
    chosen = BaselineSettings(CLUSTERS, **{**defaults, **settings})  # type: ignore[arg-type]
    backbone = copy.deepcopy(backbone)
    with torch.no_grad():
        features = backbone(points)

    def view(noise: float) -> MakeView:
        return lambda rows, drawn: points[rows] + noise * torch.randn(len(rows), SIZE, generator=drawn)

    def note(log: dict[str, float]) -> None:
        if logs is not None:
            logs.append(log)

    views = (view(0.0), view(0.1), view(0.3))
    cpu = torch.device("cpu")
    return BaselineTask(backbone, features.shape[1], len(points), *views, features, chosen, cpu, note), truth


def linear_backbone() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(SIZE, FEATURES)


def predict(task: BaselineTask, head: nn.Module) -> Tensor:
    """Return the clusters (N,) of all points by backbone and head."""
    with torch.no_grad():
        logits: Tensor = head(task.backbone(task.plain(torch.arange(task.image_count), torch.Generator())))
    return logits.argmax(dim=1)


def purity(clusters: Tensor, truth: Tensor) -> float:
    """Return the share of points whose blob is the commonest of their cluster; 1/3 for a single cluster."""
    table = torch.bincount(clusters * CLUSTERS + truth, minlength=CLUSTERS**2).reshape(CLUSTERS, CLUSTERS)
    return table.max(dim=1).values.sum().item() / len(truth)
