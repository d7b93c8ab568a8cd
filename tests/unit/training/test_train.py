"""What is done or said when something goes wrong in training."""

import copy
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cdc_plugin.config.resolve import Facts, ResolvedConfig, resolve
from cdc_plugin.config.schema import AugmentConfig, RefineConfig
from cdc_plugin.errors import UserError
from cdc_plugin.models.heads import ClusterHead
from cdc_plugin.training.collapse import SLOW_DOWN, setback_warning
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.resume import check_resume_settings
from cdc_plugin.training.run_folder import Run, read_state, save_run, write_state
from cdc_plugin.training.runtime import SINGLE, Distributed, Runtime
from cdc_plugin.training.train import explain_error, roll_back
from tests.helpers.in_step import in_step
from tests.helpers.refiners import CPU, make, settings

CONFIG = settings(epochs=9, lr_heads=4e-3, lr_backbone=2e-3)


def refiner() -> Refiner:
    return make(CONFIG, lambda: nn.Linear(4, 5))


def run_in(folder: Path, distributed: Distributed = SINGLE) -> Run:
    nothing: Any = None
    return Run(CONFIG, folder, Runtime(CPU, distributed=distributed), nothing, nothing, {}, nothing, nothing, nothing)


def test_a_run_goes_on_from_its_last_good_epoch_at_a_tenth_of_the_rates_once_then_ends_with_rates_to_type(
    tmp_path, caplog
):
    found, good = refiner(), refiner()
    found.epoch = good.epoch = 4
    found.steps = good.steps = 7
    write_state(tmp_path, {"refiner": copy.deepcopy(found.state())})
    nn.init.constant_(found.networks.backbone.weight, float("nan"))
    found.steps += 2
    current = run_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        roll_back(current, found)
    assert (found.epoch, found.steps, found.slow_down, current.setback) == (4, 7, SLOW_DOWN, 5)
    (warning,) = setback_warning(current.setback)  # in the report
    assert warning["kind"] == "not-finite"
    assert "epoch 5" in warning["text"]
    assert setback_warning(None) == []
    for name, tensor in good.networks.backbone.state_dict().items():
        assert torch.equal(found.networks.backbone.state_dict()[name], tensor)
    (message,) = caplog.messages
    assert "epoch 5: back to epoch 4" in message
    found.networks.set_learning_rates(found._lr_factor())
    assert found.networks.clustering_optimizer.param_groups[0]["lr"] == pytest.approx(4e-3 * found._lr_factor())
    good.restore(found.state())
    assert good.slow_down == SLOW_DOWN  # lower rates outlast a resumed run
    with pytest.raises(UserError) as end:
        roll_back(current, found)
    # A tenth of a tenth: lower than what has just failed.
    for words in ("epoch 5", "lr_backbone=2e-05 lr_heads=4e-05", "freeze_backbone=True", str(tmp_path)):
        assert words in str(end.value)


def test_all_processes_go_back_to_the_state_that_the_main_one_reads(tmp_path):
    good = refiner()
    write_state(tmp_path, {"refiner": good.state()})

    def work(distributed: Distributed) -> tuple[bool, float]:
        folder = tmp_path if distributed.main else tmp_path / "of another machine"
        found = refiner()
        nn.init.constant_(found.networks.backbone.weight, float("nan"))
        roll_back(run_in(folder, distributed), found)
        return torch.equal(found.networks.backbone.weight, good.networks.backbone.weight), found.slow_down

    assert in_step(2, work) == [(True, SLOW_DOWN)] * 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:75] Not enough memory"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("distributed", [SINGLE, Distributed(1, 2)], ids=["alone", "of two"])
def test_too_little_memory_is_told_with_a_smaller_sub_batch(error, distributed):
    for size, smaller in ((12, 6), (500, 250), (3, 2), (2, 2)):  # never smaller than two
        told = explain_error(error, replace(CONFIG, sub_batch_size=size), Path("out"), distributed)
        assert isinstance(told, UserError)
        assert "out of memory" in str(told)
        assert f"sub_batch_size={smaller}," in str(told)


LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:21231"
NO_COMPILER = type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})("no compiler\nmore")


@pytest.mark.parametrize(
    ("error", "compiled", "distributed", "words"),
    [
        (RuntimeError(LOST), False, Distributed(1, 2), "another process of this run has ended.*resume=True"),
        (RuntimeError(LOST), False, SINGLE, None),
        (NO_COMPILER, True, SINGLE, r"\(no compiler\); leave compile=true out"),
        (NO_COMPILER, False, SINGLE, None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, Distributed(0, 3), None),
    ],
)
def test_an_error_is_explained_where_that_helps_and_else_left_as_it_is(error, compiled, distributed, words):
    told = explain_error(error, replace(CONFIG, compile=compiled), Path("out"), distributed)
    if words is None:
        assert told is error
    else:
        assert isinstance(told, UserError)
        assert re.search(words, str(told))


def resolve_again(request: RefineConfig) -> ResolvedConfig:
    return resolve(request, Facts(100, 32, [0.5] * 3, [0.5] * 3))


STORED = resolve_again(RefineConfig(backbone="b.pt", data="d", clusters=3, epochs=5))


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (RefineConfig(), {}),
        (RefineConfig(backbone="b.pt", data="d", clusters=3, epochs=5), {}),
        (RefineConfig(clusters=3, out="elsewhere", device="cuda", track=["wandb"], on_collapse="warn"), {}),
        (RefineConfig(augment=AugmentConfig(flip=False)), {}),
        (RefineConfig(batch_size=5000), {"batch_size": 100}),  # was cut to the 100 images when the run began
        (RefineConfig(mean=[0.1] * 3, from_recipe=["mean"]), {}),  # which the checkpoint's has replaced
    ],
    ids=["nothing", "the same", "where and how", "augmentation", "cut", "from_recipe"],
)
def test_the_command_that_began_a_run_goes_on_with_it(given, stored):
    check_resume_settings(given, replace(STORED, **stored), resolve_again, Path("out"))


def test_other_settings_than_those_a_run_began_with_are_refused():
    others = {"clusters": 4, "epochs": 6, "seed": 1, "passes": "full", "sync_batchnorm": True, "mean": [0.1] * 3}
    for name, value in {**others, "freeze_backbone": True}.items():
        with pytest.raises(UserError, match=rf"out .*{name}=.*{name}="):
            check_resume_settings(RefineConfig(**{name: value}), STORED, resolve_again, Path("out"))


def test_what_a_step_back_needs_is_in_the_state_of_a_run(tmp_path):
    backbone = SimpleNamespace(feature_dim=5, mean=torch.zeros(3), std=torch.ones(3), input_size=8, spec=None)
    current = run_in(tmp_path)
    current.model = SimpleNamespace(backbone=backbone, calibration_head=ClusterHead(5, 8, 3))
    current.images = SimpleNamespace(digest="d")
    found = refiner()
    save_run(current, found.state())
    roll_back(current, found)
    assert (current.setback, found.slow_down) == (1, SLOW_DOWN)
    save_run(current, found.state())
    assert read_state(tmp_path)["setback"] == 1
