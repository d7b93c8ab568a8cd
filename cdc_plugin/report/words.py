"""Numbers, tables and sentences as people read them: everything here is text, ready for a page."""

import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.errors import say
from cdc_plugin.report.page_data import ClusterFigures, FigureRow

# Titles of the keys in report.json; "model" is the one head of an old clustering model.
TITLES = {
    "kmeans": "k-means on the features",
    "clustering_head": "clustering head",
    "calibration_head": "calibration head",
    "model": "the model as it is",
    "distance": "distance",
    "largest_cluster": "largest cluster",
    "empty_clusters": "empty clusters",
    "gpu_memory": "GPU memory",
}
# Figures in the order of the tables, and which direction is better; base.html explains them.
MEASURES = {"ACC": "↑", "NMI": "↑", "ARI": "↑", "CONF": "", "ECE": "↓", "AECE": "↓", "CECE": "↓"}
MEASURES |= {"BRIER": "↓", "NLL": "↓", "AUROC": "↑", "AURC": "↓", "FPR95": "↓"}
KEPT_WORDS = re.compile(r"(<(?:head|bdi|code|pre|dd|h1)\b.*?</\w+>|<[^>]*>)", re.DOTALL)
SCORES = {"AUROC": "↑", "FPR95": "↓", "AUPR": "↑"}  # of images of another kind
DASH = "–"
SPACE = "\u00a0"  # no line break between a number and its unit
TARGET = 0.95  # expected accuracy that the headline asks for
# Halves of characters (file names that are not UTF-8) and control characters cannot be in an HTML page.
UNWRITABLE = re.compile("[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")

Figures = dict[str, Any]


def percent(value: Any, decimals: int = 1) -> str:
    """Return a fraction as per cent; a dash for None and NaN."""
    return f"{100 * value:.{decimals}f}{SPACE}%" if known(value) else DASH


def count(value: int, noun: str) -> str:
    """Return "1 image", "1,797 images"."""
    return f"{value:,}{SPACE}{noun if value == 1 else noun + 's'}"


def known(value: Any) -> bool:
    """Return whether a number was measured: it is neither None nor NaN nor infinite."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def shorten(text: str, length: int = 120) -> str:
    """Leave out the middle of a long text: the beginning and the end of a path tell most."""
    if len(text) <= length:
        return text
    head = (length - 1) // 3
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def writable(text: str) -> str:
    """Return the text with what no page can hold replaced by the sign for "unknown character"."""
    return UNWRITABLE.sub("\ufffd", text)


@dataclass(frozen=True)
class Cell:
    """A figure as text, and whether it is the better one."""

    words: str
    better: bool = False


@dataclass(frozen=True)
class FigureTable:
    """Columns are a title and the names below it; rows are a key of `MEASURES`, its better direction, and cells."""

    columns: list[tuple[str, list[str]]]
    rows: list[tuple[str, str, list[Cell]]]


def before_after_table(rows: Sequence[FigureRow]) -> FigureTable:
    """Return each title's figures before and after; the better of the two is marked, unless they read the same."""
    groups = []
    for title, before, after in rows:
        both = (("before", before), ("after", after))
        parts = [(name, figures) for name, figures in both if figures is not None and _measured([figures])]
        if parts:
            # A model without "before" or "after" needs no second heading.
            groups.append((title, parts if len(parts) == 2 else [("", parts[0][1])]))
    return _build_table(groups, [[figures for _, figures in parts] for _, parts in groups])


def side_by_side_table(models: list[tuple[str, list[tuple[str, Figures]]]]) -> FigureTable:
    """Return the figures of every model's heads; the best over all of them is marked."""
    return _build_table(
        [(name, heads) for name, heads in models if heads], [[figures for _, heads in models for _, figures in heads]]
    )


def _build_table(groups: list[tuple[str, list[tuple[str, Figures]]]], compared: list[list[Figures]]) -> FigureTable:
    columns = [(shorten(title, 80), [name for name, _ in parts]) for title, parts in groups]
    rows = []
    for key in _measured([figures for group in compared for figures in group]):
        values = [[figures.get(key) for figures in group] for group in compared]
        rows.append((key, MEASURES[key], [cell for group in values for cell in _mark(key, MEASURES[key], group)]))
    return FigureTable(columns, rows)


def _measured(every: Sequence[Figures]) -> list[str]:
    return [key for key in MEASURES if any(known(figures.get(key)) for figures in every)]


