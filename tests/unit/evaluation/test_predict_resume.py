import copy
import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import predict as prediction
from cdc_plugin.evaluation import predict_resume
from cdc_plugin.evaluation.predict import Prediction, PredictionPart, Predictor, prepare
from cdc_plugin.evaluation.predict_resume import (
    INPUTS,
    PartFolder,
    choose_parts_folder,
    describe_inputs,
    predict_in_parts,
)
from cdc_plugin.training.runtime import SINGLE, Distributed
from tests.helpers.predictions import predict_at_once, table_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(predict_resume, "PART", 8)


@pytest.fixture
def photos(tmp_path, digits, write_images) -> Path:
    return write_images(tmp_path / "photos", digits[0][:30])


@pytest.fixture
def predictor(tiny_clusterer, photos) -> Predictor:
    return prepare(tiny_clusterer, photos, CPU, 4)


@pytest.fixture
def kept(tmp_path) -> Path:
    return tmp_path / ".new.csv.parts"


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """How many images each call of the network had."""
    calls: list[int] = []
    compute = prediction._compute_columns

    def counted(model, squares, *rest):
        calls.append(len(squares))
        return compute(model, squares, *rest)

    monkeypatch.setattr(prediction, "_compute_columns", counted)
    return calls


def assert_same(found: Prediction | None, expected: Prediction) -> None:
    assert found is not None
    actual, table = table_of(found), table_of(expected)
    assert actual.dtype == table.dtype
    for name in table.dtype.names or ():
        if table[name].dtype.kind == "f":
            np.testing.assert_allclose(actual[name], table[name], atol=1e-6)
        else:
            assert actual[name].tolist() == table[name].tolist()
    assert found.positions.tolist() == expected.positions.tolist()
    assert found.skipped == expected.skipped
    assert found.source == expected.source


def interrupt(monkeypatch, predictor: Predictor, kept: Path, after: int) -> None:
    """Predict, and let the process end while the network computes, after so many calls."""
    compute, calls = prediction._compute_columns, itertools.count()

    def interrupted(*arguments):
        if next(calls) == after:
            raise KeyboardInterrupt
        return compute(*arguments)

    with monkeypatch.context() as fault:
        fault.setattr(prediction, "_compute_columns", interrupted)
        with pytest.raises(KeyboardInterrupt):
            predict_in_parts(predictor, kept, SINGLE)


@pytest.mark.parametrize("size", [1, 3, 8, 256])
def test_the_table_does_not_depend_on_parts_or_batches(tiny_clusterer, photos, kept, size):
    (photos / "image 009.png").write_bytes(b"x")
    tiny_clusterer.prototypes = Prototypes(torch.zeros(1, 8), torch.eye(8), limit=0.99999)
    found = predict_in_parts(prepare(tiny_clusterer, photos, CPU, size), kept, SINGLE)
    assert_same(found, predict_at_once(tiny_clusterer, photos, 30))
    assert len(list(kept.glob("*.npz"))) == 4
    assert found is not None
    tables = list(found.tables(selected=np.arange(29) % 2 == 0))
    assert [len(table) for table in tables] == [8, 7, 8, 6]
    assert [flag for table in tables for flag in table["selected"]] == [True, False] * 14 + [True]
    assert tables[0].dtype.names == (*table_of(found).dtype.names, "selected")


def test_after_a_fault_what_is_missing_is_computed_and_nothing_else(predictor, photos, kept, computed, monkeypatch):
    interrupt(monkeypatch, predictor, kept, after=5)
    assert len(list(kept.glob("*.npz"))) == 2
    expected = predict_at_once(predictor.model, photos)
    computed.clear()
    assert_same(predict_in_parts(predictor, kept, SINGLE), expected)
    assert computed == [4, 4, 4, 2]  # 14 of 30 images
    sorted(kept.glob("*.npz"))[1].unlink()
    computed.clear()
    assert_same(predict_in_parts(predictor, kept, SINGLE), expected)
    assert computed == [4, 4]


