"""Feature vectors of any source, read where they lie; what is none is refused in one line."""

import os

import numpy as np
import pytest
import torch

import cdc_plugin
from cdc_plugin.data.images import open_images
from cdc_plugin.data.sources import features
from cdc_plugin.data.sources.features import describe_features
from cdc_plugin.data.stream import open_stream
from cdc_plugin.errors import DataError
from cdc_plugin.models.networks.features import FeatureScaler

ROWS = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


def written(path, array=ROWS):
    np.save(path, array)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: ROWS,
        lambda folder: torch.from_numpy(ROWS),
        lambda folder: ROWS.tolist(),
        lambda folder: pytest.importorskip("pandas").DataFrame(ROWS),
        lambda folder: pytest.importorskip("pandas").DataFrame({"text": ["a"] * 40, "vector": list(ROWS)}),
        lambda folder: pytest.importorskip("pandas").Series(list(ROWS)),
        lambda folder: written(folder / "plain.npy"),
        lambda folder: written(folder / "double.npy", ROWS.astype(">f8")),
        lambda folder: written(folder / "columns.npy", np.asfortranarray(ROWS)),
        lambda folder: written(folder / "pooled.npy", ROWS[:, :, None, None]),
        lambda folder: np.load(written(folder / "mapped.npy"), mmap_mode="r"),
    ],
)
def test_every_way_to_hold_vectors_gives_the_same_rows(tmp_path, make):
    source = describe_features(make(tmp_path))
    assert source.shape == (40, 6)
    np.testing.assert_allclose(source[:], ROWS, rtol=1e-6)
    np.testing.assert_allclose(open_images(source).batch([3, 1]), ROWS[[3, 1]], rtol=1e-6)
    chunks = list(open_stream(source, 1).chunks(16))
    np.testing.assert_allclose(np.concatenate([chunk.squares for chunk in chunks]), ROWS, rtol=1e-6)


@pytest.mark.parametrize("most", [features.IN_MEMORY, 100])
def test_archives_give_names_and_labels_and_are_unpacked_alike_of_any_size(tmp_path, monkeypatch, most):
    monkeypatch.setattr(features, "IN_MEMORY", most)
    names = np.array([f"{number}.txt" for number in range(40)])
    np.savez_compressed(tmp_path / "all.npz", emb=ROWS, paths=names, y=np.array(["b", "a"] * 20))
    source = describe_features(tmp_path / "all.npz")
    np.testing.assert_array_equal(source[:], ROWS)
    assert (source.names[:2], source.labels[:2].tolist(), source.class_names) == (
        ["0.txt", "1.txt"],
        [1, 0],
        ["a", "b"],
    )
    assert describe_features(tmp_path / "all.npz", labels=False).labels is None


def test_parquet_and_hugging_face_sets_give_their_column_of_vectors(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"id": [f"s{n}" for n in range(40)], "embedding": ROWS.tolist(), "label": [0, 1] * 20}
    table = datasets.Dataset.from_dict(columns)
    table.to_parquet(tmp_path / "all.parquet")
    table.save_to_disk(tmp_path / "saved")
    for given in (table, tmp_path / "all.parquet", tmp_path / "saved"):
        source = describe_features(given)
        np.testing.assert_allclose(source[:], ROWS, rtol=1e-6)
        assert (source.names[:2], source.labels[:2].tolist()) == (["s0", "s1"], [0, 1])
    ragged = datasets.Dataset.from_dict({"embedding": [[1.0, 2.0], [1.0]]})
    with pytest.raises(DataError, match="one length"):
        describe_features(ragged)


