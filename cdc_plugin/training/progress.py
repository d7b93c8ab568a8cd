"""What a run leaves to read while it goes on: train.log, metrics.jsonl, and a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cdc_plugin.data.atomic import write_atomically

log = logging.getLogger("cdc_plugin")


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append everything this package logs to a file."""
    # A file name that is no valid text must not spoil the log.
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        # On a full disk the last lines are lost; what the run itself says of it must not be.
        with contextlib.suppress(OSError):
            handler.close()


class _LogFile(logging.FileHandler):
    """A log on a full disk stops growing instead of covering the terminal with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        pass


def write_history(path: Path, history: list[dict[str, float]]) -> None:
    """One JSON object an epoch; the whole file is replaced, so that a reader never sees half a line."""
    text = "".join(json.dumps(line) + "\n" for line in history)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def show_progress(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """A bar around an iterable, on a terminal only."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=description, disable=not sys.stderr.isatty(), leave=False)


class TrainingProgress:
    """A bar over all batches of a run, and a log line an epoch with the time that is left."""

    def __init__(self, done_epochs: int, epochs: int, batches_an_epoch: int) -> None:
        from tqdm import tqdm

        self.epochs, self.batches = epochs, batches_an_epoch
        self.first_epoch = done_epochs
        self.began = self.epoch_began = time.monotonic()
        self.bar = tqdm(
            total=epochs * batches_an_epoch,
            initial=done_epochs * batches_an_epoch,
            desc="self-labeling",
            unit="batch",
            disable=not sys.stderr.isatty(),
        )

    def after_batch(self, stats: dict[str, float]) -> None:
        self.bar.set_postfix_str(
            f"loss {stats['clustering_loss']:.3f}, selected {stats['selected']:.0%}, "
            f"confidence {stats['confidence']:.0%}",
            refresh=False,
        )
        self.bar.update()

    def after_epoch(self, stats: dict[str, float]) -> dict[str, float]:
        """Log the epoch; returns its record for metrics.jsonl."""
        now = time.monotonic()
        seconds, self.epoch_began = now - self.epoch_began, now
        done = int(stats["epoch"])
        left = (now - self.began) / (done - self.first_epoch) * (self.epochs - done)
        log.info(
            "epoch %d/%d: clustering loss %.4f, calibration loss %.4f, selected %.1f%%, confidence %.1f%%, "
            "%.1f s, %s left",
            done,
            self.epochs,
            stats["clustering_loss"],
            stats["calibration_loss"],
            100 * stats["selected"],
            100 * stats["confidence"],
            seconds,
            _duration(left),
        )
        return {**stats, "seconds": round(seconds, 3)}

    def close(self) -> None:
        self.bar.close()


class CellProgress:
    """A bar over the cells of a comparison, and a log line for each with the time that is left."""

    def __init__(self, cells: int, finished: int) -> None:
        from tqdm import tqdm

        self.cells, self.before, self.done = cells, finished, finished
        self.began = time.monotonic()
        self.bar = tqdm(total=cells, initial=finished, desc="cells", unit="cell", disable=not sys.stderr.isatty())

    def after_cell(self, name: str, figures: dict[str, Any], seconds: float) -> None:
        """Count a cell; ``figures`` are those worth a word."""
        self.done += 1
        left = (time.monotonic() - self.began) / max(1, self.done - self.before) * (self.cells - self.done)
        words = "".join(f", {key} {100 * value:.1f}" for key, value in figures.items() if value is not None)
        log.info("%d/%d %s%s, %.0f s; %s left", self.done, self.cells, name, words, seconds, _duration(left))
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
