"""Heads, gradients, selections and calibrations of a run are exchanged by its config alone."""

import pytest
import torch
from torch import Tensor, nn

from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.core.losses import calibrations
from cdc_plugin.models.heads import ClusterHead, CosineHead
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.runtime import Runtime
from cdc_plugin.training.steps import Views

CPU = torch.device("cpu")
COUNT = 24


def refiner(**changes) -> Refiner:
    given = {
        "clusters": 3,
        "mini_clusters": 6,
        "hidden": 8,
        "epochs": 4,
        "batch_size": 12,
        "sub_batch_size": 6,
        "lr_heads": 1e-2,
        "lr_backbone": 1e-2,
        "threshold": 0.4,
    }
    config = ResolvedConfig(**{**given, **changes})
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    heads = [ClusterHead(5, 8, 3) for _ in range(2)]
    return Refiner(network, *heads, config, Runtime(CPU, config.precision), image_count=COUNT)


def views(rows: Tensor, seed: int) -> Views:
    randomness = torch.Generator().manual_seed(seed)
    plain = torch.randn(3, 10, generator=torch.Generator().manual_seed(9))[rows % 3] * 2
    noise = [0.1 * torch.randn(len(rows), 10, generator=randomness) for _ in range(3)]
    return Views(*(plain + n for n in noise), rows)


def batches(epoch: int, done: int = 0) -> list[Views]:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(epoch))
    return [views(part, 10 * epoch + number) for number, part in enumerate(order.split(12))][done:]


def fit(made: Refiner) -> list[dict[str, float]]:
    history: list[dict[str, float]] = []
    made.fit(batches, lambda stats: None, history.append)
    return history


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def trusting_nothing(made: Refiner) -> Refiner:
    made.select.threshold = 2.0
    return made


@pytest.mark.parametrize("heads", ["clu", "clu+cal"])
def test_a_single_head_ends_as_both_heads(heads):
    made = refiner(heads=heads)
    assert made.networks.target_head is made.networks.clustering_head
    fit(made)
    assert same(weights(made.networks.clustering_head), weights(made.networks.calibration_head))


def test_a_single_head_that_trusts_nothing_is_moved_by_the_calibration_loss_only():
    for heads, moves in (("clu", False), ("clu+cal", True)):
        made = trusting_nothing(refiner(heads=heads, selection="fixed"))
        before, backbone = parameters(made.networks.clustering_head), parameters(made.networks.backbone)
        stats = made.train_batch(batches(0)[0], torch.Generator())
        assert stats["selected"] == 0
        assert torch.equal(before, parameters(made.networks.clustering_head)) is not moves
        assert torch.equal(backbone, parameters(made.networks.backbone))
        assert (stats["calibration_loss"] != 0) is moves


def test_without_stop_gradient_the_calibration_loss_moves_the_backbone_too():
    for stop in (True, False):
        made = trusting_nothing(refiner(stop_gradient=stop, selection="fixed"))
        backbone, head = parameters(made.networks.backbone), parameters(made.networks.clustering_head)
        calibration = parameters(made.networks.calibration_head)
        made.train_batch(batches(0)[0], torch.Generator())
        assert torch.equal(backbone, parameters(made.networks.backbone)) is stop
        assert torch.equal(head, parameters(made.networks.clustering_head))
        assert not torch.equal(calibration, parameters(made.networks.calibration_head))


@pytest.mark.parametrize("selection", ["flexmatch", "freematch", "freematch+ppf", "confident+gsf"])
def test_a_resumed_run_remembers_what_its_selection_had_learnt(selection):
    whole, first = refiner(selection=selection), refiner(selection=selection)
    fit(whole)
    first.settings.epochs = 2
    fit(first)
    state = first.state()
    second = refiner(selection=selection)
    second.restore(state)
    fit(second)
    assert same(weights(whole.networks.backbone), weights(second.networks.backbone))
    assert same(weights(whole.networks.calibration_head), weights(second.networks.calibration_head))
    assert whole.select.state.keys() == second.select.state.keys()
    assert same(whole.select.state, second.select.state)


@pytest.mark.parametrize("name", calibrations.names())
def test_every_calibration_trains_the_calibration_head_and_nothing_else(name):
    made = trusting_nothing(refiner(calibration=name, selection="fixed"))
    before = [
        parameters(m) for m in (made.networks.backbone, made.networks.clustering_head, made.networks.calibration_head)
    ]
    stats = made.train_batch(batches(0)[0], torch.Generator())
    after = [
        parameters(m) for m in (made.networks.backbone, made.networks.clustering_head, made.networks.calibration_head)
    ]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False]
    assert (stats["mini_clusters"] > 0) is (name == "mini-clusters")


def test_the_strength_of_a_calibration_is_what_the_config_says():
    def calibrated(strength: float) -> Tensor:
        made = refiner(calibration="label-smoothing", calibration_strength=strength)
        made.train_batch(batches(0)[0], torch.Generator())
        return parameters(made.networks.calibration_head)

    assert torch.equal(calibrated(0.1), calibrated(0.1))
    assert not torch.equal(calibrated(0.1), calibrated(0.5))


def test_the_weight_of_the_entropy_and_the_gradient_of_another_head_are_settings_only():
    results = {}
    for name, change in {"default": {}, "entropy": {"entropy_weight": 0.0}, "fixed": {"selection": "fixed"}}.items():
        made = refiner(**change)
        fit(made)
        results[name] = parameters(made.networks.calibration_head)
    assert not torch.equal(results["default"], results["entropy"])
    assert not torch.equal(results["default"], results["fixed"])


@pytest.mark.parametrize(
    "head", [ClusterHead(5, 8, 3), CosineHead([["linear", 5, 4]], 4, 3, 0.1)], ids=["mlp", "cosine"]
)
def test_a_head_is_its_last_layer_after_the_others(head):
    features = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    head.eval()
    assert torch.equal(head(features), head.logits(head.hidden(features)))
