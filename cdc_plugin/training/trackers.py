"""Follow a run elsewhere, if the user asks for it: TensorBoard, Weights & Biases, or a tracker by entry point.

A tracker is a convenience: a missing package is refused before any work, but one that fails later (network down, disk
full) is dropped with a warning, and the run continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.core.registry import Registry
from cdc_plugin.data.atomic import read_json_object, write_text
from cdc_plugin.errors import UserError

log = logging.getLogger("cdc_plugin")
NOTES = "trackers.json"  # what every tracker has received, so that a resumed run continues where it stopped


class Tracker(Protocol):
    """The interface of an entry point ``cdc_plugin.tracker``; creating one imports the packages that it needs."""

    def start(self, config: dict[str, Any], folder: Path, kept: dict[str, Any]) -> None:
        """Begin a run with all settings of config.yaml, or continue it.

        ``kept`` lies in the result folder as JSON and is empty for a new run. A tracker may add to it; ``epoch``, the
        last one received, and ``finished`` are added for it.
        """

    def epoch(self, stats: dict[str, float], number: int) -> None: ...

    def finish(self, figures: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Release everything, after `finish` or when the run was interrupted."""


def make_trackers(names: Sequence[str] | None) -> dict[str, Tracker]:
    """Return the trackers by name; refuse what is unknown or not installed."""
    made = {}
    for name in dict.fromkeys(names or ()):
        try:
            made[name] = trackers.get(name)()
        except ImportError as error:
            raise UserError(
                f'tracker {name!r} needs the package {error.name}; type: pip install "cdc-plugin[log]", '
                "or run without it (at --resume: track=[])"
            ) from error
    return made


@contextlib.contextmanager
def open_trackers(
    names: Sequence[str] | None, folder: Path, config: RefineConfig, history: Sequence[Mapping[str, float]]
) -> Iterator[Tracking]:
    """Open all trackers of a run, bring them up to date with its finished epochs, and close them whatever happens."""
    with contextlib.closing(Tracking(make_trackers(names), folder)) as tracking:
        tracking.start(dataclasses.asdict(config), history)
        yield tracking


class Tracking:
    """Pass everything on to each tracker once, also over several starts of a run."""

    def __init__(self, running: dict[str, Tracker], folder: Path) -> None:
        self.running, self.folder = running, folder
        self.kept: dict[str, dict[str, Any]] = {}
        # Where the notes are missing or damaged, the trackers receive everything again.
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            if running:
                notes = read_json_object(folder / NOTES)
                self.kept = {name: kept for name, kept in notes.items() if type(kept.get("epoch", 0)) is int}

    def start(self, config: dict[str, Any], history: Sequence[Mapping[str, float]]) -> None:
        for name in list(self.running):
            self._call(name, "start", config, self.folder, self.kept.setdefault(name, {}))
        self._note()
        for stats in history:  # epochs saved but not yet passed on, or all of them for a new tracker
            self.epoch(stats)

    def epoch(self, stats: Mapping[str, float]) -> None:
        number = int(stats["epoch"])
        behind = [name for name in self.running if self.kept[name].get("epoch", 0) < number]
        for name in behind:
            if self._call(name, "epoch", {k: v for k, v in stats.items() if k != "epoch"}, number):
                self.kept[name]["epoch"] = number
        if behind:
            self._note()

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Pass on the figures of report.json."""
        for name in list(self.running):
            if self._call(name, "finish", flat_figures(metrics)):
                self.kept[name]["finished"] = True
        self._note()

    def close(self) -> None:
        for name in list(self.running):
            self._call(name, "close")

    def _call(self, name: str, method: str, *arguments: Any) -> bool:
        """Return whether the call succeeded; a tracker that fails once is not called again."""
        try:
            getattr(self.running[name], method)(*arguments)
        except Exception as error:
            del self.running[name]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("tracker %s failed and is left out from now on; the run continues: %s", name, reason[:200])
            return False
        return True

    def _note(self) -> None:
        if self.kept:
            with contextlib.suppress(UserError):  # a full disk: the run itself will say so
                write_text(self.folder / NOTES, json.dumps(self.kept, indent=2) + "\n")


def flat_figures(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the single numbers of a nested report, ``{"after/calibration_head/ACC": 0.9}``, without lists and text."""
    figures: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            figures |= flat_figures(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            figures[f"{prefix}{key}"] = value
    return figures


class TensorBoard:
    """Event files in ``tensorboard`` in the result folder.

    tensorboardX's own `SummaryWriter` hands events to a thread; when that dies, on a full disk say, the run would wait
    for it forever. Its synchronous writer is used instead: an epoch is on the disk, or its failure is reported.
    """

    def __init__(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar, text

        self._open, self._event, self._session, self._scalar, self._text = EventsWriter, Event, SessionLog, scalar, text

    def start(self, config: dict[str, Any], folder: Path, kept: dict[str, Any]) -> None:
        logs = folder / "tensorboard"
        logs.mkdir(exist_ok=True)
        if not kept:
            for earlier in logs.glob("events.out.tfevents.*"):  # of a run that was overwritten
                earlier.unlink()
        self.last, self.finished = kept.get("epoch", 0), kept.get("finished", False)
        # The name holds the second; the suffix keeps a start within the same one from replacing the file.
        self.writer = self._open(str(logs / "events"), f".{uuid.uuid4().hex[:8]}")
        # Readers drop from earlier files what a killed run had written but not recorded.
        self._write(self.last + 1, session_log=self._session(status=self._session.START))
        if not kept:
            settings = json.dumps(config, indent=2).replace("\n", "\n    ")  # indented: Markdown shows it as it is
            self._write(0, summary=self._text("settings", f"    {settings}"))
        self.writer.flush()

    def epoch(self, stats: dict[str, float], number: int) -> None:
        self.last = number
        self._scalars({f"train/{name}": value for name, value in stats.items()})

    def finish(self, figures: dict[str, float]) -> None:
        if not self.finished:  # a finished run that is resumed comes to the same figures
            self._scalars(figures)

    def close(self) -> None:
        self.writer.close()

    def _scalars(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._write(self.last, summary=self._scalar(name, value))
        self.writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        self.writer.write_event(self._event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases:
    """A run of Weights & Biases; WANDB_MODE=offline and the other variables of its own decide where it goes."""

    def __init__(self) -> None:
        # A folder "wandb", as it leaves behind, can be imported like a package; it has no such name.
        from wandb import init

        self._init, self.finished = init, False

    def start(self, config: dict[str, Any], folder: Path, kept: dict[str, Any]) -> None:
        kept.setdefault("id", uuid.uuid4().hex[:12])
        self.run = self._init(
            id=kept["id"],
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "cdc-plugin"),
            name=os.environ.get("WANDB_NAME", folder.absolute().name),
            dir=os.environ.get("WANDB_DIR", str(folder)),
            config=config,
        )

    def epoch(self, stats: dict[str, float], number: int) -> None:
        self.run.log({f"train/{name}": value for name, value in stats.items()}, step=number, commit=True)

    def finish(self, figures: dict[str, float]) -> None:
        self.run.summary.update(figures)
        self.finished = True

    def close(self) -> None:
        self.run.finish(exit_code=0 if self.finished else 1)


trackers: Registry[Callable[[], Tracker]] = Registry("tracker", {"tensorboard": TensorBoard, "wandb": WeightsAndBiases})
