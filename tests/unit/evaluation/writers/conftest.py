"""A table of predictions with hard names, and the images it speaks of."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

HARD = ['sub/comma, "quotes" & <angle>\'.png', "sub/100%#?+ $image.png", "日本/写真 Ä.jpg", "line\nbreak.png"]
NAMES = ["a.jpg", "sub/a.jpg", "sub/b.PNG", *HARD]


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder of the images of the table."""
    folder = tmp_path / "my photos, new"
    for number, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (30 * number, 0, 0)).save(folder / name)
    return folder


@pytest.fixture
def table() -> np.recarray:
    """Seven rows, twelve clusters, every optional column."""
    columns = {
        "path": np.array(NAMES, dtype=object),
        "cluster": np.array([3, 3, 0, 3, 11, 0, 1]),
        "confidence": np.array([0.9, 0.8, 0.7, 0.6, 0.5, 1.0, 0.123456789], dtype=np.float32),
        "clustering_confidence": np.full(7, 0.5, dtype=np.float32),
        "second_cluster": np.array([0, 1, 2, 3, 4, 5, 6]),
        "second_confidence": np.full(7, 0.1, dtype=np.float32),
        "distance": np.array([0.1, 0.2, 0.3, 0.4, 9.5, 0.6, np.nan], dtype=np.float32),
        "outlier": np.array([False, False, False, False, True, False, False]),
        "selected": np.array([True, True, True, False, False, True, False]),
    }
    return np.rec.fromarrays(list(columns.values()), names=list(columns))


@pytest.fixture
def plain_table(table) -> np.recarray:
    """The same without optional columns."""
    names = table.dtype.names[:6]
    return np.rec.fromarrays([table[name] for name in names], names=list(names))


@pytest.fixture
def odd_table(table) -> np.recarray:
    """The same with names that no XML can hold, and one that is not UTF-8."""
    names = table.path.copy()
    names[0], names[1] = os.fsdecode(b"bad\xff.png"), "control\x01.png"
    others = table.dtype.names[1:]
    return np.rec.fromarrays([names, *(table[name] for name in others)], names=["path", *others])
