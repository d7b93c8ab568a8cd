"""The folder of an audit: which files, which pictures, how large, and what is never lost."""

import base64
import csv
import io
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data.atomic import unescape_cell
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.audit.sheet import read_sheet
from cdc_plugin.evaluation.audit.write import check_audit, find_typical_rows, write_audit


def predictions(images: int, clusters: int) -> np.recarray:
    names = np.array([f"{index}.png" for index in range(images)], dtype=object)
    confidence = np.random.default_rng(0).uniform(0.3, 1, images).astype(np.float32)
    return np.rec.fromarrays([names, np.arange(images) % clusters, confidence], names=["path", "cluster", "confidence"])


def shades(rows: np.ndarray, side: int = 8) -> np.ndarray:
    """Each image is of one grey that tells its row."""
    return np.broadcast_to(rows.astype(np.uint8)[:, None, None, None], (len(rows), side, side, 3))


def noise(rows: np.ndarray, side: int) -> np.ndarray:
    """What JPEG likes least."""
    return np.random.default_rng(0).integers(0, 256, (len(rows), side, side, 3), dtype=np.uint8)


def content(page: Path) -> dict:
    found = re.search(r'<script id="content" type="application/json">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found.group(1))


def grey(uri: str) -> int:
    kind, data = uri.split(",")
    assert kind == "data:image/jpeg;base64"
    return int(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("L"))[4, 4])


def test_two_files_are_written(tmp_path):
    written = write_audit(tmp_path / "new" / "audit", predictions(50, 3), 10, 0, shades, "photos by model", False)
    assert [path.name for path in written] == ["audit.csv", "audit.html"]
    assert sorted(path.name for path in (tmp_path / "new" / "audit").iterdir()) == ["audit.csv", "audit.html"]
    sheet = read_sheet(written[0])
    assert (len(sheet.rows), sheet.drawn, sheet.image_count, sheet.source) == (10, 10, 50, "photos by model")


def test_the_page_shows_the_drawn_images_beside_the_surest_of_their_cluster(tmp_path):
    table = predictions(60, 3)
    sheet, page = write_audit(tmp_path, table, 12, 0, shades, "x", False)
    found = content(page)
    for question, row in zip(found["questions"], read_sheet(sheet).rows, strict=True):
        number = int(row.id[1:].partition("-")[0])
        assert abs(grey(question["picture"]) - number) <= 2
        assert question["cluster"] == row.cluster == table["cluster"][number]
        assert number not in question["typical"]
        assert len(question["typical"]) >= found["shown"] == 8
        assert all(table["cluster"][other] == row.cluster for other in question["typical"])
        assert all(abs(grey(found["pictures"][str(other)]) - other) <= 2 for other in question["typical"])


def test_typical_images_are_the_surest_and_an_image_alone_in_its_cluster_has_nothing_beside_it(tmp_path):
    table = predictions(60, 3)
    chosen = find_typical_rows(table, 1, 5)
    others = [row for row in range(60) if table["cluster"][row] == 1 and row not in chosen]
    assert table["confidence"][chosen].min() >= table["confidence"][others].max()
    assert len(find_typical_rows(table, 1, 100)) == 20
    _, page = write_audit(tmp_path, predictions(4, 4), 4, 0, shades, "x", False)
    assert [question["typical"] for question in content(page)["questions"]] == [[]] * 4


@pytest.mark.parametrize(("count", "clusters", "side"), [(1000, 10, 24), (250, 200, 48)])
def test_a_page_stays_below_8_megabytes_whatever_the_images_show(tmp_path, count, clusters, side):
    images = partial(noise, side=side)
    _, page = write_audit(tmp_path, predictions(1100, clusters), count, 0, images, "x", False)
    assert page.stat().st_size < 8_000_000


def test_names_cannot_break_the_page_and_it_loads_nothing(tmp_path):
    table = predictions(5, 1)
    hostile = "</script><img src=x onerror=alert(1)>\"'.png"
    table["path"][:] = [hostile, "caf\udce9.png", "=1+1", "a\nb.png", "<!--.png"]
    sheet, page = write_audit(tmp_path, table, 5, 0, shades, "<b>bold & 'x'</b> caf\udce9", False)
    text = page.read_text(encoding="utf-8")
    assert "<img src=x" not in text
    assert "<b>bold" not in text
    assert "&lt;b&gt;bold" in text
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in text
    assert {unescape_cell(line[1]) for line in content(page)["lines"][1:]} == set(table["path"])
    assert {line[1] for line in csv.reader(sheet.open())} == {line[1] for line in content(page)["lines"]}
    assert len(read_sheet(sheet).rows) == 5


def test_answers_are_overwritten_on_demand_only_and_the_seed_decides_what_is_drawn(tmp_path):
    def write(seed: int, overwrite: bool) -> list[bytes]:
        files = write_audit(tmp_path, predictions(50, 3), 10, seed, shades, "x", overwrite)
        return [path.read_bytes() for path in files]

    first = write(0, False)
    with pytest.raises(UserError, match="perhaps with answers"):
        write(1, False)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == first
    assert write(1, True)[0] != first[0]
    assert write(0, True) == first


def test_counts_out_of_range_and_files_as_folders_are_refused(tmp_path):
    for count in (0, -3, 1001):
        with pytest.raises(UserError, match=f"takes 1 to 1000 images, found {count}"):
            check_audit(tmp_path / "new", count, False)
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="is a file or lies in one"):
            check_audit(folder, 10, False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
