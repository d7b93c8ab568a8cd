"""Losses that are no numbers, and memory that is not enough."""

import json
import math

import pytest

from tests.helpers.fault_runs import EPOCHS, STEPS, Fault, assert_refused, count_epochs, list_names, refine

LOSS = "cdc_plugin.core.losses:pseudo_label_loss"


def history(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("epoch", [1, 2, EPOCHS])
def test_a_loss_that_is_nan_once_takes_the_run_back_one_epoch_at_lower_rates(case, out, epoch):
    fault = Fault(LOSS, "nan", call=STEPS * (epoch - 1) + 3)
    ended = refine(*case.words, "--out", out, fault=fault)
    assert ended.code == 0, ended.errors
    records, undisturbed = history(out), history(case.whole)
    assert [record["epoch"] for record in records] == list(range(1, EPOCHS + 1))
    for record, whole in zip(records[: epoch - 1], undisturbed, strict=False):
        assert record["clustering_loss"] == whole["clustering_loss"]  # earlier epochs are kept
    for record, whole in zip(records[epoch - 1 :], undisturbed[epoch - 1 :], strict=True):
        assert record["lr_factor"] == pytest.approx(0.1 * whole["lr_factor"], abs=1e-9)
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
    for file in ("train.log", "report.json"):
        assert "NaN" in (out / file).read_text(), f"{file} does not say what happened"


@pytest.mark.parametrize("call", [3, STEPS + 3])
def test_losses_that_stay_nan_end_the_run_in_one_line(case, out, call):
    fault = Fault(LOSS, "nan", call=call, times=0)
    assert_refused(refine(*case.words, "--out", out, fault=fault), "NaN", "lr_backbone")
    assert "report.json" not in list_names(out)
    assert count_epochs(out) == call // STEPS


def test_a_killed_run_at_lower_rates_resumes_at_these(case, tmp_path, out):
    """Rolling back must be part of the state: a killed and an undisturbed run with the same NaN end equal."""
    fault = Fault(LOSS, "nan", call=3)
    assert refine(*case.words, "--out", tmp_path / "whole", fault=fault).code == 0
    faults = [fault, Fault("os:replace", matching="last.pt", call=3)]
    assert refine(*case.words, "--out", out, fault=faults).code == -9
    assert refine("--resume", "--out", out).code == 0
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("action", ["exhaust-gpu", "exhaust-memory"])
@pytest.mark.parametrize("target", [LOSS, "cdc_plugin.training.refiner:Refiner.compute_targets"])
def test_too_little_memory_is_one_line_that_names_smaller_batches(case, out, action, target):
    fault = Fault(target, action, call=5, times=0)
    assert_refused(refine(*case.words, "--out", out, fault=fault), "memory", "sub_batch_size=15")
