import copy
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.pretext.config import ResolvedPretrainConfig
from cdc_plugin.training.pretext.methods import BYOL, METHODS, RESNETS, fresh_backbone, require_lightly, spec_of

SIZES = {"hidden": 12, "projection": 6, "predictor": 8}
CONFIG = ResolvedPretrainConfig(**SIZES, queue=16, temperature=0.2, symmetric=False)
BOTH_SIDES = replace(CONFIG, symmetric=True)


@pytest.fixture(autouse=True)
def _own_randomness():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def task_of(method: str, config: ResolvedPretrainConfig = CONFIG):
    network = nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return METHODS[method](Backbone(network, 10, [0.5] * 3, [0.5] * 3, 8), config)


def views(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 8, 8), torch.randn(count, 3, 8, 8)


def test_the_loss_of_moco_is_the_cross_entropy_against_the_queue():
    task = task_of("mocov2")
    task.eval()  # BatchNorm by its memory: groups of keys then make no difference
    first, second = views()
    (criterion,) = task.criteria
    queue = criterion.memory_bank.bank.clone()
    loss, embedding = task(first, second)
    query = F.normalize(task.online(first), dim=1)
    key = F.normalize(task.momentum(second), dim=1)
    expected = 0.0
    for one, right in zip(query, key, strict=True):
        scores = [one.dot(right).item() / 0.2, *(one.dot(wrong).item() / 0.2 for wrong in queue)]
        expected += math.log(sum(math.exp(score) for score in scores)) - scores[0]
    assert loss.item() == pytest.approx(expected / 8, rel=1e-4)
    assert torch.allclose(F.normalize(embedding, dim=1), query, atol=1e-6)
    # The keys have taken the oldest places.
    assert torch.allclose(criterion.memory_bank.bank[:8], key, atol=1e-6)
    assert torch.equal(criterion.memory_bank.bank[8:], queue[8:])


def test_symmetric_moco_is_the_mean_of_both_sides_each_against_its_own_queue():
    task = task_of("mocov2", BOTH_SIDES).eval()
    first, second = views()
    with torch.no_grad():
        queries = [F.normalize(task.online(view), dim=1) for view in (first, second)]
        keys = [F.normalize(task.momentum(view), dim=1) for view in (second, first)]
    queues = [criterion.memory_bank.bank.clone() for criterion in task.criteria]
    assert not torch.equal(*queues)
    expected = 0.0
    for query, key, queue in zip(queries, keys, queues, strict=True):
        scores = torch.cat([(query * key).sum(dim=1, keepdim=True), query @ queue.T], dim=1) / 0.2
        expected += F.cross_entropy(scores, torch.zeros(8, dtype=torch.long)).item() / 2
    loss, embedding = task(first, second)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(F.normalize(embedding, dim=1), queries[0], atol=1e-6)
    for criterion, key in zip(task.criteria, keys, strict=True):
        assert torch.allclose(criterion.memory_bank.bank[:8], key, atol=1e-6)


