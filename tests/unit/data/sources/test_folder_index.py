"""The index of a large folder: kept, trusted only while nothing has changed, and never in the way."""

import logging
import os

import numpy as np
import pytest

from cdc_plugin.data.sources import folder_index
from cdc_plugin.data.sources.folder_index import digest_of_states, index_of, state_of

LONG_AGO = 10**18


def write(path, content=b"x", changed=LONG_AGO):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(changed, changed))


def settle(folder):
    """As if the folders had not been changed for long."""
    for parent, _, _ in os.walk(folder):
        os.utime(parent, ns=(LONG_AGO, LONG_AGO))


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folder_index, "KEPT_FROM", 3)
    for name in ["b/2.png", "a/1.png", "a/é.JPG", "a-b/3.png", "a/notes.txt"]:
        write(tmp_path / "photos" / name)
    settle(tmp_path / "photos")
    return tmp_path / "photos"


@pytest.fixture
def scans(monkeypatch):
    """How often the folder was gone through."""
    count, real = [], folder_index._scan
    monkeypatch.setattr(folder_index, "_scan", lambda folder: (count.append(1), real(folder))[1])
    return count


def test_the_kept_index_says_what_the_folder_says(photos, scans):
    first, again = index_of(photos), index_of(photos)
    assert len(scans) == 1
    assert first.names == again.names == ["a-b/3.png", "a/1.png", "a/é.JPG", "b/2.png"]
    assert np.array_equal(first.states, again.states)
    assert first.digest == again.digest == digest_of_states(first.names, first.states)
    assert first.others == {".txt": 1}


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "rewritten", "new folder"])
def test_a_change_is_seen(photos, scans, change):
    before = index_of(photos)
    if change == "added":
        write(photos / "b" / "9.png")
    elif change == "removed":
        (photos / "a" / "1.png").unlink()
    elif change == "renamed":
        (photos / "a" / "1.png").rename(photos / "a" / "0.png")
    elif change == "rewritten":
        (photos / "a" / "1.png").write_bytes(b"longer")
    else:
        write(photos / "c" / "1.png")
    after = index_of(photos)
    assert len(scans) == 2
    assert before.digest != after.digest


def test_a_file_that_is_in_no_sample_is_looked_at_as_long_as_there_is_time(photos, scans, monkeypatch):
    monkeypatch.setattr(folder_index, "SAMPLE", 2)  # the first and the last
    before = index_of(photos)
    (photos / "a" / "1.png").write_bytes(b"longer")
    assert index_of(photos, patience=0).digest == before.digest
    assert index_of(photos).digest != before.digest
    assert len(scans) == 2


def test_a_listing_that_takes_long_says_how_far_it_is(photos, monkeypatch, caplog):
    monkeypatch.setattr(folder_index, "TELL", -1)
    with caplog.at_level(logging.INFO):
        index_of(photos)
    assert "photos: 3 images so far" in caplog.text


def test_small_folders_leave_nothing_in_the_cache(photos, scans, monkeypatch):
    monkeypatch.setattr(folder_index, "KEPT_FROM", 5)
    index_of(photos)
    index_of(photos)
    assert len(scans) == 2


def test_a_folder_that_was_changed_a_moment_ago_is_not_kept(photos, scans):
    os.utime(photos / "a")
    index_of(photos)
    index_of(photos)
    assert len(scans) == 2


def test_without_a_cache_every_file_is_looked_at(photos, scans, monkeypatch):
    index_of(photos)
    monkeypatch.setenv("CDC_CACHE", "off")
    index_of(photos)
    assert len(scans) == 2


def test_a_damaged_index_is_made_again(photos, scans, tmp_path):
    names = index_of(photos).names
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:200])
    assert index_of(photos).names == names
    assert len(scans) == 2


def test_two_folders_have_an_index_each(photos, tmp_path):
    write(tmp_path / "others" / "z.png")
    assert index_of(photos).names != index_of(tmp_path / "others").names


def test_what_is_not_there_has_a_state_too(tmp_path):
    assert state_of(tmp_path / "nowhere") == (-1, -1)
