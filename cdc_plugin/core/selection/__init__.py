"""Select pseudo-labels to trust: CDC's confidence-aware selection (Sec. 3.2, Eq. 4), and all selections by name."""

import torch
from torch import Tensor

from cdc_plugin.core.kmeans import count_members
from cdc_plugin.core.registry import Registry
from cdc_plugin.core.selection.addons import AddOn, Extended, gradient_synchronisation, prototype_proximity
from cdc_plugin.core.selection.base import Selection, SelectionInput, Selector
from cdc_plugin.core.selection.thresholds import Fixed, FlexMatch, FreeMatch
from cdc_plugin.errors import ConfigError, option

AT_ONCE = 1 << 20  # probabilities that are sorted at once: all of a batch, but not all of a large set


def select_confident(probs: Tensor, shares: Tensor | None = None) -> Selection:
    """Trust the top M(c) samples of every cluster c, where M(c) is their summed confidence (Sec. 3.2, Eq. 4).

    TOP(c) holds the B // C samples whose weak views have the largest calibrated probability (B, C) of c. "Confidence"
    is read as the largest probability of a sample, as in the released code, whose mean times B // C is the sum taken
    here. The label of a trusted sample is its own most probable cluster, even where another cluster's list holds it.
    With the ``shares`` (C,) of clusters that are not of equal size, TOP(c) holds about B times the share of c.

    >>> sure, unsure = [[0.99, 0.01]] * 4, [[0.4, 0.6]] * 4
    >>> select_confident(torch.tensor(sure + unsure)).quota  # floor(4 * .99), floor(4 * .6)
    tensor([3, 2])
    """
    confidence, labels = probs.max(dim=1)
    if shares is None:
        top = _top_samples(probs)
        return _trust(labels, top, confidence[top].sum(dim=0))
    order, held = _order_samples(probs, shares)
    return _trust(labels, order, (confidence[order] * held).sum(dim=0))


def select_confident_column(probs: Tensor, shares: Tensor | None = None) -> Selection:
    """Trust as `select_confident`, with M(c) the summed probability *of cluster c*: the stricter reading of Eq. 4.

    The readings differ where a cluster's list holds samples of other clusters, that is, where the cluster is
    smaller than B // C: this one then trusts fewer of them.
    """
    labels = probs.argmax(dim=1)
    if shares is None:
        top = _top_samples(probs)
        return _trust(labels, top, probs.gather(0, top).sum(dim=0))
    order, held = _order_samples(probs, shares)
    return _trust(labels, order, (probs.gather(0, order) * held).sum(dim=0))


def _top_samples(probs: Tensor) -> Tensor:
    """Return TOP(c): (B // C, C), best sample first and of equal ones the first, so that devices agree on ties."""
    batch, clusters = probs.shape
    if batch < clusters:
        raise ConfigError(
            f"a batch of {batch} images cannot hold one image for each of {clusters} clusters; "
            f"pass batch_size={2 * clusters} or more (and at least as many images), or {option('clusters', batch)}"
        )
    parts = probs.split(max(1, AT_ONCE // batch), dim=1)
    return torch.cat([_top_of_columns(part, batch // clusters) for part in parts], dim=1)


def _top_of_columns(probs: Tensor, count: int) -> Tensor:
    best = probs.topk(count, dim=0)
    if ((probs >= best.values[-1]).sum(dim=0) == len(best.values)).all():  # no tie for the last place
        rows = best.indices.sort(dim=0).values
        return rows.gather(0, probs.gather(0, rows).sort(dim=0, descending=True, stable=True).indices)
    return probs.sort(dim=0, descending=True, stable=True).indices[:count]


def _order_samples(probs: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return all samples of the batch in their order for each cluster (B, C), and which of these are TOP(c)."""
    order = probs.sort(dim=0, descending=True, stable=True).indices
    depth = (len(probs) * shares).round().clamp(min=1)
    return order, torch.arange(len(order), device=order.device).unsqueeze(1) < depth


def _trust(labels: Tensor, top: Tensor, mass: Tensor) -> Selection:
    quota = mass.floor().long()
    rank = torch.arange(len(top), device=top.device).unsqueeze(1)
    times = count_members(top.flatten(), len(labels), (rank < quota).flatten())
    return Selection(labels, times > 0, quota)


class Confident(Selector):
    """`select_confident`: the selection of CDC."""

    def __call__(self, batch: SelectionInput) -> Selection:
        return select_confident(batch.probs, batch.shares)


class ConfidentColumn(Selector):
    """`select_confident_column`: the stricter reading of Eq. 4."""

    def __call__(self, batch: SelectionInput) -> Selection:
        return select_confident_column(batch.probs, batch.shares)


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


def make_selector(
    name: str, image_count: int, clusters: int, threshold: float, momentum: float, device: torch.device
) -> Selector:
    """Build the selection of this name, which may be followed by add-ons: ``confident+gsf``, ``freematch+gsf+ppf``.

    An add-on alone is added to CDC's selection: ``gsf`` is ``confident+gsf``. The other arguments are those of
    `Selector`.

    >>> type(make_selector("flexmatch", 100, 10, 0.95, 0.999, torch.device("cpu"))).__name__
    'FlexMatch'
    """
    kind, added = check_selection(name)
    selector = kind(image_count, clusters, threshold, momentum, device)
    return Extended(selector, added) if added else selector


def check_selection(name: str) -> tuple[type[Selector], list[AddOn]]:
    """Return the selection of this name and its add-ons; refuse unknown names."""
    first, *added = name.split("+")
    if first in addons:
        first, added = "confident", [first, *added]
    return selections.get(first), [addons.get(addon) for addon in added]
