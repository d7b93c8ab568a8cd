"""What goes wrong while a run trains, and what is done or said about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cdc_plugin.config.schema import RefineConfig, resolve
from cdc_plugin.errors import UserError
from cdc_plugin.training.distributed import Distributed
from cdc_plugin.training.progress import log
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.run_folder import read_state
from cdc_plugin.training.run_state import Run

SLOWER = 0.1  # on all rates, after a loss that was not finite
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
NO_COMPANY = ("connection", "peer", "gloo", "nccl", "barrier", "timed out")


def roll_back(current: Run, refiner: Refiner) -> None:
    """Go on from the last good epoch with lower rates, once; a second time the run ends."""
    config, epoch = current.config, refiner.epoch + 1
    assert config.lr_backbone is not None
    assert config.lr_heads is not None
    if refiner.slower < 1:
        slower = refiner.slower / 10
        raise UserError(
            f"the loss is not finite in epoch {epoch}, again, at {refiner.slower:g} of the rates; the {epoch - 1} "
            f"epochs before it are kept in {current.folder}; start anew with "
            f"lr_backbone={config.lr_backbone * slower:g} lr_heads={config.lr_heads * slower:g}, or --freeze-backbone"
        )
    state = current.distributed.broadcast_from_main(lambda: read_state(current.folder))
    assert state is not None
    refiner.restore(state["refiner"])
    refiner.slower, current.setback = SLOWER, epoch
    log.warning("the loss is not finite in epoch %d: back to epoch %d, rates times %g", epoch, refiner.epoch, SLOWER)


def setback_warning(epoch: int | None) -> list[dict[str, str]]:
    """What the report says of a run that has stepped back."""
    if epoch is None:
        return []
    text = (
        f"The loss was not finite in epoch {epoch}: from the epoch before it on, the rates were {SLOWER:g} of those "
        "asked for. Lower lr_backbone and lr_heads, or precision=float32, may give a better run."
    )
    return [{"kind": "not-finite", "text": text}]


def explain_error(error: Exception, config: RefineConfig, folder: Path, distributed: Distributed) -> Exception:
    """An error of torch that the user can do something about; any other one as it is."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
        smaller = max(2, (config.sub_batch_size or 128) // 2)
        return UserError(
            f"out of memory; finished epochs are kept in {folder}; start anew with another --out and "
            f"sub_batch_size={smaller}, with a smaller batch_size, or with --freeze-backbone"
        )
    if config.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        reason = (str(error).splitlines() or [""])[0][:150]
        return UserError(f"the backbone can not be compiled here ({reason}); leave compile=true out")
    if distributed.size > 1 and any(words in text for words in NO_COMPANY):
        return UserError(
            f"another process of this run has ended; finished epochs are kept in {folder}: start it again with "
            "--resume, or let torchrun do so with --max-restarts"
        )
    return error


def check_resume_settings(given: RefineConfig, stored: RefineConfig, images: int, folder: Path) -> None:
    """Going on with other settings would give a run that no command describes."""
    default = RefineConfig()
    names = [
        item.name
        for item in dataclasses.fields(RefineConfig)
        if item.name not in ("out", "device", "augment", "from_recipe", "track", "on_collapse")
    ]
    names = [name for name in names if name not in given.from_recipe]
    asked = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(default, name)}
    # Sizes beyond the data were cut when the run began; the same command must be taken again.
    size = asked.get("input_size") or stored.input_size or 0
    wanted = resolve(dataclasses.replace(stored, **asked), images, size)
    for name in asked:
        if getattr(wanted, name) != getattr(stored, name):
            raise UserError(
                f"{folder} was begun with {name}={getattr(stored, name)}, now {name}={asked[name]} is asked for; "
                "resume without it, or start another run with its own --out"
            )
