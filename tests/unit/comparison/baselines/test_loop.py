import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import Descent, features_of, train_epochs
from cdc_plugin.comparison.baselines.task import Task
from cdc_plugin.config.schema import RefineConfig, steps_per_epoch
from cdc_plugin.core.random_streams import fork_rng
from cdc_plugin.errors import UserError
from cdc_plugin.models.heads import LayeredHead
from tests.helpers.blob_tasks import SIZE, blob_task

CPU = torch.device("cpu")


@dataclass
class Case:
    """A task and what ``after_epoch`` was told."""

    task: Task
    told: list[dict[str, float]]


def case_of(backbone: nn.Module | None = None, **settings) -> Case:
    told: list[dict[str, float]] = []
    given = {"epochs": 4, "lr_heads": 0.02, "lr_backbone": 0.005, **settings}
    return Case(blob_task(backbone or with_batchnorm_and_dropout(), told, **given)[0], told)


def with_batchnorm_and_dropout() -> nn.Module:
    with fork_rng(torch.Generator().manual_seed(1), CPU):
        return nn.Sequential(nn.Linear(SIZE, 5), nn.BatchNorm1d(5), nn.Dropout(0.1)).eval()


def linear(task: Task) -> LayeredHead:
    with fork_rng(torch.Generator().manual_seed(3), CPU):
        return LayeredHead([["linear", task.feature_dim, 3]])


def descend(task: Task, head: nn.Module) -> dict[str, Tensor]:
    """Towards logits of 0, with as much else in the log as a method could want."""

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        logits = head(features_of(task, task.strong(rows, randomness)))
        return {"loss": logits.square().mean(), "share": torch.tensor(0.25), "heads": torch.tensor([1.0, 2.0])}

    return train_epochs(task, head, step)


def test_every_image_is_used_once_an_epoch_in_as_many_steps_as_cdc_takes():
    task, calls = case_of(epochs=2).task, []

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        calls.append(rows)
        return {"loss": torch.tensor(0.0)}

    train_epochs(task, linear(task), step)
    steps = steps_per_epoch(task.images, task.config)
    assert len(calls) == 2 * steps == 8
    for epoch in (calls[:steps], calls[steps:]):
        assert torch.cat(epoch).sort().values.tolist() == list(range(120))
    assert not torch.equal(calls[0], calls[steps])


def test_training_lowers_the_loss_moves_both_parts_and_ends_in_eval_mode():
    case = case_of(epochs=5)
    head = linear(case.task)
    before = copy.deepcopy([*head.parameters(), *case.task.backbone.parameters()])
    descend(case.task, head)
    assert case.told[-1]["loss"] < 0.5 * case.told[0]["loss"]
    after = [*head.parameters(), *case.task.backbone.parameters()]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not head.training
    assert not case.task.backbone.training


def test_numbers_are_told_every_epoch_and_vectors_returned_at_the_end():
    case = case_of(epochs=3)
    last = descend(case.task, linear(case.task))
    assert [told["epoch"] for told in case.told] == [1, 2, 3]
    assert all(set(told) == {"epoch", "loss", "share"} and told["share"] == 0.25 for told in case.told)
    assert last["heads"].tolist() == [1.0, 2.0]
    assert last["loss"].item() == case.told[-1]["loss"]


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    heads = []
    for draws in (0, 7):
        torch.rand(draws)  # of the global generator, which dropout uses
        task = case_of().task
        heads.append(linear(task))
        descend(task, heads[-1])
    assert torch.equal(heads[0][0].weight, heads[1][0].weight)


def test_training_leaves_the_global_random_numbers_alone():
    case = case_of()
    before = torch.get_rng_state()
    descend(case.task, linear(case.task))
    assert torch.equal(before, torch.get_rng_state())


def test_no_epochs_change_nothing():
    case = case_of(epochs=0)
    head = linear(case.task)
    before = head[0].weight.clone()
    assert descend(case.task, head) == {}
    assert torch.equal(head[0].weight, before)
    assert case.told == []


def test_a_backbone_without_weights_is_trained_around():
    case = case_of(nn.Identity())
    descend(case.task, linear(case.task))
    assert case.told[-1]["loss"] < case.told[0]["loss"]


def test_bfloat16_gives_features_in_float32():
    case = case_of(precision="bfloat16")
    assert features_of(case.task, torch.ones(2, SIZE)).dtype == torch.float32
    descend(case.task, linear(case.task))
    assert math.isfinite(case.told[-1]["loss"])


def test_a_loss_that_is_not_finite_is_refused_with_the_rates_to_lower():
    case = case_of()
    head = linear(case.task)
    with torch.no_grad():
        head[0].weight.fill_(math.inf)
    with pytest.raises(UserError, match=r"not finite in epoch 1: .* lr_backbone=0.005 lr_heads=0.02; try a tenth"):
        descend(case.task, head)


def rates_of(config: RefineConfig, steps: int) -> list[list[float]]:
    head, backbone = nn.Linear(2, 2), nn.Linear(2, 2)
    descent = Descent(config, CPU, steps, head, backbone)
    rates = []
    for _ in range(steps):
        descent.step(head(backbone(torch.ones(1, 2))).sum())
        rates.append([group["lr"] for group in descent.optimizer.param_groups])
    return rates


def test_rates_of_heads_and_backbone_fall_along_a_cosine():
    rates = rates_of(RefineConfig(lr_heads=0.2, lr_backbone=0.1), 4)
    factors = [1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2]  # (1 + cos(0, 45, 90, 135 degrees)) / 2
    assert torch.allclose(torch.tensor(rates), torch.tensor([[0.2 * f, 0.1 * f] for f in factors]))


def test_a_constant_schedule_keeps_the_rates():
    assert rates_of(RefineConfig(lr_heads=0.2, lr_backbone=0.1, schedule="constant"), 3) == [[0.2, 0.1]] * 3


def test_the_first_step_of_adam_moves_every_weight_by_its_rate():
    head, backbone = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        head.weight.fill_(2.0)
        backbone.weight.fill_(3.0)
    descent = Descent(RefineConfig(lr_heads=0.25, lr_backbone=0.5), CPU, 10, head, backbone)
    descent.step(head(backbone(torch.ones(1, 1))).sum())  # gradients 3 and 2, of which Adam takes the sign
    assert head.weight.item() == pytest.approx(1.75)
    assert backbone.weight.item() == pytest.approx(2.5)


def test_a_loss_without_gradient_takes_no_step_not_even_of_momentum():
    head = nn.Linear(2, 2)
    descent = Descent(RefineConfig(lr_heads=0.2, lr_backbone=0.1), CPU, 10, head)
    descent.step(head(torch.ones(1, 2)).sum())
    before = head.weight.clone()
    descent.step(torch.tensor(0.0))
    assert torch.equal(head.weight, before)
    assert descent.steps == 2