def _mark(key: str, better: str, values: list[Any]) -> list[Cell]:
    """Return the values as text with the best one marked; what reads the same is not called better."""

    def read(value: Any) -> str:
        if key in ("BRIER", "NLL"):
            return f"{value:,.3f}" if known(value) else DASH
        return percent(value)

    texts = [read(value) for value in values]
    if not better or len({text for text in texts if text != DASH}) < 2:
        return [Cell(text) for text in texts]
    best = read((max if better == "↑" else min)(value for value in values if known(value)))
    return [Cell(text, text == best) for text in texts]


@dataclass(frozen=True)
class OutsideRow:
    """One score of one model for one set of outside images."""

    data: str
    images: str
    model: str
    score: str
    cells: list[Cell]


def outside_rows(models: list[tuple[str, list[dict[str, Any]]]]) -> list[OutsideRow]:
    """Return rows of models (name, ``outside`` entries), in the order of the data first; the best of each is marked."""
    grouped: dict[str, list[tuple[str, dict[str, Any], str, Figures]]] = {}
    for name, entries in models:
        for entry in entries:
            for score, figures in entry["scores"].items():
                grouped.setdefault(entry["data"], []).append((name, entry, score, figures))
    rows = []
    for data, members in grouped.items():
        columns = [_mark(key, better, [figures.get(key) for *_, figures in members]) for key, better in SCORES.items()]
        for (name, entry, score, _), *cells in zip(members, *columns, strict=True):
            images = f"{entry['images']:,}"
            rows.append(OutsideRow(shorten(data, 80), images, shorten(name, 80), TITLES[score], cells))
    return rows


