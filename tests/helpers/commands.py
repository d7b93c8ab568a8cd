"""The commands as people type them, in processes of their own."""

import csv
import os
import signal
import subprocess
import sys
import time

from cdc_plugin.data.atomic import unescape_cell
from tests.helpers import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def run_python(*words, **options) -> subprocess.CompletedProcess:
    settings = {"env": ENVIRONMENT, "capture_output": True, "text": True, "encoding": "utf-8", "timeout": 300}
    return subprocess.run([sys.executable, *map(str, words)], **settings, **options)


def run(name, *words, **options) -> subprocess.CompletedProcess:
    """run("predict", "--model", folder): the command to its end, whatever that is."""
    return run_python("-m", "cdc_plugin", name, *words, **options)


def succeed(name, *words, **options) -> subprocess.CompletedProcess:
    done = run(name, *words, **options)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def refuse(name, *words, **options) -> str:
    """Return the one line on stderr of a command that must end with code 2."""
    done = run(name, *words, **options)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def end_when(ready, name, *words, sign=signal.SIGKILL, delay=0.0) -> tuple[int, str]:
    """Start a command, send it a signal once ``ready()``, and return its exit code and what it wrote to stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cdc_plugin", name, *map(str, words)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has the jobs in its background ignore Ctrl-C, and tests may be such a job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(sign)
    errors = process.communicate(timeout=60)[1]
    return process.returncode, errors


def names_in(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def read_table(path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return [{name: unescape_cell(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
