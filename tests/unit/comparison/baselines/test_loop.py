import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import (
    BaselineOptimizer,
    BaselineTask,
    compute_features,
    train_epochs,
)
from cdc_plugin.core.random_streams import fork_rng
from cdc_plugin.errors import ConfigError
from cdc_plugin.models.heads import LayeredHead
from tests.helpers.blob_tasks import SIZE, blob_task

CPU = torch.device("cpu")


@dataclass
class Case:
    """A task, a linear head, and what ``after_epoch`` was called with."""

    task: BaselineTask
    head: LayeredHead
    logs: list[dict[str, float]]

    def train(self) -> dict[str, Tensor]:
        """Train towards logits of 0, with everything in the log that a method could want."""

        def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
            logits = self.head(compute_features(self.task, self.task.strong(rows, randomness)))
            return {"loss": logits.square().mean(), "share": torch.tensor(0.25), "heads": torch.tensor([1.0, 2.0])}

        return train_epochs(self.task, self.head, step)


def build_case(backbone: nn.Module | None = None, **changes) -> Case:
    logs: list[dict[str, float]] = []
    with fork_rng(torch.Generator().manual_seed(1), CPU):
        backbone = backbone or nn.Sequential(nn.Linear(SIZE, 5), nn.BatchNorm1d(5), nn.Dropout(0.1)).eval()
        task, _ = blob_task(backbone, logs, **{"epochs": 4, "lr_heads": 0.02, "lr_backbone": 0.005, **changes})
        return Case(task, LayeredHead([["linear", task.feature_dim, 3]]), logs)


def test_every_image_is_used_once_per_epoch_in_as_many_steps_as_cdc_takes():
    case, calls = build_case(epochs=2), []

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        calls.append(rows)
        return {"loss": torch.tensor(0.0)}

    train_epochs(case.task, case.head, step)
    assert len(calls) == 8  # two epochs of two batches of 60, of two sub-batches each
    for epoch in (calls[:4], calls[4:]):
        assert torch.cat(epoch).sort().values.tolist() == list(range(120))
    assert not torch.equal(calls[0], calls[4])


def test_training_moves_both_parts_reports_numbers_every_epoch_and_returns_vectors_at_the_end():
    case = build_case(epochs=5)
    before = copy.deepcopy([*case.head.parameters(), *case.task.backbone.parameters()])
    means = case.train()
    assert case.logs[-1]["loss"] < 0.5 * case.logs[0]["loss"]
    after = [*case.head.parameters(), *case.task.backbone.parameters()]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not case.head.training
    assert not case.task.backbone.training
    assert [log["epoch"] for log in case.logs] == [1, 2, 3, 4, 5]
    assert all(set(log) == {"epoch", "loss", "share"} and log["share"] == 0.25 for log in case.logs)
    assert means["heads"].tolist() == [1.0, 2.0]
    assert means["loss"].item() == case.logs[-1]["loss"]


def test_bfloat16_gives_features_in_float32():
    case = build_case(precision="bfloat16")
    assert compute_features(case.task, torch.ones(2, SIZE)).dtype == torch.float32
    case.train()
    assert math.isfinite(case.logs[-1]["loss"])


def test_a_loss_that_is_not_finite_is_refused_with_the_rates_to_lower():
    case = build_case()
    with torch.no_grad():
        case.head[0].weight.fill_(math.inf)
    with pytest.raises(ConfigError, match=r"epoch 1: .* lr_backbone=0.005 lr_heads=0.02"):
        case.train()


# (1 + cos(0, 45, 90, 135 degrees)) / 2
COSINE = [1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2]


@pytest.mark.parametrize(("schedule", "factors"), [("cosine", COSINE), ("constant", [1, 1, 1, 1])])
def test_rates_of_heads_and_backbone_follow_the_schedule(schedule, factors):
    head, backbone = nn.Linear(2, 2), nn.Linear(2, 2)
    task = build_case(lr_heads=0.2, lr_backbone=0.1, schedule=schedule).task
    optimizer = BaselineOptimizer(task, 4, head, backbone)
    for factor in factors:
        optimizer.step(head(backbone(torch.ones(1, 2))).sum())
        rates = [group["lr"] for group in optimizer.optimizer.param_groups]
        assert rates == pytest.approx([0.2 * factor, 0.1 * factor])


def test_the_first_step_of_adam_moves_every_weight_by_its_rate_and_a_loss_without_gradient_none():
    head, backbone = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        head.weight.fill_(2.0)
        backbone.weight.fill_(3.0)
    optimizer = BaselineOptimizer(build_case(lr_heads=0.25, lr_backbone=0.5).task, 10, head, backbone)
    optimizer.step(head(backbone(torch.ones(1, 1))).sum())  # gradients 3 and 2, of which Adam takes the sign
    for _ in range(2):
        assert head.weight.item() == pytest.approx(1.75)
        assert backbone.weight.item() == pytest.approx(2.5)
        optimizer.step(torch.tensor(0.0))  # without gradient no step, not even of momentum
    assert optimizer.steps == 3