def quality_figures(card: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of a quality card that were measured; base.html says what they mean."""
    return {
        key: f"{value:,}" if key == "empty_clusters" else percent(value)
        for key, value in card.items()
        if isinstance(value, (int, float)) and known(value)
    }


def split_warnings(card: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the warnings about the model, which mention training if that gave any, and those of training."""
    about_model: list[str] = []
    during_training: list[str] = []
    for warning in card.get("warnings") or []:
        sentence = str(warning["text"]).replace(" %", f"{SPACE}%")
        (during_training if "epoch" in warning else about_model).append(sentence)
    if during_training:
        total = len(during_training)
        about_model.append(f"Training gave {f'{total} warnings' if total > 1 else 'a warning'}: see there.")
    return about_model, during_training


def describe_interval(card: dict[str, Any]) -> str:
    """Return the interval around the expected accuracy, as "(70–86 %)" behind a space; nothing where none is known.

    >>> describe_interval({"expected_low": 0.7, "expected_high": 0.86}).strip().replace(SPACE, " ")
    '(70–86 %)'
    """
    low, high = card.get("expected_low"), card.get("expected_high")
    return f" ({percent(low, 0).rstrip('%').strip()}–{percent(high, 0)})" if known(low) and known(high) else ""


def describe_count(found: dict[str, Any] | None) -> str | None:
    """Return how many clusters were found, where their number was looked for.

    >>> describe_count({"number": 10, "low": 8, "high": 12, "candidates": [2, 3]})
    '10 clusters were found; the features do not exclude 8 to 12.'
    """
    if found is None:
        return None
    others = f"the features do not exclude {found['low']} to {found['high']}"
    if found["low"] == found["high"]:
        few = len(found["candidates"]) == 1
        others = "there are too few images to tell" if few else "the features exclude the other numbers"
    return f"{found['number']} clusters were found; {others}."


def headline(confidence: NDArray[np.floating], accepted: int, interval: str = "") -> str:
    """Say how many images ``cdc-predict --target-accuracy 0.95`` would accept, and what to expect over all."""
    values = np.asarray(confidence, dtype=np.float64)
    total, aim, overall = len(values), percent(TARGET, 0), percent(float(values.mean())) + interval
    if accepted == 0:
        return (
            f"None of the {count(total, 'image')} can be used at {aim} expected accuracy: the surest one has "
            f"{percent(float(values.max()))}, and {overall} is expected over all."
        )
    if accepted == total:
        everything = "The only image" if total == 1 else f"All {count(total, 'image')}"
        return f"{everything} can be used at {aim} expected accuracy; over all images {overall} is expected."
    some = f"{accepted:,} of {count(total, 'image')} ({percent(accepted / total)}"
    rest = f"can be used at {aim} expected accuracy; over all images {overall} is expected"
    if accepted < total / 2:
        return f"Only {some} of them) {rest}, so most need a look before they are relied on."
    return f"{some}) {rest}."


def describe_clusters(clusters: Sequence[ClusterFigures]) -> str:
    """Name the clusters that stand out: the largest, the smallest, the least sure, the empty ones."""
    filled = [(cluster.size, number) for number, cluster in enumerate(clusters) if cluster.size]
    size, largest = max(filled, key=lambda entry: entry[0])
    least, smallest = min(filled)
    confidence, unsure = min((c.confidence, number) for number, c in enumerate(clusters) if c.confidence is not None)
    said = f"{count(len(clusters), 'cluster')}. "
    if len(filled) > 1:
        said += f"The largest is {largest} with {count(size, 'image')}, the smallest {smallest} with {least:,}. "
    said += f"The least sure is {unsure} with {percent(confidence)} mean confidence."
    empty = [str(number) for number, cluster in enumerate(clusters) if not cluster.size]
    if empty:
        named = ", ".join(empty[:20]) + (" and others" if len(empty) > 20 else "")
        said += f" {count(len(empty), 'cluster')} {'is' if len(empty) == 1 else 'are'} empty: {named}."
    return said


def describe_sizes(sizes: dict[str, Any] | None) -> str | None:
    """Say what the estimated shares of the clusters are; None on the page of a model that was not trained here."""
    if sizes is None:
        return None
    followed = "followed them" if sizes["estimated"] else "asked for equal sizes"
    return f"Shares that the calibrated probabilities amount to, with an interval for nine of ten; training {followed}."


def size_rows(sizes: dict[str, Any] | None) -> list[tuple[int, str, str]]:
    """Return number, estimated share and interval of every cluster.

    >>> size_rows({"estimated": True, "clusters": [{"share": 0.5, "low": 0.4, "high": None}]})[0][2]
    '–'
    """
    rows = enumerate(sizes["clusters"] if sizes else ())
    return [(number, percent(each["share"]), _say_interval(each["low"], each["high"])) for number, each in rows]


def _say_interval(low: float | None, high: float | None) -> str:
    return f"{percent(low)} to {percent(high)}" if known(low) and known(high) else DASH


def say_page(page: str, noun: str) -> str:
    """Return a page about images as one about what a sample is called, but in names, commands and what is no text.

    >>> say_page("<p title='images'>Two images: <bdi>my image</bdi></p>", "sample")
    "<p title='images'>Two samples: <bdi>my image</bdi></p>"
    """
    parts = KEPT_WORDS.split(page)
    parts[::2] = [say(part, noun) for part in parts[::2]]
    return "".join(parts)


def describe_spaces(metrics: dict[str, Any]) -> list[str]:
    """Return what each of several spaces says alone and, where labels tell, whether they are better side by side."""
    spaces, kmeans = metrics.get("spaces") or [], metrics["after"]["kmeans"]
    said = [
        f"{space['name']}: k-means on it alone agrees with {percent(space['agreement'])} of the clusters"
        + (f", accuracy {percent(space['ACC'])}" if known(space.get("ACC")) else "")
        for space in (spaces if len(spaces) > 1 else [])
    ]
    if said and known(kmeans.get("ACC")):
        best = max(space["ACC"] for space in spaces)
        verdict = "better than" if kmeans["ACC"] > best else "no better than"
        said.append(f"side by side: accuracy of k-means {percent(kmeans['ACC'])}, {verdict} the best space alone")
    return said


def describe_old_model(old: dict[str, Any] | None) -> str | None:
    """Return what became of the clusters of the model that was retrofitted."""
    if old is None:
        return None
    stayed = [
        f"{percent(old[key])} of the images {words}"
        for key, words in (("agreement_before", "began in their old cluster"), ("agreement_after", "are in it now"))
        if known(old.get(key))
    ]
    name = f"The old model ({old['writer']})" if old.get("writer") else "The old model"
    return f"{name}: {', '.join(stayed)}." if stayed else None


def describe_outliers(table: np.recarray) -> str | None:
    """Return how many images are flagged as outliers; None if the table has no such column."""
    if "outlier" not in (table.dtype.names or ()):
        return None
    flagged = int(np.count_nonzero(table["outlier"]))
    if not flagged:
        return "No image is flagged as an outlier: none lies far from everything that the model was refined on."
    are = "is" if flagged == 1 else "are"
    return (
        f"{flagged:,} of {count(len(table), 'image')} ({percent(flagged / len(table))}) {are} flagged as outliers: "
        "they lie further from everything that the model was refined on than nearly all of its own images."
    )


def describe_skipped(total: int, named: int) -> str:
    """Return how many files could not be read, of which ``named`` at most are listed."""
    said = f"{count(total, 'file')} left out, in no figure on this page."
    if total <= named:
        return said
    return f"{said} The first {named} are named here, {total - named:,} more are in report.json."
