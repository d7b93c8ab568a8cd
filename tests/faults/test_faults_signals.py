"""SIGTERM, as clusters send it before they kill: the run saves its state, says so, and resumes later with the same
result. SIGUSR1, which SLURM can send earlier, means the same.
"""

from __future__ import annotations

import re
import signal

import pytest

from tests.helpers.fault_runs import BATCHES, EPOCHS, TRAIN_BATCH, Fault, Started, count_epochs, list_names, refine


def count_batches(folder) -> int:
    """Return the batches of the current epoch in the saved state."""
    import torch

    return len(torch.load(folder / "last.pt", weights_only=True)["refiner"]["progress"]["logs"])


def test_sigterm_in_the_middle_of_an_epoch_saves_and_loses_no_batch(case, tmp_path):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(TRAIN_BATCH, "terminate", call=BATCHES + 2))
    assert ended.code == 143, ended
    assert re.search("stopped by SIGTERM.*--resume", ended.last_line)
    assert count_epochs(out) == 1
    assert count_batches(out) == 2  # the one under way is finished first
    again = refine("--resume", "--out", out, fault=Fault(TRAIN_BATCH, "terminate", call=1))
    assert again.code == 143
    assert count_batches(out) == 3
    case.check(out)


def test_sigterm_at_the_last_batch_of_all_is_obeyed(case, tmp_path):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(TRAIN_BATCH, "terminate", call=EPOCHS * BATCHES))
    assert ended.code == 143, ended
    assert "report.json" not in list_names(out)
    case.check(out)


@pytest.mark.parametrize(
    "target", ["cdc_plugin.training.prepare:initialise", "cdc_plugin.evaluation.outcome:finish_run"]
)
def test_sigterm_before_and_after_training_ends_the_run_at_once(case, tmp_path, target):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(target, "terminate"))
    assert ended.code == 143, ended
    assert re.search("stopped by SIGTERM.*--resume", ended.last_line)
    assert not {name for name in list_names(out) if name.startswith(".")}
    assert count_epochs(out) == (3 if "finish" in target else 0)
    case.check(out)


def test_sigterm_while_a_state_is_written_leaves_the_earlier_one(case, tmp_path):
    out = tmp_path / "out"
    # Twice: a first signal is only noted while training.
    fault = Fault("torch:save", "terminate-twice", call=3)
    ended = refine(*case.words, "--out", out, fault=fault)
    assert ended.code == 143, ended
    assert count_epochs(out) == 1
    assert not {name for name in list_names(out) if name.startswith(".")}
    case.check(out)


def test_ctrl_c_keeps_finished_epochs(case, tmp_path):
    out = tmp_path / "out"
    ended = refine(*case.words, "--out", out, fault=Fault(TRAIN_BATCH, "interrupt", call=BATCHES + 1))
    assert ended.code == 130
    assert re.search("interrupted.*--resume", ended.last_line)
    assert count_epochs(out) == 1
    case.check(out)


def test_the_early_signal_of_slurm_saves_too(case, tmp_path):
    out = tmp_path / "out"
    started = Started([*case.words, "--out", str(out)])
    while started.running() and count_epochs(out) < 1:
        pass
    started.send(signal.SIGUSR1)
    ended = started.end()
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert "stopped by SIGUSR1" in ended.last_line
    case.check(out)
