"""SIGTERM, as clusters send it before they kill: the run saves what it has, says so, and goes on later as if nothing
had happened. SIGUSR1, which SLURM can be asked to send ahead, means the same.
"""

from __future__ import annotations

import signal

import pytest

from tests.helpers.fault_runs import BATCHES, EPOCHS, Fault, Started, epochs_in, names_in, refine

BATCH = "cdc_plugin.training.refiner:Refiner.train_batch"
SAVED = "go on with --resume"


def trained_batches(folder) -> int:
    """Of the epoch under way, as the state knows it."""
    import torch

    return len(torch.load(folder / "last.pt", weights_only=True)["refiner"]["under_way"]["logs"])


def test_sigterm_in_the_middle_of_an_epoch_saves_and_loses_no_batch(case, tmp_path):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(BATCH, "terminate", call=BATCHES + 2))
    assert ended.code == 143, ended
    assert ended.last_line.startswith("cdc-refine: stopped by SIGTERM; ")
    assert ended.last_line.endswith(SAVED)
    assert epochs_in(out) == 1
    assert trained_batches(out) == 2  # the one under way is finished first
    again = refine("--resume", "--out", out, fault=Fault(BATCH, "terminate", call=1))
    assert again.code == 143
    assert trained_batches(out) == 3
    case.check(out)


def test_sigterm_at_the_last_batch_of_all_is_obeyed(case, tmp_path):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(BATCH, "terminate", call=EPOCHS * BATCHES))
    assert ended.code == 143, ended
    assert "report.json" not in names_in(out)
    case.check(out)


@pytest.mark.parametrize("target", ["cdc_plugin.training.prepare:initialise", "cdc_plugin.pipeline:finish"])
def test_sigterm_before_and_after_training_ends_the_run_at_once(case, tmp_path, target):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(target, "terminate"))
    assert ended.code == 143, ended
    assert ended.last_line == "cdc-refine: stopped by SIGTERM; finished epochs are kept, go on with --resume"
    assert not {name for name in names_in(out) if name.startswith(".")}
    assert epochs_in(out) == (3 if target.endswith("finish") else 0)
    case.check(out)


def test_sigterm_while_a_state_is_written_leaves_the_earlier_one(case, tmp_path):
    out = tmp_path / "out"
    # Twice: a first signal is only noted while training.
    fault = Fault("torch:save", "terminate-twice", call=3)
    ended = refine(*case.words, "--out", out, fault=fault)
    assert ended.code == 143, ended
    assert epochs_in(out) == 1
    assert not {name for name in names_in(out) if name.startswith(".")}
    case.check(out)


def test_ctrl_c_keeps_finished_epochs(case, tmp_path):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(BATCH, "interrupt", call=BATCHES + 1))
    assert ended.code == 130
    assert ended.last_line == "cdc-refine: interrupted; finished epochs are kept, go on with --resume"
    assert epochs_in(out) == 1
    case.check(out)


def test_slurms_early_signal_saves_too(case, tmp_path):
    out = tmp_path / "out"
    started = Started([*case.words, "--out", str(out)])
    while started.running() and epochs_in(out) < 1:
        pass
    started.tell(signal.SIGUSR1)
    ended = started.end()
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert "stopped by SIGUSR1" in ended.last_line
    case.check(out)
