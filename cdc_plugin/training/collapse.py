"""The collapse guard: what the records of the epochs say about dying clusters, and what to change.

All functions are pure and see no labels: a resumed run, which has the same history, is judged the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdc_plugin.config.schema import PAPER_LR_BACKBONE, PAPER_LR_HEADS, RefineConfig
from cdc_plugin.errors import UserError

# Thresholds. They are constants: no run sees a label. They were set in development, by looking at selected shares,
# confidence and cluster sizes of some 115 runs on digits, Fashion-MNIST, CIFAR-10 and ten ImageNet classes (10 of them
# had collapsed, all by a fixed threshold), and of 15 short ones, the only ones for the sizes epoch by epoch: sound
# ones, unequal classes, and collapses made by rate, threshold, number of clusters, random heads, untrained backbone.

# Shares of the images that are selected. Runs that came to something had 0.2 and more; with many clusters an unsure
# start may have less, but a fixed threshold that is missed by nine of ten images was missed by all soon after.
NOTHING, FEW, FEW_ABOVE = 0.005, 0.05, 0.1
SHRUNK = 0.6  # of the best share of the run; FreeMatch, which begins with all images, came down to 0.71 unharmed
# Of the best confidence. Sound runs came down to 0.76: unequal classes, and old heads that promised too much.
FORGOTTEN, FORGOTTEN_STRAINED = 0.7, 0.8
UNHEEDED, HARDLY_TAUGHT = 0.9, 0.2  # a confidence that falls while few images are selected is the selection's doing
CHANCE, CHANCE_FOR_GOOD = 0.05, 0.02  # confidence, on a scale where 0 is 1 / C and 1 is 1
SWALLOWED, LARGE, ALL_IN_ONE = 0.25, 0.6, 0.98  # the largest cluster, the first two on a scale from 1 / C to 1
UNUSED = 0.25  # share of clusters without any image; a sound run may lose one of ten
SATURATED = 0.98
WEAK_START = 0.2  # confidence of the first epoch, on a scale from 1 / C to 1; untrained networks had 0.1
USUAL_RATES = 20.0  # `config.resolve` makes the paper's rates up to so many times larger
THIN = 10  # images a cluster in a batch; the paper has 25 and more


@dataclass(frozen=True)
class Finding:
    """What was seen after an epoch, with what to change; ``dead``: nothing can be learned any more."""

    epoch: int
    kind: str
    text: str
    dead: bool = False


@dataclass(frozen=True)
class _Epoch:
    """A record as numbers; NaN where it says nothing: comparisons with it are false, and nobody is alarmed."""

    number: int
    selected: float
    confidence: float
    largest: float
    used: float


@dataclass(frozen=True)
class _Past:
    """The epochs up to the one that is judged: the first, the last three (newest last), and the best values."""

    clusters: int
    first: _Epoch
    last: Sequence[_Epoch]
    most_selected: float
    most_confident: float


def findings(history: Sequence[Mapping[str, float]], config: RefineConfig) -> list[Finding]:
    """Everything there is to say of a run, each kind once: as a warning, and again if it turns out dead."""
    found: list[Finding] = []
    told = set()
    for past in _pasts(history, config):
        for finding in _judge(past, config):
            if (finding.kind, finding.dead) not in told:
                told.add((finding.kind, finding.dead))
                found.append(finding)
    return found


def new_findings(history: Sequence[Mapping[str, float]], config: RefineConfig) -> list[Finding]:
    """Those of `findings` that the last epoch has brought: what to log after it."""
    return [finding for finding in findings(history, config) if finding.epoch == history[-1]["epoch"]]


def as_warnings(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """PageData as the quality card has its warnings, with the epoch they are of."""
    return [
        {"kind": each.kind, "text": f"After epoch {each.epoch}: {each.text}", "epoch": each.epoch, "dead": each.dead}
        for each in found
    ]


def refuse_dead(history: Sequence[Mapping[str, float]], config: RefineConfig) -> None:
    """Refuse to train on in a dead state, unless the user wants it; a run that is resumed is refused as well.

    After the last epoch there is nothing to refuse: the report says what was found.
    """
    if config.on_collapse == "warn" or config.epochs is None or len(history) >= config.epochs:
        return
    for past in list(_pasts(history, config))[-1:]:
        for finding in _judge(past, config):
            if finding.dead:
                raise UserError(
                    f"stopped after epoch {finding.epoch}: {finding.text} All up to here is kept; "
                    "to train on nevertheless: the same command with --resume and on_collapse=warn"
                )


def _pasts(history: Sequence[Mapping[str, float]], config: RefineConfig) -> Iterator[_Past]:
    assert config.clusters is not None
    epochs = [_read(record, position) for position, record in enumerate(history, start=1)]
    most_selected = most_confident = math.nan
    for position, epoch in enumerate(epochs):
        most_selected = _larger(most_selected, epoch.selected)
        most_confident = _larger(most_confident, epoch.confidence)
        last = epochs[max(0, position - 2) : position + 1]
        yield _Past(config.clusters, epochs[0], last, most_selected, most_confident)


def _read(record: Mapping[str, float], position: int) -> _Epoch:
    names = ("selected", "confidence", "largest_cluster", "used_clusters")
    return _Epoch(int(record.get("epoch", position)), *(float(record.get(name, math.nan)) for name in names))


def _larger(a: float, b: float) -> float:
    return b if math.isnan(a) or b > a else a


def _judge(past: _Past, config: RefineConfig) -> list[Finding]:
    """All that holds after the last epoch of ``past``."""
    found = [*_about_selection(past, config), *_about_confidence(past, config), *_about_sizes(past)]
    now = past.last[-1]
    return [Finding(now.number, kind, f"{seen} {_advice(kind, past, config)}", dead) for kind, seen, dead in found]


Seen = tuple[str, str, bool]  # kind, what was seen, dead


def _about_selection(past: _Past, config: RefineConfig) -> Iterator[Seen]:
    now, most = past.last[-1], past.most_selected
    few = FEW_ABOVE if _way(config) == "fixed" else FEW
    if now.selected < NOTHING:
        before = past.last[-2].selected if len(past.last) > 1 else math.nan
        dead = before < NOTHING and now.selected <= before
        again = " for two epochs: the clusters learn nothing any more." if dead else "."
        yield "nothing-selected", f"{_share(now.selected)} of the images are selected for training{again}", dead
    elif now.selected < few:
        yield "few-selected", f"Only {_share(now.selected)} of the images are selected for training.", False
    elif now.selected < SHRUNK * most:
        seen = f"{_share(now.selected)} of the images are selected for training, after {_share(most)} at best."
        yield "selection-shrinks", seen, False


def _about_confidence(past: _Past, config: RefineConfig) -> Iterator[Seen]:
    now, most, clusters = past.last[-1], past.most_confident, past.clusters
    level = _above_chance(now.confidence, clusters)
    if level < CHANCE:
        three = len(past.last) == 3 and now.confidence <= past.last[0].confidence
        dead = three and all(_above_chance(epoch.confidence, clusters) < CHANCE_FOR_GOOD for epoch in past.last)
        seen = f"The mean confidence is {_share(now.confidence)}, as if clusters were drawn by lot"
        yield "chance", f"{seen}{', for three epochs' if dead else ''}.", dead
    # Old heads are often too sure, and it is what the stage is for that they become less so.
    lost = FORGOTTEN_STRAINED if config.init != "keep" and (_thin(config) or _fast(config)) else FORGOTTEN
    untaught = now.confidence < UNHEEDED * most and now.selected < HARDLY_TAUGHT
    if now.confidence < lost * most or untaught:
        seen = f"The mean confidence has fallen from {_share(most)} to {_share(now.confidence)}."
        yield "confidence-falls", seen, False


def _about_sizes(past: _Past) -> Iterator[Seen]:
    now, first, clusters = past.last[-1], past.first, past.clusters
    if _swallowed(now, first, clusters):
        two = len(past.last) > 1 and all(_all_in_one(epoch, clusters) for epoch in past.last[-2:])
        grown = f", {_share(first.largest)} in epoch {first.number}" if now.largest > first.largest else ""
        seen = f"One cluster holds {_share(now.largest)} of the images{grown}"
        yield "one-cluster", f"{seen}{': the others are dead.' if two else '.'}", two
    elif now.used <= (1 - UNUSED) * clusters:
        yield "clusters-die", f"No image comes into {clusters - int(now.used)} of {clusters} clusters.", False
    if now.confidence > SATURATED and now.used <= clusters / 2:
        seen = f"The mean confidence is {_share(now.confidence)} with {int(now.used)} of {clusters} clusters in use."
        yield "over-confident", seen, False


def _swallowed(now: _Epoch, first: _Epoch, clusters: int) -> bool:
    """Whether one cluster is too large to be a large class: by far larger than at the start, or than all others."""
    if clusters == 2:  # sound data may lie nine to one
        return _all_in_one(now, clusters) or (now.largest > ALL_IN_ONE and first.largest < 0.9)
    level = _above_chance(now.largest, clusters)
    return (level > SWALLOWED and now.largest > 2 * first.largest) or level > LARGE


def _all_in_one(epoch: _Epoch, clusters: int) -> bool:
    return epoch.used == 1 or (clusters > 2 and epoch.largest > ALL_IN_ONE)


def _above_chance(share: float, clusters: int) -> float:
    """0 at 1 / C, 1 at 1."""
    return (share - 1 / clusters) / (1 - 1 / clusters)


def _way(config: RefineConfig) -> str:
    """The selection without its add-ons."""
    return config.selection.split("+")[0]


def _thin(config: RefineConfig) -> bool:
    return (config.batch_size or math.inf) < THIN * (config.clusters or 2)


def _fast(config: RefineConfig) -> bool:
    return bool(_slower_rates(config))


def _slower_rates(config: RefineConfig) -> list[str]:
    """A tenth of every rate that lies beyond what this package would choose itself."""
    backbone = 0.0 if config.freeze_backbone else config.lr_backbone or 0.0
    rates = {"lr_backbone": (backbone, PAPER_LR_BACKBONE), "lr_heads": (config.lr_heads or 0.0, PAPER_LR_HEADS)}
    # A thousandth more: twenty times the paper's rate, as chosen, is not to be lost to rounding.
    return [f"{name}={rate / 10:g}" for name, (rate, paper) in rates.items() if rate > 1.001 * USUAL_RATES * paper]


def _advice(kind: str, past: _Past, config: RefineConfig) -> str:
    """The two likeliest remedies, as words to type."""
    first, *rest = _remedies(kind, past, config)
    return f"Try {first}{f', or {rest[0]}' if rest else ''}."


def _remedies(kind: str, past: _Past, config: RefineConfig) -> list[str]:
    """What may help, likeliest first: settings that were seen to collapse runs, then what helps in general."""
    now, clusters = past.last[-1], past.clusters
    way = _way(config)
    weak = _above_chance(past.first.confidence, clusters) < WEAK_START or _swallowed(past.first, past.first, clusters)
    backbone = "another backbone (cdc-inspect BACKBONE --data IMAGES says whether this one tells images apart)"
    found = []
    if way in ("fixed", "flexmatch", "freematch"):
        found.append("selection=confident")
    lower = math.floor(20 * now.confidence) / 20 if now.confidence > 0 else math.nan
    if way == "fixed" and kind in ("nothing-selected", "few-selected") and 0 < lower < config.threshold:
        found.append(f"threshold={lower:g}, below the mean confidence of {_share(now.confidence)}")
    found += _slower_rates(config)
    if _thin(config):
        batch = f"batch_size={25 * clusters} if there are as many images"
        found += [f"fewer --clusters: a batch has {config.batch_size} images for {clusters}", batch]
    if config.init == "random":
        found.append("--init prototypes")
    if config.entropy_weight < 1:
        found.append("entropy_weight=1")
    if weak:
        found.append(backbone)
    if kind == "clusters-die" and now.used >= 2:
        found.append(f"--clusters {int(now.used)}")
    if not config.freeze_backbone:
        found.append("--freeze-backbone")
        found.append(f"lr_backbone={(config.lr_backbone or PAPER_LR_BACKBONE) / 10:g}")
    return found if weak else [*found, backbone]


def _share(value: float) -> str:
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
