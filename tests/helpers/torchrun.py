"""Several processes of a run, as ``torchrun`` starts them."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.helpers import ROOT

Watch = Callable[[subprocess.Popen[str]], None]


def torchrun(
    processes: int, *words: object, restarts: int = 0, watch: Watch | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run so many processes, of which none may be left in the end; ``watch`` is called while they run."""
    mark = f"launched-{uuid.uuid4().hex}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MARK": mark, **environment}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command, pipe = [*launcher, "--max-restarts", str(restarts), *map(str, words)], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        if watch is not None:
            watch(process)
        try:
            out, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    until = time.monotonic() + 60
    while _processes_with(mark) and time.monotonic() < until:
        time.sleep(0.2)
    assert _processes_with(mark) == []
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _processes_with(mark: str) -> list[int]:
    """Live processes that have a word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in (folder / "environ").read_bytes() and state != "Z":
                found.append(int(folder.name))
        except OSError:  # ended in between, or somebody else's
            continue
    return found