def test_spaces_stand_side_by_side_and_must_be_of_the_same_samples():
    source = describe_features([ROWS, ROWS[:, :2].astype(np.float16)])
    assert (source.dims, source[[5]].shape) == ([6, 2], (1, 8))
    with pytest.raises(DataError, match=r"40 rows .* 39"):
        describe_features([ROWS, ROWS[1:]])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ROWS[:, 0], r"\(N, D\)"),
        (ROWS.reshape(10, 4, 6), r"x\[:, 0\]"),
        (ROWS[:0], "no vectors"),
        (ROWS[:, :1], "at least 2"),
        (ROWS.astype(complex), "real numbers"),
        (np.array([{"a": 1}] * 4), "pickled objects"),
        (np.zeros((4, 20_000), np.float32), "TruncatedSVD"),
    ],
)
def test_what_is_no_vectors_is_refused_in_words(tmp_path, array, message):
    with pytest.raises(DataError, match=message):
        describe_features(written(tmp_path / "odd.npy", array))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.zeros(9), r"expected an array \(N, D\)"),
        (lambda: torch.zeros(4, 3).to_sparse(), "TruncatedSVD"),
        (lambda: pytest.importorskip("pandas").Series([[1.0, 2.0], [1.0]]), "one length"),
        (lambda: pytest.importorskip("pandas").DataFrame({"text": ["a", "b"]}), "expected the vectors"),
    ],
)
def test_objects_that_are_no_vectors_are_refused_in_words(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        cdc_plugin.refine(features=make(), clusters=2, out=tmp_path / "run")


@pytest.mark.parametrize("factor", [1e-25, 1.0, 1e25])
def test_the_scale_of_vectors_does_not_matter(factor):
    scaler = FeatureScaler([4, 2])
    scaler.fit(torch.from_numpy(ROWS) * factor)
    lengths = [part.square().sum(dim=1).mean() for part in scaler(torch.from_numpy(ROWS) * factor).split([4, 2], dim=1)]
    torch.testing.assert_close(torch.stack(lengths), torch.ones(2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_the_row_that_is_not_finite_is_named(bad):
    rows = ROWS.astype(float)
    rows[7, 2] = bad
    with pytest.raises(DataError, match="row 7 "):
        describe_features(rows)[5:]


def test_files_that_state_more_than_they_hold_are_refused(tmp_path):
    content = written(tmp_path / "rows.npy").read_bytes()
    for name, damaged in (("lie", content.replace(b"(40, 6)", b"(99, 6)")), ("cut", content[:-9]), ("none", b"")):
        (tmp_path / f"{name}.npy").write_bytes(damaged)
        with pytest.raises(DataError, match=f"{name}.npy"):
            describe_features(tmp_path / f"{name}.npy")


def test_pictures_are_found_by_name_or_by_order(tmp_path):
    pictures = np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, 8, 8, 3)
    by_order = describe_features(ROWS[:3], beside=pictures)
    np.testing.assert_array_equal(by_order.picture(1), pictures[1])
    with pytest.raises(DataError, match="same order"):
        describe_features(ROWS, beside=pictures)
    np.savez(tmp_path / "named.npz", x=ROWS[:2], ids=np.array(["2", "0"]))
    by_name = describe_features(tmp_path / "named.npz", beside=pictures)
    np.testing.assert_array_equal(by_name.picture(0), pictures[2])
    np.savez(tmp_path / "other.npz", x=ROWS[:2], ids=np.array(["2", "9"]))
    with pytest.raises(DataError, match="no image '9'"):
        describe_features(tmp_path / "other.npz", beside=pictures)


@pytest.mark.skipif(not hasattr(os, "madvise") and os.name == "nt", reason="the system decides what stays in memory")
def test_pages_of_a_mapped_file_are_given_back(tmp_path):
    path = written(tmp_path / "large.npy", np.ones((4096, 1024), np.float32))
    source = describe_features(path)

    def mapped() -> int:
        lines = open("/proc/self/smaps").read().split(str(path))  # noqa: SIM115
        return sum(int(part.split("Rss:")[1].split()[0]) for part in lines[1:])

    if not os.path.exists("/proc/self/smaps"):
        pytest.skip("the system does not say what a mapping holds")
    assert source[:].sum() == 4096 * 1024
    assert mapped() < 1024  # kB, of 16 MB
    assert source[torch.arange(4095, -1, -1).numpy()].sum() == 4096 * 1024
    assert mapped() < 1024