def test_another_model_other_images_or_another_part_size_start_over(
    predictor, photos, kept, computed, monkeypatch, caplog
):
    def images_computed(predictor: Predictor) -> int:
        computed.clear()
        predict_in_parts(predictor, kept, SINGLE)
        return sum(computed)

    assert images_computed(predictor) == 30
    assert images_computed(prepare(predictor.model, photos, CPU, 7)) == 0  # the batch size changes nothing
    other = copy.deepcopy(predictor.model)
    other.calibration_head[-1].bias.data[0] += 0.1
    assert images_computed(prepare(other, photos, CPU, 4)) == 30
    assert f"4 finished parts in {kept} are not used: model changed" in caplog.text
    (photos / "image 003.png").unlink()
    assert images_computed(prepare(other, photos, CPU, 4)) == 29
    assert "data and images changed" in caplog.text
    monkeypatch.setattr(predict_resume, "PART", 12)
    assert images_computed(prepare(other, photos, CPU, 4)) == 29
    assert len(list(kept.glob("*.npz"))) == 3


def test_all_that_changes_a_prediction_changes_the_digest_of_the_model(predictor, digits):
    def digest(**changes: Any) -> str | int:
        model = copy.deepcopy(predictor.model)
        for name, value in changes.items():
            setattr(model.backbone if hasattr(model.backbone, name) else model, name, value)
        return describe_inputs(Predictor(model, predictor.stream, predictor.settings, CPU, 4))["model"]

    unit = Prototypes(torch.zeros(1, 8), torch.eye(8), limit=1.0)
    found = [
        digest(),
        digest(input_size=64),
        digest(mean=torch.tensor([0.1, 0.2, 0.3])),
        digest(std=torch.tensor([0.1, 0.2, 0.3])),
        digest(prototypes=unit),
        digest(prototypes=Prototypes(unit.centers, unit.whitening, limit=2.0)),
        digest(clustering_head=predictor.model.calibration_head),
    ]
    assert len(set(found)) == len(found)
    assert digest() == found[0]


def test_arrays_and_array_files_are_told_apart_by_their_content(tiny_clusterer, digits, tmp_path):
    def digest(data: object) -> str | int:
        return describe_inputs(prepare(tiny_clusterer, data, CPU))["data"]

    images = digits[0][:20]
    changed = images.copy()
    changed[7, 0, 0] ^= 1
    assert digest(images) == digest(images.copy()) != digest(changed)
    np.savez(tmp_path / "a.npz", x=images)
    first = digest(tmp_path / "a.npz")
    assert digest(tmp_path / "a.npz") == first
    np.savez(tmp_path / "a.npz", x=changed[:19])
    assert digest(tmp_path / "a.npz") != first


def test_unreadable_images_of_a_finished_part_are_remembered(tiny_clusterer, photos, kept, monkeypatch):
    for number in (2, *range(8, 16), 29):  # the whole second part
        (photos / f"image {number:03d}.png").write_bytes(b"x")
    predictor = prepare(tiny_clusterer, photos, CPU, 4)
    interrupt(monkeypatch, predictor, kept, after=3)
    assert len(list(kept.glob("*.npz"))) == 2
    found = predict_in_parts(prepare(tiny_clusterer, photos, CPU, 4), kept, SINGLE)
    assert_same(found, predict_at_once(tiny_clusterer, photos))
    assert found is not None
    assert len(found.skipped) == 10


def test_images_that_vanish_meanwhile_are_skipped_with_the_reason_unless_all_do(predictor, photos, kept):
    for number in range(20, 30):
        (photos / f"image {number:03d}.png").unlink()
    found = predict_in_parts(predictor, kept, SINGLE)
    assert found is not None
    assert found.positions.tolist() == list(range(20))
    assert [name for name, _ in found.skipped] == [f"image {number:03d}.png" for number in range(20, 30)]
    assert all("No such file" in reason for _, reason in found.skipped)
    shutil.rmtree(kept)
    for path in photos.iterdir():
        path.unlink()
    with pytest.raises(UserError, match="none of the 30 images"):
        predict_in_parts(predictor, kept, SINGLE)
    assert not kept.exists()


def test_neither_a_single_part_nor_nonsense_is_kept(predictor, digits, kept):
    found = predict_in_parts(prepare(predictor.model, digits[0][:8], CPU, 4), kept, SINGLE)
    assert_same(found, predict_at_once(predictor.model, digits[0][:8]))
    assert found is not None
    assert found.column("outlier") is None
    assert not kept.exists()
    predictor.model.calibration_head[-1].bias.data.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        predict_in_parts(predictor, kept, SINGLE)
    assert not kept.exists()


