"""One of two processes dies: torchrun restarts the run, or all processes end; none is left behind."""

import json
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.fault_runs import BATCHES, EPOCHS, TRAIN_BATCH, Fault, assert_same_results, count_epochs
from tests.helpers.torchrun import Watch, torchrun

pytestmark = pytest.mark.slow
DRIVER = ROOT / "tests" / "helpers" / "fault_driver.py"


def two(
    *words: object, fault: Fault | None = None, restarts: int = 0, watch: Watch | None = None, fails: bool = False
) -> str:
    """Run two processes, with a fault in one of them; return what they print."""
    faults = json.dumps([asdict(fault)] if fault else [])
    done = torchrun(2, DRIVER, faults, *words, restarts=restarts, watch=watch)
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def whole(case, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two") / "out"
    two(*case.words, "--out", out)
    return out


def dying(tmp_path: Path) -> Fault:
    return Fault(TRAIN_BATCH, call=BATCHES + 2, rank=1, once=str(tmp_path / "it has happened"))


def test_torchrun_starts_a_run_again_whose_process_died_with_the_same_result(case, whole, tmp_path, out):
    assert "after epoch 1" in two(*case.words, "--out", out, fault=dying(tmp_path), restarts=2)
    assert (tmp_path / "it has happened").exists()
    assert_same_results(out, whole)


def test_without_restarts_all_processes_end_and_the_run_can_be_resumed(case, whole, tmp_path, out):
    printed = two(*case.words, "--out", out, fault=dying(tmp_path), fails=True)
    assert 1 <= count_epochs(out) < EPOCHS
    assert "another process" in printed or "SIGTERM" in printed
    two("--resume", "--out", out)
    assert_same_results(out, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_torchrun_is_ended_or_killed_no_process_is_left_and_the_run_can_be_resumed(case, whole, out, number):

    def end(process: subprocess.Popen[str]) -> None:
        while process.poll() is None and count_epochs(out) < 1:
            time.sleep(0.05)
        process.send_signal(number)

    printed = two(*case.words, "--out", out, watch=end, fails=True)
    assert 1 <= count_epochs(out) <= EPOCHS
    if number == signal.SIGTERM:
        assert printed.count("cdc-refine: stopped by SIGTERM") == 1
    two("--resume", "--out", out)
    assert_same_results(out, whole)


def test_a_process_that_dies_while_images_are_read_does_not_stop_the_next_try(case, whole, tmp_path, out):
    fault = Fault("cdc_plugin.training.prepare:open_data", rank=0, once=str(tmp_path / "it has happened"))
    two(*case.words, "--out", out, fault=fault, restarts=1)
    assert (tmp_path / "it has happened").exists()
    assert_same_results(out, whole)
