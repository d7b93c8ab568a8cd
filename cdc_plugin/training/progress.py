"""Report a run in progress: train.log, metrics.jsonl, and a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdc_plugin.training.pretext.config import PretrainConfig

log = logging.getLogger("cdc_plugin")
COLLAPSED = 0.1  # spread of an embedding (at most 1) below which it has collapsed


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append everything this package logs to a file."""
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
    """A log on a full disk stops growing instead of covering the terminal with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        pass


def show_progress(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """Return the items wrapped in a progress bar, which appears on a terminal only."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=description, disable=not sys.stderr.isatty(), leave=False)


class TrainingProgress:
    """A bar over all batches of a run, and one log line per epoch with the time left."""

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
        """Log the epoch; return its record for metrics.jsonl."""
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


class PretextProgress:
    """A bar over all batches of a pretext run, and one log line per epoch with the time left."""

    def __init__(self, done_epochs: int, config: PretrainConfig, batches_an_epoch: int) -> None:
        from tqdm import tqdm

        assert config.epochs is not None
        self.epochs, self.warmup = config.epochs, config.warmup_epochs or 0
        self.first_epoch = done_epochs
        self.began = self.epoch_began = time.monotonic()
        self.bar = tqdm(
            total=self.epochs * batches_an_epoch,
            initial=done_epochs * batches_an_epoch,
            desc=config.method,
            unit="batch",
            disable=not sys.stderr.isatty(),
        )

    def after_batch(self, stats: dict[str, float]) -> None:
        self.bar.set_postfix_str(f"loss {stats['loss']:.3f}, spread {stats['spread']:.2f}", refresh=False)
        self.bar.update()

    def after_epoch(self, stats: dict[str, float]) -> dict[str, float]:
        """Log the epoch, as a warning if the embedding has collapsed; return its record for metrics.jsonl."""
        now = time.monotonic()
        seconds, self.epoch_began = now - self.epoch_began, now
        done = int(stats["epoch"])
        left = (now - self.began) / (done - self.first_epoch) * (self.epochs - done)
        # Fresh weights give much the same embedding for all images; after the warm-up that is a failure.
        collapsed = stats["spread"] < COLLAPSED and done > self.warmup
        log.log(
            logging.WARNING if collapsed else logging.INFO,
            "epoch %d/%d: loss %.4f, spread %.2f%s, lr %.4f, %.1f s, %s left",
            done,
            self.epochs,
            stats["loss"],
            stats["spread"],
            " (collapsed: all images look alike to the network)" if collapsed else "",
            stats["lr"],
            seconds,
            _duration(left),
        )
        return {**stats, "seconds": round(seconds, 3)}

    def close(self) -> None:
        self.bar.close()


class CellProgress:
    """A bar over the cells of a comparison, and one log line per cell with the time left."""

    def __init__(self, cells: int, finished: int) -> None:
        from tqdm import tqdm

        self.cells, self.before, self.done = cells, finished, finished
        self.began = time.monotonic()
        self.bar = tqdm(total=cells, initial=finished, desc="cells", unit="cell", disable=not sys.stderr.isatty())

    def after_cell(self, name: str, figures: dict[str, Any], seconds: float) -> None:
        """Count a finished cell and log its ``figures``."""
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
