"""Guard against collapse: detect dying clusters in the records of the epochs, and say what to change.

All functions are pure and see no labels: a resumed run, which has the same history, is judged the same.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cdc_plugin.config.resolve import PAPER_LR_BACKBONE, PAPER_LR_HEADS, ResolvedConfig
from cdc_plugin.errors import UserError, option, say

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
SLOW_DOWN = 0.1  # on all learning rates, after a loss that was not finite
THIN = 10  # images a cluster in a batch; the paper has 25 and more


@dataclass(frozen=True)
class Finding:
    """What was seen after an epoch, with what to change; ``dead``: nothing can be learned any more."""

    epoch: int
    kind: str
    text: str
    dead: bool = False


class _Epoch(NamedTuple):
    """A record as numbers; NaN where it says nothing: comparisons with it are false, and nobody is alarmed."""

    number: int
    selected: float
    confidence: float
    largest: float
    used: float


class _Past(NamedTuple):
    """The epochs up to the one that is judged: the first, the last three (newest last), and the best values."""

    clusters: int
    first: _Epoch
    last: Sequence[_Epoch]
    most_selected: float
    most_confident: float


def detect(history: Sequence[Mapping[str, float]], settings: ResolvedConfig) -> list[Finding]:
    """Return everything there is to say of a run, each kind once: as a warning, and again if it turns out dead."""
    findings: dict[tuple[str, bool], Finding] = {}
    for past in _pasts(history, settings):
        for finding in _judge(past, settings):
            findings.setdefault((finding.kind, finding.dead), finding)
    return list(findings.values())


def detect_new(history: Sequence[Mapping[str, float]], settings: ResolvedConfig) -> list[Finding]:
    """Return what the last epoch has added to `detect`: what to log after it."""
    return [finding for finding in detect(history, settings) if finding.epoch == history[-1]["epoch"]]


def as_warnings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings in the form of the quality card's warnings, with their epoch."""
    return [
        {"kind": item.kind, "text": f"After epoch {item.epoch}: {item.text}", "epoch": item.epoch, "dead": item.dead}
        for item in findings
    ]


def setback_warning(epoch: int | None) -> list[dict[str, str]]:
    """Return the warning about a run that was rolled back to the epoch before this one, if it was."""
    if epoch is None:
        return []
    text = (
        f"The loss was NaN or infinite in epoch {epoch}: from the epoch before it on, the rates were {SLOW_DOWN:g} of "
        "those asked for. Lower lr_backbone and lr_heads, or precision=float32, may give a better run."
    )
    return [{"kind": "not-finite", "text": text}]


def refuse_dead(history: Sequence[Mapping[str, float]], settings: ResolvedConfig, noun: str = "image") -> None:
    """Refuse to continue in a dead state, or to resume from one, unless the user wants it or no epoch is left."""
    if settings.on_collapse == "warn" or len(history) >= settings.epochs:
        return
    last = list(_pasts(history, settings))[-1:]
    dead = [finding for past in last for finding in _judge(past, settings) if finding.dead]
    if dead:
        raise UserError(
            f"stopped after epoch {dead[0].epoch}: {say(dead[0].text, noun)} Everything up to here is kept; "
            f"to continue nevertheless, add {option('resume')} and on_collapse=warn to the same command"
        )


def _pasts(history: Sequence[Mapping[str, float]], settings: ResolvedConfig) -> Iterator[_Past]:
    names = ("selected", "confidence", "largest_cluster", "used_clusters")
    epochs = [
        _Epoch(int(record.get("epoch", position)), *(float(record.get(name, math.nan)) for name in names))
        for position, record in enumerate(history, start=1)
    ]
    # The largest so far; fmax takes the number where the other one is NaN.
    most_selected = itertools.accumulate((epoch.selected for epoch in epochs), np.fmax)
    most_confident = itertools.accumulate((epoch.confidence for epoch in epochs), np.fmax)
    for end, best in enumerate(zip(most_selected, most_confident, strict=True), start=1):
        yield _Past(settings.clusters, epochs[0], epochs[max(0, end - 3) : end], *best)


def _judge(past: _Past, settings: ResolvedConfig) -> list[Finding]:
    """Return all that holds after the last epoch of ``past``."""
    seen = [*_about_selection(past, settings), *_about_confidence(past, settings), *_about_sizes(past)]
    now = past.last[-1]
    return [Finding(now.number, kind, f"{text} {_advise(kind, past, settings)}", dead) for kind, text, dead in seen]


Seen = tuple[str, str, bool]  # kind, what was seen, dead


