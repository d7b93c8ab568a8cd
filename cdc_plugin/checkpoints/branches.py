"""Distinguish weights as trained from their moving average, where a file keeps both under names of its own."""

from collections.abc import Mapping
from dataclasses import replace

from cdc_plugin.checkpoints.read import Checkpoint, find_state_dict, payload_fields
from cdc_plugin.errors import CheckpointError, option

# Names under which training scripts keep a second, averaged set of weights in the file.
AVERAGED = ("teacher", "state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema")


def find_average(checkpoint: Checkpoint) -> str | None:
    """Return the name of the averaged set of weights in a file."""
    payload = payload_fields(checkpoint.payload)
    return next((name for name in AVERAGED if isinstance(payload.get(name), Mapping)), None)


def take_branch(checkpoint: Checkpoint, branch: str | None) -> tuple[Checkpoint, str]:
    """Return the file with the wanted weights, where it holds an averaged set, and which ones they are in words."""
    payload, name = payload_fields(checkpoint.payload), find_average(checkpoint)
    if name is None:
        return checkpoint, ""
    teaches = name == "teacher" and branch is None
    if not teaches and branch != "momentum":
        if name != "teacher":
            return checkpoint, "the weights as trained; the file has an average too"
        name = "student"
    if not isinstance(payload.get(name), Mapping):
        raise CheckpointError(
            f"{checkpoint.path} has no online branch beside its teacher; leave {option('branch', 'online')} out"
        )
    state = find_state_dict(payload[name], f"{checkpoint.path} ({name})")
    return replace(checkpoint, state=state), f"the file's {name}" + (", as asked" if branch else "")


def take_bare_branch(checkpoint: Checkpoint, branch: str | None) -> tuple[Checkpoint, dict[str, str]]:
    """Return `take_branch` for a file of bare weights, whose names tell no branch: it has the wanted one or is refused.

    Without a wish it has been chosen already.
    """
    name = find_average(checkpoint)
    if branch is None:
        second = name not in (None, "teacher")
        return checkpoint, {"branch": f"the weights as trained; {name} has their average"} if second else {}
    if branch == "momentum" and name is None:
        raise CheckpointError(f"{checkpoint.path} has no moving average; leave out {option('branch', 'momentum')}")
    checkpoint, reason = take_branch(checkpoint, branch)
    return checkpoint, {"branch": reason} if reason else {}
