"""Report a run in progress: train.log, metrics.jsonl, and a progress bar on a terminal."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cdc_plugin.errors import OutputError

log = logging.getLogger("cdc_plugin")
COLLAPSED = 0.1  # spread of an embedding (at most 1) below which it has collapsed


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append everything this package logs to a file, and never to what a link in somebody's folder leads to."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OutputError(f"{path} is a link or no regular file, where a run writes its log; remove it first")
    # A file name that is not valid text must not break the log.
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
        # On a full disk the last lines are lost; the error of the run itself must not be.
        with contextlib.suppress(OSError):
            handler.close()


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Stop growing on a full disk instead of covering the terminal with tracebacks."""


def show_progress(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """Return the items wrapped in a progress bar, which appears on a terminal only."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=description, disable=not sys.stderr.isatty(), leave=False)


class _RunProgress:
    """A bar on a terminal over all rounds (epochs or cells) of a run, and the time that the run has left."""

    at_most = ""  # before the time left, where a run may end earlier

    def __init__(self, name: str, unit: str, rounds: int, done: int, steps: int = 1) -> None:
        """Begin after the rounds that an earlier start has done; each has so many steps of the bar."""
        from tqdm import tqdm

        self.rounds, self.first = rounds, done
        self.began = self.round_began = time.monotonic()
        off = not sys.stderr.isatty()
        self.bar = tqdm(total=rounds * steps, initial=done * steps, desc=name, unit=unit, disable=off)

    def close(self) -> None:
        self.bar.close()

    def _time_left(self, done: int) -> str:
        seconds = (time.monotonic() - self.began) / (done - self.first) * (self.rounds - done)
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

    def _advance(self, figures: str) -> None:
        self.bar.set_postfix_str(figures, refresh=False)
        self.bar.update()

    def record_epoch(self, stats: dict[str, float]) -> dict[str, float]:
        """Return the record of an epoch for metrics.jsonl; to be logged once it is on disk."""
        now = time.monotonic()
        seconds, self.round_began = now - self.round_began, now
        return {**stats, "seconds": round(seconds, 3)}

    def _log_epoch(self, record: dict[str, float], figures: str, level: int = logging.INFO) -> None:
        """Log an epoch with its time and the time left."""
        done, seconds = int(record["epoch"]), record["seconds"]
        left = f"{self.at_most}{self._time_left(done)}"
        log.log(level, "epoch %d/%d: %s, %.1f s, %s left", done, self.rounds, figures, seconds, left)


class TrainingProgress(_RunProgress):
    """A bar over all batches of a run, and one log line per epoch with the time left.

    A run of several rounds may end after each of them: the time is what is left at most.
    """

    def __init__(self, done_epochs: int, epochs: int, batches_per_epoch: int, rounds: int = 1) -> None:
        super().__init__("self-labeling", "batch", epochs, done_epochs, batches_per_epoch)
        self.at_most = "at most " if rounds > 1 else ""

    def after_batch(self, stats: dict[str, float]) -> None:
        loss, selected, confidence = (stats[name] for name in ("clustering_loss", "selected", "confidence"))
        self._advance(f"loss {loss:.3f}, selected {selected:.0%}, confidence {confidence:.0%}")

    def after_epoch(self, record: dict[str, float]) -> None:
        """Log the epoch."""
        losses = ", ".join(f"{name} loss {record[f'{name}_loss']:.4f}" for name in ("clustering", "calibration"))
        shares = ", ".join(f"{name} {100 * record[name]:.1f}%" for name in ("selected", "confidence"))
        self._log_epoch(record, f"{losses}, {shares}")


class PretextProgress(_RunProgress):
    """A bar over all batches of a pretext run, and one log line per epoch with the time left."""

    def __init__(self, done_epochs: int, epochs: int, batches_per_epoch: int, method: str, warmup_epochs: int) -> None:
        super().__init__(method, "batch", epochs, done_epochs, batches_per_epoch)
        self.warmup_epochs = warmup_epochs

    def after_batch(self, stats: dict[str, float]) -> None:
        self._advance(f"loss {stats['loss']:.3f}, spread {stats['spread']:.2f}")

    def after_epoch(self, record: dict[str, float], saved: bool = True) -> None:
        """Log the epoch, as a warning if the embedding has collapsed."""
        # Fresh weights give much the same embedding for all images; after the warm-up that is a failure.
        collapsed = record["spread"] < COLLAPSED and record["epoch"] > self.warmup_epochs
        warning = " (collapsed: all images look alike to the network)" if collapsed else ""
        figures = f"loss {record['loss']:.4f}, spread {record['spread']:.2f}{warning}, lr {record['lr']:.4f}"
        figures += "" if saved else ", not saved yet"
        self._log_epoch(record, figures, logging.WARNING if collapsed else logging.INFO)


class CellProgress(_RunProgress):
    """A bar over the cells of a comparison, and one log line per cell with the time left."""

    def __init__(self, cells: int, finished: int) -> None:
        super().__init__("cells", "cell", cells, finished)
        self.done = finished

    def after_cell(self, name: str, figures: dict[str, Any], seconds: float) -> None:
        """Count a finished cell and log its ``figures``."""
        self.done += 1
        words = "".join(f", {key} {100 * value:.1f}" for key, value in figures.items() if value is not None)
        left = self._time_left(self.done)
        log.info("%d/%d %s%s, %.0f s; %s left", self.done, self.rounds, name, words, seconds, left)
        self.bar.update()
