import math

import pytest
import torch
from torch import nn

from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.pretext.config import load_pretrain_config, resolve
from cdc_plugin.training.pretext.lars import LARS
from cdc_plugin.training.pretext.loop import Pretrainer, spread
from cdc_plugin.training.pretext.methods import METHODS
from cdc_plugin.training.progress import PretextProgress

CPU = torch.device("cpu")


def config_of(method: str, *words: str):
    small = ["hidden=12", "projection=6", "predictor=8", "batch_size=16", "epochs=4", "queue=20", *words]
    return resolve(load_pretrain_config(None, {"data": "photos", "method": method}, small), 64, 8)


def trainer_of(config) -> Pretrainer:
    with fork_rng(generator(config.seed), CPU):
        # Dropout: what is drawn inside the network must be the same in a resumed run.
        network = nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1))
        backbone = Backbone(network, 10, [0.5] * 3, [0.5] * 3, 8)
        return Pretrainer(METHODS[config.method](backbone, config), config, CPU, 4)


def batches(epoch: int):
    for number in range(4):
        randomness = generator(7, epoch, number)
        yield tuple(torch.randn(16, 3, 8, 8, generator=randomness) for _ in range(2))


def fit(trainer: Pretrainer) -> list[dict[str, float]]:
    history: list[dict[str, float]] = []
    trainer.fit(batches, lambda stats: None, history.append)
    return history


def test_spread_is_1_for_directions_all_around_and_0_for_one_whatever_their_length(randomness):
    # Directions (1, 0) and (0, 1): each coordinate is 1 or 0, deviation 0.5, times the square root of 2.
    assert spread(torch.tensor([[3.0, 0.0], [0.0, 0.2]])) == pytest.approx(0.5 * math.sqrt(2))
    lengths = torch.rand(4000, 1, generator=randomness) + 0.1
    around = torch.randn(4000, 32, generator=randomness) * lengths
    assert spread(around) == pytest.approx(1, abs=0.01)
    assert spread(torch.ones(4000, 32) * lengths) == pytest.approx(0, abs=1e-4)
    around[0] = 0
    assert math.isfinite(spread(around))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_taken_up_again_ends_with_the_same_weights_to_the_bit(method, tmp_path):
    whole, part, resumed = (trainer_of(config_of(method)) for _ in range(3))
    before, state = whole.task.online[0].module[0].weight.detach().clone(), torch.random.get_rng_state()
    history = fit(whole)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is left alone
    assert not torch.equal(before, whole.task.online[0].module[0].weight)

    def stop_after_two(stats: dict[str, float]) -> None:
        if stats["epoch"] == 2:
            torch.save(part.state(), tmp_path / "state.pt")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        part.fit(batches, lambda stats: None, stop_after_two)
    torch.manual_seed(123)  # what else was drawn before makes no difference
    resumed.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert fit(resumed) == history[2:]
    for name, tensor in whole.task.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, resumed.task.state_dict()[name]), name
        else:  # the queues of MoCo-v2
            for ours, theirs in zip(tensor, resumed.task.state_dict()[name], strict=True):
                assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert [line["epoch"] for line in history] == [1, 2, 3, 4]
    assert all(math.isfinite(value) for line in history for value in line.values())


def test_the_rate_rises_to_its_height_in_the_warm_up_and_falls_to_nothing():
    trainer = trainer_of(config_of("simsiam", "lr=0.32", "warmup_epochs=1"))
    rates: list[float] = []
    trainer.fit(batches, lambda stats: rates.append(stats["lr"]), lambda stats: None)
    height = 0.32 * 16 / 256  # in proportion to the batch
    assert rates[:4] == pytest.approx([height / 4, height / 2, height * 3 / 4, height])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def test_lars_neither_decays_nor_scales_biases_and_normalisation():
    trainer = trainer_of(config_of("byol"))
    decayed, others = trainer.optimizer.param_groups
    assert type(trainer.optimizer).__name__ == "LARS"
    assert (decayed["decay"], "decay" in others) == (1e-4, False)
    assert decayed["weight_decay"] == others["weight_decay"] == 0  # the decay is part of what is scaled
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in others["params"])
    trained = [p for p in trainer.task.parameters() if p.requires_grad]
    assert len(decayed["params"]) + len(others["params"]) == len(trained)


def test_lars_takes_the_steps_of_the_published_formula(randomness):
    """The loop that solo-learn's settings of BYOL stand for: constant 0.02, limited to the step of SGD."""
    start = torch.randn(3, 4, generator=randomness)
    weight, bias = nn.Parameter(start.clone()), nn.Parameter(torch.ones(3))
    groups = [{"params": [weight], "decay": 0.01}, {"params": [bias]}]
    optimizer = LARS(groups, lr=0.5, momentum=0.9)
    expected, velocity, limited = start.clone(), torch.zeros(3, 4), []
    for size in (1.0, 1e-3, 5.0):  # the small gradient meets the limit
        gradient = size * torch.randn(3, 4, generator=randomness)
        weight.grad, bias.grad = gradient.clone(), torch.full((3,), size)
        optimizer.step()
        rate = 0.02 * expected.norm() / (gradient.norm() + 0.01 * expected.norm()) / 0.5
        limited.append(bool(rate > 1))
        velocity = 0.9 * velocity + min(rate, 1) * (gradient + 0.01 * expected)
        expected = expected - 0.5 * velocity
        assert torch.allclose(weight, expected, atol=1e-6)
    assert limited == [False, True, False]
    assert torch.allclose(bias, 1 - 0.5 * torch.tensor(1.0 + (0.9 + 1e-3) + (0.81 + 0.9e-3 + 5)))
    optimizer.zero_grad()
    weight.data.zero_()
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    assert weight.isfinite().all()


def test_a_loss_that_is_not_finite_ends_the_run_with_advice():
    trainer = trainer_of(config_of("simsiam"))
    with pytest.raises(UserError, match=r"try lr=0.0\d+"):
        trainer.step(torch.full((16, 3, 8, 8), float("nan")), torch.zeros(16, 3, 8, 8))


@pytest.mark.parametrize(("value", "epoch", "warned"), [(0.05, 3, True), (0.05, 1, False), (0.5, 3, False)])
def test_an_epoch_with_a_collapsed_embedding_is_logged_as_a_warning(value, epoch, warned, caplog):
    bar = PretextProgress(0, 4, 4, "simsiam", warmup_epochs=1)
    with caplog.at_level("INFO", logger="cdc_plugin"):
        record = bar.record_epoch({"epoch": epoch, "loss": -0.9, "spread": value, "lr": 0.1})
        assert not caplog.records  # the state is saved first
        bar.after_epoch(record, saved=False)
    bar.close()
    assert (caplog.records[-1].levelname == "WARNING") == warned
    assert ("collapsed" in caplog.text) == warned
    assert record["seconds"] >= 0
    assert "not saved yet" in caplog.text
