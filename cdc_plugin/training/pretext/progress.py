"""What a run of the pretext stage shows while it goes on: a bar on a terminal, and a log line an epoch."""

from __future__ import annotations

import logging
import sys
import time

from cdc_plugin.training.pretext.config import PretrainConfig
from cdc_plugin.training.progress import _duration, log

COLLAPSED = 0.1  # of the spread of an embedding, 1 at most


class PretextProgress:
    """A bar over all batches of a run, and a log line an epoch with the time that is left."""

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
        """Log the epoch, as a warning if the embedding has collapsed; returns its record for metrics.jsonl."""
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
