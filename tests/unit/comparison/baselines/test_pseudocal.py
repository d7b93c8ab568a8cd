import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from cdc_plugin.comparison.baselines.loop import WEIGHTS
from cdc_plugin.comparison.baselines.pseudocal import calibrate_by_mixing
from cdc_plugin.core.random_streams import generator
from tests.helpers.blob_tasks import blob_task, linear_backbone


def build_head(size: int, scale: float) -> nn.Linear:
    head = nn.Linear(size, 3)
    with torch.no_grad():
        head.weight.copy_(scale * torch.randn(3, size, generator=torch.Generator().manual_seed(1)))
        head.bias.zero_()
    return head


def test_the_temperature_is_the_best_one_for_mixtures_of_two_clusters():
    task, _ = blob_task(linear_backbone(), sub_batch_size=7)
    head = build_head(8, 5.0)
    inputs = task.plain(torch.arange(120), torch.Generator())
    with torch.no_grad():
        logits = head(task.backbone(inputs))
        labels = logits.argmax(dim=1).tolist()
        partners = torch.randperm(120, generator=generator(task.settings.seed, WEIGHTS)).tolist()
        chosen = [i for i in range(120) if labels[i] != labels[partners[i]]]
        mixed = [head(task.backbone(0.65 * inputs[i] + 0.35 * inputs[partners[i]])).double().numpy() for i in chosen]

    def loss(temperature: float) -> float:
        rows = [row / temperature for row in mixed]
        return sum(np.log(np.exp(row).sum()) - row[labels[i]] for i, row in zip(chosen, rows, strict=True))

    best = minimize_scalar(loss, bounds=(0.05, 100), method="bounded", options={"xatol": 1e-8}).x
    assert 0.06 < best < 50
    probs = calibrate_by_mixing(task, head)
    torch.testing.assert_close(probs, (logits / best).softmax(dim=1), rtol=1e-3, atol=1e-4)


def test_a_head_that_sees_a_single_cluster_keeps_its_probabilities():
    task, _ = blob_task(nn.Identity())
    head = nn.Linear(6, 3)
    nn.init.zeros_(head.weight)
    probs = calibrate_by_mixing(task, head)
    torch.testing.assert_close(probs, head(task.features).softmax(dim=1).detach())


@pytest.mark.parametrize("factor", [2.0, 20.0])
def test_how_sure_the_head_was_before_makes_no_difference(factor):
    task, _ = blob_task(nn.Identity())
    probs = [calibrate_by_mixing(task, build_head(6, scale)) for scale in (5.0, 5.0 * factor)]
    torch.testing.assert_close(probs[0], probs[1], rtol=1e-3, atol=1e-4)
