"""``cdc-pretrain`` as people type it, and ``cdc-refine`` on what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import ROOT

PRETRAIN = [sys.executable, "-c", "from cdc_plugin.cli.pretrain import pretrain_command; pretrain_command()"]
REFINE = [sys.executable, "-m", "cdc_plugin"]
QUICK = ["batch_size=32", "hidden=16", "projection=8", "input_size=16", "--device", "cpu"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def run(program: list[str], *words: object) -> subprocess.CompletedProcess:
    command = [*program, *(str(word) for word in words)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def archive(tmp_path_factory, digits) -> Path:
    path = tmp_path_factory.mktemp("archive") / "digits.npz"
    np.savez(path, x=digits[0], y=digits[1])
    return path


def test_a_run_interrupted_by_the_keyboard_is_resumed_and_its_folder_refined(archive, tmp_path):
    out = tmp_path / "a backbone"
    words = ["--data", archive, "--method", "byol", "--epochs", 4, "--out", out, *QUICK]
    process = subprocess.Popen(
        [*PRETRAIN, *(str(word) for word in words)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        # A shell has the jobs in its background ignore Ctrl-C, and tests may be such a job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (out / "last.pt").is_file():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "continue with --resume" in errors.splitlines()[-1]
    assert json.loads((out / "model.json").read_text())["provenance"]["epochs"] < 4

    done = run(PRETRAIN, "--resume", "--out", out, "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"next: cdc-refine --backbone '{out}' --data {archive} --clusters C" in done.stdout
    epochs = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3, 4]

    refined = tmp_path / "refined"
    words = ["--backbone", out, "--data", archive, "--clusters", 5, "--epochs", 1, "--out", refined]
    done = run(REFINE, *words, "batch_size=100", "hidden=16", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads((refined / "report.json").read_text())["clusters"] == 5
    assert "input_size: 16" in (refined / "config.yaml").read_text()
