"""Ways to select the pseudo-labels that are trusted, by name: CDC's own (Sec. 3.2) and those it is compared with."""

from __future__ import annotations

import torch

from cdc_plugin.core.registry import Registry
from cdc_plugin.core.selection.addons import AddOn, Extended, gradient_synchronisation, prototype_proximity
from cdc_plugin.core.selection.confident import Confident, ConfidentColumn, Selector
from cdc_plugin.core.selection.thresholds import Fixed, FlexMatch, FreeMatch

selections: Registry[type[Selector]] = Registry(
    "selection",
    {
        "confident": Confident,
        "confident-column": ConfidentColumn,
        "fixed": Fixed,
        "flexmatch": FlexMatch,
        "freematch": FreeMatch,
    },
)
addons: Registry[AddOn] = Registry("selection add-on", {"gsf": gradient_synchronisation, "ppf": prototype_proximity})


def check_selection(name: str) -> None:
    """Refuse names that `make_selector` does not know."""
    _look_up(name)


def make_selector(
    name: str, images: int, clusters: int, threshold: float, momentum: float, device: torch.device
) -> Selector:
    """Build the selection of this name, which may be followed by add-ons: ``confident+gsf``, ``freematch+gsf+ppf``.

    An add-on alone is added to CDC's selection: ``gsf`` is ``confident+gsf``. The other arguments are those of
    `Selector`.
    """
    kind, added = _look_up(name)
    selector = kind(images, clusters, threshold, momentum, device)
    return Extended(selector, added, device) if added else selector


def _look_up(name: str) -> tuple[type[Selector], list[AddOn]]:
    first, *added = name.split("+")
    if first in addons:
        first, added = "confident", [first, *added]
    return selections.get(first), [addons.get(addon) for addon in added]