@pytest.mark.parametrize("method", ["simsiam", "byol"])
def test_the_loss_of_a_predictor_is_the_mean_negative_cosine_of_both_directions(method):
    task = task_of(method).eval()
    first, second = views()
    loss, _ = task(first, second)
    target = task.online if method == "simsiam" else task.momentum
    with torch.no_grad():
        if method == "byol":
            for parameter in task.momentum.parameters():  # another network than the online one
                parameter.mul_(0.5)
            loss, _ = task(first, second)
        predicted = torch.cat([task.predictor(task.online(view)) for view in (first, second)])
        wanted = torch.cat([target(view) for view in (second, first)])
    cosines = [float((a * b).sum() / (a.norm() * b.norm())) for a, b in zip(predicted, wanted, strict=True)]
    assert loss.item() == pytest.approx(-sum(cosines) / len(cosines), abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_reaches_the_backbone_and_never_the_momentum_network(method):
    task = task_of(method)
    loss, embedding = task(*views())
    loss.backward()
    assert all(parameter.grad is not None for parameter in task.online[0].parameters())
    assert not embedding.requires_grad
    for name, parameter in task.named_parameters():
        assert (parameter.grad is None) == name.startswith("momentum."), name


def test_no_gradient_flows_through_the_target_of_simsiam():
    """Without the stop, the loss would also move the target: the gradients differ."""
    task = task_of("simsiam").eval()
    first, second = views()
    task(first, second)[0].backward()
    mine = task.online[0].module[0].weight.grad.clone()
    task.zero_grad()
    with torch.no_grad():
        targets = task.online(first), task.online(second)
    for view, target in ((first, targets[1]), (second, targets[0])):
        (-F.cosine_similarity(task.predictor(task.online(view)), target).mean() / 2).backward()
    assert torch.allclose(mine, task.online[0].module[0].weight.grad, atol=1e-6)


def test_heads_of_byol_end_in_a_normalisation_only_if_asked_for():
    images = torch.randn(64, 3, 3, 3) + 2
    for wanted in (False, True):
        config = ResolvedPretrainConfig(**SIZES, output_norm=wanted)
        embedding = BYOL(Backbone(nn.Flatten(), 27, [0.5] * 3, [0.5] * 3, 3), config)(images, images)[1]
        assert (embedding.mean(dim=0).abs() < 1e-5).all() == wanted


@pytest.mark.parametrize("method", ["mocov2", "byol"])
def test_the_momentum_network_keeps_a_share_of_its_past(method):
    task = task_of(method)
    for network, value in ((task.online, 1.0), (task.momentum, 3.0)):
        for parameter in network.parameters():
            nn.init.constant_(parameter, value)
    task.follow(0.75)
    assert all(torch.allclose(p, torch.tensor(2.5)) for p in task.momentum.parameters())  # 0.75 * 3 + 0.25 * 1
    assert all(torch.equal(p, torch.ones_like(p)) for p in task.online.parameters())


@pytest.mark.parametrize("config", [CONFIG, BOTH_SIDES], ids=["one side", "both sides"])
def test_queues_are_filled_with_keys_of_images_before_the_first_step_and_part_of_the_state(config):
    task, other = task_of("mocov2", config), task_of("mocov2", config)
    banks, others = ([criterion.memory_bank for criterion in made.criteria] for made in (task, other))
    before = [bank.bank.clone() for bank in banks]
    unread = iter([views(), views(), views()])
    task.prepare(unread)
    for bank, earlier in zip(banks, before, strict=True):
        assert (bank.bank != earlier).any(dim=1).all()
        assert torch.allclose(bank.bank.norm(dim=1), torch.ones(16), atol=1e-5)
    assert len(list(unread)) == 1  # two batches of 8 fill a queue of 16
    task(*views())
    other.load_state_dict(copy.deepcopy(task.state_dict()))
    for restored, bank in zip(others, banks, strict=True):
        assert torch.equal(restored.bank, bank.bank)
        assert int(restored.bank_ptr) == int(bank.bank_ptr) == 8


def test_without_lightly_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightly", None)
    monkeypatch.setitem(sys.modules, "lightly.loss", None)
    with pytest.raises(UserError, match=r"pip install .cdc-plugin\[pretrain\]."):
        require_lightly()


@pytest.mark.parametrize("arch", RESNETS)
def test_small_images_get_a_stem_that_keeps_their_size(arch):
    small, large = spec_of(arch, 64), spec_of(arch, 96)
    padding, pool = (1, True) if arch == "small" else (2, False)  # the demo's, and the paper's
    assert small["stem"] == {"kernel": 3, "stride": 1, "padding": padding, "pool": pool}
    assert large["stem"] == {"kernel": 7, "stride": 2, "padding": 3, "pool": True}


@pytest.mark.parametrize(("arch", "size"), [("small", 32), ("resnet10t", 32), ("test_vit", 32)])
def test_a_fresh_network_gives_the_features_it_promises_and_an_unknown_one_is_refused(arch, size):
    backbone = fresh_backbone(arch, size, [0.5] * 3, [0.5] * 3)
    assert backbone(torch.randn(2, 3, size, size)).shape == (2, backbone.feature_dim)
    assert backbone.spec == spec_of(arch, size)
    with pytest.raises(UserError, match="unknown --arch 'resnet19'"):
        spec_of("resnet19", 32)
