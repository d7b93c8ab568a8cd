"""The side of the images that a network takes, and how its authors make such squares of photos."""

from collections.abc import Mapping
from typing import Any

from cdc_plugin.config.schema import LARGEST_SIDE
from cdc_plugin.errors import CheckpointError, shorten

RESAMPLING = ("bilinear", "bicubic", "lanczos", "nearest", "box", "hamming")
MOST_STORED = 4  # times the side that a network sees; no published one asks for as much


class Side(int):
    """A side in pixels that knows more: photos are resized to ``stored``, of which the network sees the centre.

    Where the authors of a network state how they prepare images, its ``input_size`` is of this class; of a plain
    number the package makes squares in its own way. Squeezed photos lose their shape, others what is beyond a square.
    """

    stored: int
    shown: int
    resample: str
    squeezed: bool

    def __new__(cls, side: int, stored: int = 0, resample: str = "bilinear", squeezed: bool = False) -> "Side":
        if stored > MOST_STORED * side:  # squares of any size would be kept
            raise CheckpointError(
                f"photos are resized to at most {MOST_STORED} times the side of a network; found {stored} for {side}"
            )
        made = super().__new__(cls, side)
        made.stored, made.shown, made.resample, made.squeezed = stored or int(side), int(side), resample, squeezed
        return made

    def to_store(self) -> "Side":
        """Return the side of the squares that are kept, which are made in the same way."""
        kept = Side(self.stored, self.stored, self.resample, self.squeezed)
        kept.shown = self.shown
        return kept

    def scaled(self, side: int) -> "Side":
        """Return the same preparation for images of another size."""
        return Side(side, round(self.stored * side / self), self.resample, self.squeezed)

    @property
    def how(self) -> str:
        """Return the preparation in words."""
        if self.squeezed:
            return f"photos squeezed to {self.stored} x {self.stored} px ({self.resample})"
        centre = "" if self.stored == self.shown else f", the centre of {self.shown} px"
        return f"photos resized to {self.stored} px on their short side ({self.resample}){centre}"


def describe_side(side: int) -> str:
    """Return how squares of this side are made, in words; nothing for the package's own way."""
    return side.how if isinstance(side, Side) else ""


def write_side(side: int) -> dict[str, Any]:
    """Return a side as plain values for a file."""
    if not isinstance(side, Side):
        return {"input_size": side}
    resize = {"stored": side.stored, "resample": side.resample, "squeezed": side.squeezed}
    return {"input_size": int(side), "resize": resize}


def read_side(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the side that ``write_side`` wrote into it.

    >>> read_side({"input_size": 224, "resize": {"stored": 256, "resample": "bicubic", "squeezed": False}})
    {'input_size': 224}
    """
    rest = {name: value for name, value in record.items() if name != "resize"}
    resize, side = record.get("resize"), rest["input_size"]
    if resize is None:
        return rest
    stated = resize if isinstance(resize, Mapping) else {}
    stored, resample, squeezed = (stated.get(name) for name in ("stored", "resample", "squeezed"))
    if type(stored) is not int or not side <= stored <= LARGEST_SIDE or resample not in RESAMPLING:
        raise CheckpointError(f"a model's resize states stored, resample and squeezed; found {shorten(resize)}")
    return {**rest, "input_size": Side(side, stored, str(resample), squeezed is True)}
