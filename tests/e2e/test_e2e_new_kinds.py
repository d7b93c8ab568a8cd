"""Kinds that a model has never seen: found among new samples, shown, and given clusters of their own."""

import shlex

import numpy as np
import pytest

from tests.helpers.commands import read_table, refuse, succeed


def draw(counts: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, 24) of so many samples of each kind, and the kinds (N,), in random order."""
    centers = np.random.default_rng(1).normal(size=(len(counts), 24))
    random = np.random.default_rng(seed)
    kinds = random.permutation(np.repeat(np.arange(len(counts)), counts))
    return (centers[kinds] + 0.3 * random.normal(size=(len(kinds), 24))).astype(np.float32), kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on four kinds, new samples of six, and both together."""
    folder = tmp_path_factory.mktemp("kinds")
    old, new = draw([60, 60, 60, 60, 0, 0], 2), draw([40, 40, 40, 40, 50, 30], 3)
    np.save(folder / "old.npy", old[0])
    np.save(folder / "new.npy", new[0])
    np.savez(folder / "OLD_AND_NEW.npz", features=np.concatenate([old[0], new[0]]), y=np.concatenate([old[1], new[1]]))
    words = ("--features", folder / "old.npy", "--clusters", 4, "--out", folder / "run", "epochs=3", "--quiet")
    succeed("refine", *words)
    return folder


def test_what_no_cluster_fits_comes_back_in_groups_and_then_in_clusters(folder):
    words = ("--model", folder / "run", "--features", folder / "new.npy", "--out", folder / "new.csv")
    printed = succeed("predict", *words, "--new-kinds", "--min-confidence", 0.01).stdout
    assert "2 new kinds among 240" in printed
    rows, kinds = read_table(folder / "new.csv"), draw([40, 40, 40, 40, 50, 30], 3)[1]
    found = np.array([int(row["new_kind"]) for row in rows])
    assert [set(kinds[found == number]) for number in (0, 1)] == [{4}, {5}]
    assert (found[kinds >= 4] >= 0).mean() > 0.9
    assert not any(row["selected"] == "1" for row in rows if row["new_kind"] != "-1")
    page = (folder / "new.new-kinds.html").read_text()
    assert "New kind 1" in page
    assert "<script" not in page

    command = printed[printed.index("cdc-refine") :].splitlines()[0]
    assert command in page
    _, *typed = shlex.split(command)
    typed[typed.index("OLD_AND_NEW.npy")] = str(folder / "OLD_AND_NEW.npz")
    succeed("refine", *typed, "--out", folder / "grown", "epochs=3", "--quiet")
    before, after = read_table(folder / "run" / "predictions.csv"), read_table(folder / "grown" / "predictions.csv")
    same = [old["cluster"] == new["cluster"] for old, new in zip(before, after[: len(before)], strict=True)]
    assert np.mean(same) > 0.98  # old clusters keep their numbers
    clusters = np.array([int(row["cluster"]) for row in after[len(before) :]])
    assert (clusters[kinds == 4] == 4).mean() > 0.95
    assert (clusters[kinds == 5] == 5).mean() > 0.95
    assert "clusters" in refuse(
        "refine", "--backbone", folder / "grown", *typed[2:], "--out", folder / "x", "clusters=5"
    )


def test_known_samples_alone_hold_no_new_kind(folder):
    words = ("--model", folder / "run", "--features", folder / "old.npy", "--out", folder / "old.csv", "--new-kinds")
    assert "no new kind among 240 samples" in succeed("predict", *words).stdout
    assert not (folder / "old.new-kinds.html").exists()
    np.save(folder / "three.npy", np.load(folder / "new.npy")[:3])
    words = ("--model", folder / "run", "--features", folder / "three.npy", "--out", folder / "three.csv")
    assert "found 3" in succeed("predict", *words, "--new-kinds").stdout
