"""Handle what goes wrong while a run trains: roll back, explain, or refuse."""

from __future__ import annotations

from pathlib import Path

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import UserError, option
from cdc_plugin.training.distributed import SINGLE, Distributed
from cdc_plugin.training.progress import log
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.run_folder import Run, read_state

SLOW_DOWN = 0.1  # on all learning rates, after a loss that was not finite
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
LOST_CONNECTION = ("connection", "peer", "gloo", "nccl", "barrier", "timed out")


def roll_back(run: Run, refiner: Refiner) -> None:
    """Return to the last good epoch with lower rates, once; the second time, end the run."""
    settings, epoch = run.settings, refiner.epoch + 1
    if refiner.slow_down < 1:
        slower = refiner.slow_down / 10
        raise UserError(
            f"the loss is NaN or infinite in epoch {epoch}, again, at {refiner.slow_down:g} of the rates; the "
            f"{epoch - 1} epochs before it are kept in {run.folder}; start a new run with "
            f"lr_backbone={settings.lr_backbone * slower:g} lr_heads={settings.lr_heads * slower:g}, or "
            f"{option('freeze_backbone')}"
        )
    distributed = SINGLE if settings.freeze_backbone else run.runtime.distributed  # frozen: the main one trains alone
    state = distributed.broadcast_from_main(lambda: read_state(run.folder))
    if state is None:
        raise UserError(f"the loss is NaN or infinite, and the state in {run.folder} is gone; start a new run")
    refiner.restore(state["refiner"])
    refiner.slow_down, run.setback = SLOW_DOWN, epoch
    log.warning(
        "the loss is NaN or infinite in epoch %d: back to epoch %d, rates times %g", epoch, refiner.epoch, SLOW_DOWN
    )


def setback_warning(epoch: int | None) -> list[dict[str, str]]:
    """Return the report's warning about a run that was rolled back."""
    if epoch is None:
        return []
    text = (
        f"The loss was NaN or infinite in epoch {epoch}: from the epoch before it on, the rates were {SLOW_DOWN:g} of "
        "those asked for. Lower lr_backbone and lr_heads, or precision=float32, may give a better run."
    )
    return [{"kind": "not-finite", "text": text}]


def explain_error(error: Exception, config: RefineConfig, folder: Path, distributed: Distributed) -> Exception:
    """Return an error of torch that the user can do something about in plain words; any other one as it is."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
        smaller = max(2, (config.sub_batch_size or 128) // 2)
        return UserError(
            f"out of memory; finished epochs are kept in {folder}; start a new run in another folder with "
            f"sub_batch_size={smaller}, with a smaller batch_size, or with {option('freeze_backbone')}"
        )
    if config.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        reason = (str(error).splitlines() or [""])[0][:150]
        return UserError(f"the backbone cannot be compiled here ({reason}); leave compile=true out")
    if distributed.size > 1 and any(words in text for words in LOST_CONNECTION):
        return UserError(
            f"another process of this run has ended; finished epochs are kept in {folder}: start it again with "
            f"{option('resume')}, or let torchrun do so with --max-restarts"
        )
    return error