@dataclass(frozen=True)
class Turn(Distributed):
    """One of several processes that have their turns one after the other: the first says what all of them hear."""

    said: list[Any] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)

    def broadcast_from_main(self, make: Callable[[], Any]) -> Any:
        if len(self.heard) == len(self.said):
            self.said.append(make())
        self.heard.append(1)
        return self.said[len(self.heard) - 1]

    def wait(self) -> None:
        pass


def by_turns(predictor: Predictor, kept: Path, size: int, turns: list[int]) -> Prediction | None:
    said: list[Any] = []
    results = [predict_in_parts(predictor, kept, Turn(rank, size, rank, said=said)) for rank in turns]
    assert all(result is None for result in results[:-1])
    return results[-1]


@pytest.mark.parametrize("count", [9, 17, 30])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_every_image_is_computed_once_by_any_number_of_processes(tiny_clusterer, digits, kept, computed, count, size):
    predictor = prepare(tiny_clusterer, digits[0][:count], CPU, 4)
    found = by_turns(predictor, kept, size, [*reversed(range(1, size)), 0])
    assert sum(computed) == count
    assert_same(found, predict_at_once(tiny_clusterer, digits[0][:count]))


def test_another_number_of_processes_resumes(predictor, photos, kept, computed):
    by_turns(predictor, kept, 3, [1])  # the others have died
    assert sum(computed) == 8
    found = by_turns(predictor, kept, 2, [1, 0])
    assert sum(computed) == 30
    assert_same(found, predict_at_once(predictor.model, photos))


def test_processes_that_see_other_images_do_not_work_together(predictor, photos, kept):
    said: list[Any] = [{**describe_inputs(predictor), "data": "other"}]
    with pytest.raises(UserError, match="process 1 has another model or other images"):
        predict_in_parts(predictor, kept, Turn(1, 2, 1, said=said))


DIGESTS = {"model": "a1", "data": "b2", "images": 30}


def part(start: int, count: int = 3) -> PredictionPart:
    positions = np.arange(start, start + count)
    return PredictionPart(
        positions, {"cluster": positions % 2, "confidence": np.full(count, 0.5, np.float32)}, [(start + 9, "broken ü")]
    )


@pytest.fixture
def folder(tmp_path) -> PartFolder:
    return PartFolder(choose_parts_folder(tmp_path / "new.csv"), 3, DIGESTS)


def test_parts_come_back_as_they_were_and_in_order(folder):
    assert folder.resume() == []
    assert not folder.path.exists()
    nothing = PredictionPart(np.empty(0, np.int64), {}, [(3, "empty"), (4, "empty")])
    saved = [part(0), nothing, part(6)]
    for number in (2, 0, 1):
        folder.save(number, saved[number])
    assert folder.resume() == [0, 1, 2]
    for one, other in zip(folder, saved, strict=True):
        np.testing.assert_equal(one._asdict(), other._asdict())
        assert [column.dtype for column in one.columns.values()] == [c.dtype for c in other.columns.values()]
    assert folder.path.name == ".new.csv.parts"
    assert json.loads((folder.path / INPUTS).read_text()) == DIGESTS


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda _: b"PK\x03\x04half", lambda content: content[:-40], flip_a_bit]
)
def test_a_damaged_part_counts_as_missing_and_what_a_killed_process_left_is_removed_silently(folder, damage, caplog):
    folder.save(0, part(0))
    (folder.path / ".000001-x.npz.abc").write_bytes(b"half")
    assert folder.resume() == [0]
    assert len(list(folder.path.iterdir())) == 2
    assert "not used" not in caplog.text
    folder.save(1, part(3, 500))
    file = folder.file(1)
    file.write_bytes(damage(file.read_bytes()))
    assert folder.resume() == [0]
    assert not file.exists()
    assert "damaged" in caplog.text
    assert "resuming: 1 of 3 parts are finished" in caplog.text


def test_a_full_disk_leaves_finished_parts_and_no_half_one(folder, monkeypatch):
    folder.save(0, part(0))

    def full(file, **_arrays):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match="free some space and run again"):
        folder.save(1, part(3))
    assert folder.resume() == [0]
    assert {path.name for path in folder.path.iterdir()} == {INPUTS, folder.file(0).name}
    # Another machine may have written the part elsewhere.
    with pytest.raises(UserError, match=r"part 2 of 3 cannot be read .* a disk that all of them share"):
        list(folder)
