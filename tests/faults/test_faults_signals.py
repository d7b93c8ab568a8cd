"""SIGTERM, which clusters send, and SIGUSR1, SLURM's early one: the run saves its state, and resumes to the same."""

import re
import shlex
import signal

import pytest

from tests.helpers.fault_runs import BATCHES, EPOCHS, TRAIN_BATCH, Fault, count_epochs, list_names, refine, refine_until

EPOCH_LINE = "cdc_plugin.training.progress:TrainingProgress.after_epoch"


def count_batches(folder) -> int:
    """Return the batches of the current epoch in the saved state."""
    import torch

    return len(torch.load(folder / "last.pt", weights_only=True)["refiner"]["progress"]["logs"])


def test_sigterm_in_the_middle_of_an_epoch_saves_and_loses_no_batch(case, out):
    ended = refine(*case.words, "--out", out, fault=Fault(TRAIN_BATCH, "terminate", call=BATCHES + 2))
    assert ended.code == 143, ended
    assert re.search("stopped by SIGTERM.*--resume", ended.last_line)
    assert count_epochs(out) == 1
    assert count_batches(out) == 2  # the one under way is finished first
    again = refine("--resume", "--out", out, fault=Fault(TRAIN_BATCH, "terminate", call=1))
    assert again.code == 143
    assert count_batches(out) == 3
    case.check(out)


@pytest.mark.parametrize(
    ("fault", "code", "words", "epochs"),
    [
        (Fault(TRAIN_BATCH, "terminate", call=EPOCHS * BATCHES), 143, "stopped by SIGTERM", EPOCHS - 1),
        (Fault("cdc_plugin.training.prepare:initialise", "terminate"), 143, "stopped by SIGTERM", 0),
        (Fault("cdc_plugin.evaluation.outcome:finish_run", "terminate"), 143, "stopped by SIGTERM", EPOCHS),
        # Twice: a first signal is only noted while training.
        (Fault("torch:save", "terminate-twice", call=3), 143, "stopped by SIGTERM", 1),
        (Fault(TRAIN_BATCH, "interrupt", call=BATCHES + 1), 130, "interrupted", 1),
        (Fault(EPOCH_LINE, "interrupt", after=True), 130, "interrupted", 1),
        (Fault(EPOCH_LINE, "terminate", call=EPOCHS, after=True), 143, "stopped by SIGTERM", EPOCHS),
    ],
    ids=str,
)
def test_a_signal_at_any_moment_ends_the_run_and_keeps_what_is_finished(case, out, fault, code, words, epochs):
    ended = refine(*case.words, "--out", out, fault=fault)
    assert ended.code == code, ended
    assert re.search(words, ended.last_line)
    assert count_epochs(out) == epochs
    assert not {name for name in list_names(out) if name.startswith(".") or name == "report.json"}
    program, *again = shlex.split(ended.last_line.partition(" with: ")[2])  # the whole command, to be pasted
    assert (program, "--backbone" in again) == ("cdc-refine", "prepare" in fault.target)
    assert refine(*again).code == 0
    case.check(out)


def test_the_early_signal_of_slurm_saves_too(case, out):
    ended = refine_until(lambda: count_epochs(out) > 0, signal.SIGUSR1, *case.words, "--out", out)
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert "stopped by SIGUSR1" in ended.last_line
    case.check(out)
