"""Collect images that no cluster fits into new kinds, and write them to a page."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.core.kinds import LEAST, SAMPLE, find_kinds
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.core.random_streams import KINDS, generator
from cdc_plugin.data.atomic import write_text
from cdc_plugin.errors import OutputError
from cdc_plugin.evaluation.predict import FEATURES, Prediction
from cdc_plugin.report.kinds_page import Read, render_kinds


@dataclass(frozen=True)
class NewKinds:
    """The new kind of every image, -1 for images of the clusters, and its distance to the centre of the kind."""

    kind: NDArray[np.int64]  # (N,)
    distance: NDArray[np.float32]  # (N,)

    @property
    def sizes(self) -> list[int]:
        return np.bincount(self.kind[self.kind >= 0]).tolist()

    def describe(self) -> str:
        """Return how many there are and how large, in one line."""
        total = len(self.kind)
        if total < LEAST:
            return f"no new kind: a group takes {LEAST} images at least, found {total}"
        if not self.sizes:
            return (
                f"no new kind among {total:,} images: no {LEAST} of them or more lie together, and as far from the "
                "clusters as these from each other"
            )
        several = len(self.sizes) > 1
        sizes = ", ".join(f"{size:,}" for size in self.sizes)
        return (
            f"{len(self.sizes)} new kind{'s' if several else ''} among {total:,} images (column new_kind), of {sizes}"
        )


def find_new_kinds(found: Prediction, prototypes: Prototypes, seed: int) -> NewKinds:
    """Return the new kinds among the images of a prediction that kept its features; one part is in memory at a time."""
    kinds = find_kinds(_sample_features(found), prototypes, generator(seed, KINDS))
    parts = [kinds.assign(torch.from_numpy(part.columns[FEATURES])) for part in found.parts if part.columns]
    kind, distance = (torch.cat(values).numpy() for values in zip(*parts, strict=True))
    sizes = np.bincount(kind[kind >= 0], minlength=len(kinds.centers))
    # Those of the sample are in order of size; those of all images need not be, and one of a few may be left out.
    order = [number for number in np.argsort(-sizes, kind="stable").tolist() if sizes[number] >= LEAST]
    numbers = np.full(len(kinds.centers) + 1, -1)
    numbers[order] = np.arange(len(order))  # the last one stands for -1
    return NewKinds(numbers[kind], distance)


def choose_page(out: Path) -> Path:
    """Return where the page of new kinds lies, beside the output.

    >>> choose_page(Path("new.csv")).name
    'new.new-kinds.html'
    """
    return out.with_name(f"{out.stem}.new-kinds.html")


def check_page(out: Path, overwrite: bool) -> None:
    """Refuse to replace a page unasked, before any image is read."""
    page = choose_page(out)
    if page.is_dir() or (page.exists() and not overwrite):
        raise OutputError(f"{page} already exists; give another --out, or --overwrite to replace it")


def write_page(
    out: Path, table: np.recarray, kinds: NewKinds, read: Read, facts: list[tuple[str, str]], command: str
) -> Path:
    """Write the page of a table with the column ``new_kind``, and return its path."""
    page = choose_page(out)
    write_text(page, render_kinds(table, kinds.distance, read, facts, command))
    return page


def _sample_features(found: Prediction) -> torch.Tensor:
    """Return the features of at most `SAMPLE` images, half of them outliers where there are so many, evenly spread."""
    outlier = found.column("outlier")
    assert outlier is not None
    far = _spread(np.flatnonzero(outlier), SAMPLE // 2)
    others = np.setdiff1d(np.arange(len(outlier)), far)
    chosen = np.sort(np.concatenate([far, _spread(others, SAMPLE - len(far))]))
    rows, start = [], 0
    for part in found.parts:
        if part.columns:
            inside = chosen[(chosen >= start) & (chosen < start + len(part.positions))]
            rows.append(part.columns[FEATURES][inside - start])
            start += len(part.positions)
    return torch.from_numpy(np.concatenate(rows)).float()


def _spread(rows: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    return rows[:: math.ceil(len(rows) / most)] if len(rows) > most else rows
