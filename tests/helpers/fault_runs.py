"""Start runs in which something fails, and compare what they leave with an undisturbed run."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers import ROOT
from tests.helpers.fault_driver import Fault, run

FILES = {"config.yaml", "last.pt", "metrics.jsonl", "train.log", "predictions.csv", "report.json"}
FILES |= {"report.html", "model.safetensors", "model.json"}
EPOCHS, BATCHES, STEPS = 3, 3, 6  # batches per epoch, of two sub-batches each
TRAIN_BATCH = "cdc_plugin.training.refiner:Refiner.train_batch"
QUICK = ["hidden=16", "batch_size=60", "sub_batch_size=30", "mini_clusters=12", "--epochs", str(EPOCHS)]
QUICK += ["--clusters", "5", "--device", "cpu", "augment.flip=false", "augment.crop_scale=0.8"]
PATIENCE = 120.0  # seconds; a run takes two


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code (negative: the signal that killed it) and what it printed."""

    code: int
    out: str
    errors: str

    @property
    def last_line(self) -> str:
        return (self.errors.splitlines() or [""])[-1]


def _child(words: list[str], faults: list[Fault], folder: str, limit: Callable[[], None] | None) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    for number, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    if limit is not None:
        limit()
    run(words, faults)


@dataclass
class Started:
    """A running process."""

    words: list[str]
    faults: list[Fault] = field(default_factory=list)
    limit: Callable[[], None] | None = None
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="fault-")))

    def __post_init__(self) -> None:
        for name in ("out", "errors"):
            (self.folder / name).touch()  # the process may be killed before it has opened them
        self.process = server().Process(target=_child, args=(self.words, self.faults, str(self.folder), self.limit))
        self.process.start()

    def running(self) -> bool:
        return self.process.is_alive()

    def send(self, number: int) -> None:
        if self.running():
            os.kill(self.process.pid, number)

    def end(self) -> Ended:
        self.process.join(PATIENCE)
        if self.running():
            self.process.kill()
            raise AssertionError(f"still running after {PATIENCE:g} s: {self.words}, {self.faults}")
        texts = [(self.folder / name).read_text(errors="replace") for name in ("out", "errors")]
        shutil.rmtree(self.folder)
        return Ended(self.process.exitcode, *texts)


def server() -> Any:
    """Return a context that forks processes with torch imported: a run takes one second instead of five."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    context = multiprocessing.get_context("forkserver")
    package = ["cdc_plugin.pipeline", "cdc_plugin.report.run_page", "cdc_plugin.cli.refine"]
    context.set_forkserver_preload(["tests.helpers.fault_runs", *package, "timm", "scipy.optimize", "omegaconf"])
    return context


def refine(*words: object, fault: Fault | Sequence[Fault] = (), limit: Callable[[], None] | None = None) -> Ended:
    faults = [fault] if isinstance(fault, Fault) else list(fault)
    return Started([str(word) for word in words], faults, limit).end()


def refine_until(ready: Callable[[], bool], number: int, *words: object, delay: float = 0.0) -> Ended:
    """Run and send a signal ``delay`` seconds after ``ready``."""
    started = Started([str(word) for word in words])
    while started.running() and not ready():
        time.sleep(0.002)
    time.sleep(delay)
    started.send(number)
    return started.end()


def assert_refused(ended: Ended, *words: str) -> str:
    """Check that the last line says what is wrong, without a traceback; return it."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.errors
    assert ended.last_line.startswith("cdc-refine: error: "), ended.errors
    for word in words:
        assert re.search(word, ended.last_line), ended.last_line
    return ended.last_line


def count_epochs(folder: Path) -> int:
    """Return the number of finished epochs in metrics.jsonl, of which every line must be complete at any moment."""
    file = folder / "metrics.jsonl"
    return len([json.loads(line) for line in file.read_text().splitlines()]) if file.is_file() else 0


def list_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def resume(folder: Path, words: list[str], attempts: int = 3) -> Ended:
    """Resume as a script would that starts the run again until it is done; the folder alone is enough."""
    for _ in range(attempts):
        ended = refine("--resume", "--out", folder)
        if re.search("nothing to resume|missing .*backbone", ended.last_line):
            ended = refine(*words, "--resume", "--out", folder)
        if ended.code == 0:
            return ended
    raise AssertionError(f"cannot be resumed: {ended.errors}")


def assert_same_results(folder: Path, whole: Path) -> None:
    """Check that two runs have left equal files, except for times."""
    import torch
    from safetensors.torch import load_file

    assert list_names(folder) == FILES == list_names(whole), list_names(folder) ^ FILES
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "weights differ"
    assert (folder / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()
    for name in ("report.json", "metrics.jsonl"):
        ours, theirs = (_read_without_times(path / name) for path in (folder, whole))
        assert ours == theirs, name


def _read_without_times(file: Path) -> list[dict[str, Any]]:
    text = file.read_text()
    records = [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else [json.loads(text)]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]