def _about_selection(past: _Past, settings: ResolvedConfig) -> Iterator[Seen]:
    now, most = past.last[-1], past.most_selected
    few = FEW_ABOVE if settings.selection.split("+")[0] == "fixed" else FEW
    if now.selected < NOTHING:
        before = past.last[-2].selected if len(past.last) > 1 else math.nan
        dead = before < NOTHING and now.selected <= before
        again = " for two epochs: the clusters no longer learn anything." if dead else "."
        yield "nothing-selected", f"{_share(now.selected)} of the images are selected for training{again}", dead
    elif now.selected < few:
        yield "few-selected", f"Only {_share(now.selected)} of the images are selected for training.", False
    elif now.selected < SHRUNK * most:
        seen = f"{_share(now.selected)} of the images are selected for training, after {_share(most)} at best."
        yield "selection-shrinks", seen, False


def _about_confidence(past: _Past, settings: ResolvedConfig) -> Iterator[Seen]:
    now, most, clusters = past.last[-1], past.most_confident, past.clusters
    level = _above_chance(now.confidence, clusters)
    if level < CHANCE:
        three = len(past.last) == 3 and now.confidence <= past.last[0].confidence
        dead = three and all(_above_chance(epoch.confidence, clusters) < CHANCE_FOR_GOOD for epoch in past.last)
        seen = f"The mean confidence is {_share(now.confidence)}, as if clusters were assigned at random"
        yield "chance", f"{seen}{', for three epochs' if dead else ''}.", dead
    # Old heads are often too sure, and it is what the stage is for that they become less so.
    lost = FORGOTTEN_STRAINED if settings.init != "keep" and (_thin(settings) or _slower_rates(settings)) else FORGOTTEN
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
    """Return whether one cluster is too large to be a large class: far above its start, or above all others."""
    if clusters == 2:  # sound data may lie nine to one
        return _all_in_one(now, clusters) or (now.largest > ALL_IN_ONE and first.largest < 0.9)
    level = _above_chance(now.largest, clusters)
    return (level > SWALLOWED and now.largest > 2 * first.largest) or level > LARGE


def _all_in_one(epoch: _Epoch, clusters: int) -> bool:
    return epoch.used == 1 or (clusters > 2 and epoch.largest > ALL_IN_ONE)


def _above_chance(share: float, clusters: int) -> float:
    """Return a share on a scale from 0 at 1 / C to 1 at 1."""
    return (share - 1 / clusters) / (1 - 1 / clusters)


def _thin(settings: ResolvedConfig) -> bool:
    return settings.batch_size < THIN * settings.clusters


def _slower_rates(settings: ResolvedConfig) -> list[str]:
    """Return a tenth of every rate that lies beyond what this package would choose itself."""
    backbone = 0.0 if settings.freeze_backbone else settings.lr_backbone
    rates = {"lr_backbone": (backbone, PAPER_LR_BACKBONE), "lr_heads": (settings.lr_heads, PAPER_LR_HEADS)}
    # A thousandth more: twenty times the paper's rate, as chosen, is not to be lost to rounding.
    return [f"{name}={rate / 10:g}" for name, (rate, paper) in rates.items() if rate > 1.001 * USUAL_RATES * paper]


def _advise(kind: str, past: _Past, settings: ResolvedConfig) -> str:
    """Return the two likeliest remedies: settings that were seen to collapse runs come first, then general ones."""
    now, clusters = past.last[-1], past.clusters
    way = settings.selection.split("+")[0]  # without its add-ons
    weak = _above_chance(past.first.confidence, clusters) < WEAK_START or _swallowed(past.first, past.first, clusters)
    backbone = "another backbone (cdc-inspect BACKBONE --data IMAGES shows whether this one tells images apart)"
    remedies = []
    if way in ("fixed", "flexmatch", "freematch"):
        remedies.append("selection=confident")
    lower = math.floor(20 * now.confidence) / 20 if now.confidence > 0 else math.nan
    if way == "fixed" and kind in ("nothing-selected", "few-selected") and 0 < lower < settings.threshold:
        remedies.append(f"threshold={lower:g}, below the mean confidence of {_share(now.confidence)}")
    remedies += _slower_rates(settings)
    if _thin(settings):
        batch = f"batch_size={25 * clusters} if there are as many images"
        remedies += [f"fewer clusters: a batch has {settings.batch_size} images for {clusters}", batch]
    if settings.init == "random":
        remedies.append(option("init", "prototypes"))
    if settings.entropy_weight < 1:
        remedies.append("entropy_weight=1")
    if weak:
        remedies.append(backbone)
    if kind == "clusters-die" and now.used >= 2:
        remedies.append(option("clusters", int(now.used)))
    if not settings.freeze_backbone:
        remedies += [option("freeze_backbone"), f"lr_backbone={settings.lr_backbone / 10:g}"]
    if not weak:
        remedies.append(backbone)
    return f"Try {', or '.join(remedies[:2])}."


def _share(value: float) -> str:
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
