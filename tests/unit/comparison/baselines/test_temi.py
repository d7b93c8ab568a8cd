import math

import torch
import torch.nn.functional as F
from torch import nn

from cdc_plugin.comparison.baselines import temi
from cdc_plugin.comparison.baselines.loop import ORDER
from cdc_plugin.comparison.baselines.temi import pair_losses, train_temi
from cdc_plugin.core.random_streams import generator
from tests.helpers.blob_tasks import blob_task


def test_the_loss_agrees_with_loops(randomness):
    heads, pairs, clusters = 2, 3, 4
    student, teacher = (torch.randn(heads, 2 * pairs, clusters, generator=randomness).softmax(dim=2) for _ in range(2))
    sizes = torch.rand(heads, 1, clusters, generator=randomness) + 0.1
    expected = []
    for head in range(heads):
        total = 0.0
        for i in range(pairs):
            j = pairs + i
            same = [float(teacher[each, i] @ teacher[each, j]) for each in range(heads)]
            for s, t in ((i, j), (j, i)):
                inside = sum(
                    float(student[head, s, c] * teacher[head, t, c]) ** 0.6 / float(sizes[head, 0, c])
                    for c in range(clusters)
                )
                total -= sum(same) / heads * math.log(inside)
        expected.append(total / (2 * pairs))
    found = pair_losses(student.log(), teacher.log(), sizes)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_a_pair_that_the_teachers_separate_weighs_nothing_and_sure_logits_stay_finite():
    apart = F.log_softmax(torch.tensor([[[500.0, 0], [0, 500]]]), dim=2).requires_grad_()  # one head, one pair
    loss = pair_losses(apart, apart.detach(), torch.full((1, 1, 2), 0.5)).sum()
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert torch.isfinite(apart.grad).all()


def test_the_teacher_with_the_lowest_loss_is_returned_and_predicts_as_it_was_trained(monkeypatch):
    seen = []

    def pretend(student, teacher, sizes):
        seen.append(teacher)
        return torch.tensor([2.0, 3.0, 1.0]) + 0 * student.mean()

    for name, value in {"HEADS": 3, "LONGER": 1, "TEACHER_MOMENTUM": 1.0, "pair_losses": pretend}.items():
        monkeypatch.setattr(temi, name, value)  # momentum 1: teachers stay as they began
    task, _ = blob_task(nn.Identity(), epochs=1, batch_size=120, sub_batch_size=120)
    log_probs = F.log_softmax(train_temi(task)(task.features), dim=1)
    order = torch.randperm(120, generator=generator(task.settings.seed, ORDER, 0))
    torch.testing.assert_close(log_probs[order], seen[0][2, :120])
