"""One of two processes dies: torchrun starts the run again, or all of it ends; nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from fault_runs import BATCHES, EPOCHS, ROOT, Fault, assert_same_results, epochs_in, processes_with

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).parent / "fault_driver.py"
Watch = Callable[[subprocess.Popen[str]], None]


def torchrun(
    *words: object, fault: Fault | None = None, restarts: int = 0, watch: Watch | None = None
) -> subprocess.CompletedProcess[str]:
    """Two processes, after which none may be left.

    Args:
        watch: what to do while they run.
    """
    mark = f"fault-{uuid.uuid4().hex}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAULT_MARK": mark}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", str(restarts), str(DRIVER), json.dumps([asdict(fault)] if fault else [])]
    command, pipe = [*launcher, *map(str, words)], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        if watch is not None:
            watch(process)
        try:
            out, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    until = time.monotonic() + 60
    while processes_with(mark) and time.monotonic() < until:
        time.sleep(0.2)
    assert processes_with(mark) == []
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


@pytest.fixture(scope="module")
def whole(case, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two") / "out"
    done = torchrun(*case.words, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def dying(tmp_path: Path) -> Fault:
    return Fault(
        "cdc_plugin.engine:Refiner.train_batch", call=BATCHES + 2, rank=1, once=str(tmp_path / "it has happened")
    )


def test_torchrun_starts_a_run_again_whose_process_died_and_it_ends_as_if_nothing_had_happened(case, whole, tmp_path):
    out = tmp_path / "out"
    done = torchrun(*case.words, "--out", out, fault=dying(tmp_path), restarts=2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "it has happened").exists()
    assert "going on after epoch 1" in done.stderr
    assert_same_results(out, whole)


def test_without_restarts_all_processes_end_and_the_run_can_be_resumed(case, whole, tmp_path):
    out = tmp_path / "out"
    done = torchrun(*case.words, "--out", out, fault=dying(tmp_path))
    assert done.returncode != 0
    assert 1 <= epochs_in(out) < EPOCHS
    assert "cdc-refine: error: another process of this run has ended" in done.stderr or "SIGTERM" in done.stderr
    done = torchrun("--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert_same_results(out, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_torchrun_is_ended_or_killed_nobody_is_left_and_the_run_can_be_resumed(case, whole, tmp_path, number):
    out = tmp_path / "out"

    def tell(process: subprocess.Popen[str]) -> None:
        while process.poll() is None and epochs_in(out) < 1:
            time.sleep(0.05)
        process.send_signal(number)

    done = torchrun(*case.words, "--out", out, watch=tell)
    assert done.returncode != 0
    assert 1 <= epochs_in(out) <= EPOCHS
    if number == signal.SIGTERM:
        assert done.stderr.count("cdc-refine: stopped by SIGTERM") == 1
    done = torchrun("--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert_same_results(out, whole)


def test_a_process_that_dies_while_images_are_read_does_not_stop_the_next_try(case, whole, tmp_path):
    out = tmp_path / "out"
    fault = Fault("cdc_plugin.preparation:open_data", rank=0, once=str(tmp_path / "it has happened"))
    done = torchrun(*case.words, "--out", out, fault=fault, restarts=1)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "it has happened").exists()
    assert_same_results(out, whole)
