"""The cache folder: where it is, how much it holds, and who may make an entry."""

import errno
import os
import sys
import tempfile
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context

import pytest
from filelock import FileLock

from cdc_plugin.data import cache
from cdc_plugin.errors import ConfigError, OutputError

USAGE = namedtuple("USAGE", "total used free")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", str(tmp_path))
    monkeypatch.setenv("CDC_CACHE_GB", str(1000 / 1024**3))
    return tmp_path


def keep(folder, name, size, age):
    (folder / name).write_bytes(b"x" * size)
    os.utime(folder / name, (time.time() - age,) * 2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_is_the_users_choice_else_the_systems(tmp_path, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "mine"))
    assert cache.find_cache_folder() == tmp_path / "mine"
    assert cache.find_entry("features", "key") == tmp_path / "mine" / "features-key.npy"
    monkeypatch.setenv("CDC_CACHE", "off")
    assert cache.find_cache_folder() is cache.find_entry("images", "key") is None
    monkeypatch.delenv("CDC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if sys.platform == "linux":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert cache.find_cache_folder() == tmp_path / "home" / ".cache" / "cdc-plugin"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache.find_cache_folder() == tmp_path / "xdg" / "cdc-plugin"


def test_the_least_recently_used_entries_are_removed_and_only_as_many_as_it_takes(folder):
    keep(folder, "images-a-32.npy", 300, 300)
    keep(folder, "images-a-32.json", 50, 300)
    keep(folder, "features-b.npy", 300, 200)
    keep(folder, "images-c.npy", 300, 100)
    keep(folder, "my-thesis.tex", 900, 1000)  # not ours: neither counted nor removed
    cache.make_room(folder / "features-d.npy", 100)
    assert names(folder) == ["features-b.npy", "images-c.npy", "my-thesis.tex"]
    cache.mark_used(folder / "features-b.npy")
    cache.make_room(folder / "features-d.npy", 500)
    assert names(folder) == ["features-b.npy", "my-thesis.tex"]


@pytest.mark.parametrize(("size", "left"), [(50, ["a", "b"]), (300, ["b"]), (700, ["a", "b"])])
def test_on_a_full_disk_entries_make_room_unless_that_would_be_in_vain(folder, monkeypatch, size, left):
    keep(folder, "features-a.npy", 300, 300)
    keep(folder, "features-b.npy", 300, 200)
    monkeypatch.setenv("CDC_CACHE_GB", "1")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: USAGE(1000, 950, 50))
    with pytest.raises(OutputError, match="50 bytes are free") if size == 700 else nullcontext():
        cache.make_room(folder / "features-d.npy", size)
    assert names(folder) == [f"features-{name}.npy" for name in left]


@pytest.mark.parametrize(("size", "message"), [(700, None), (1001, "CDC_CACHE_GB=2")])
def test_nothing_is_removed_for_an_entry_that_fits_or_never_will(folder, size, message):
    keep(folder, "features-b.npy", 300, 200)
    with nullcontext() if message is None else pytest.raises(OutputError, match=message):
        cache.make_room(folder / "features-d.npy", size)
    assert names(folder) == ["features-b.npy"]


@pytest.mark.parametrize("size", ["many", "-1", "nan"])
def test_a_cache_size_that_is_no_number_is_refused(folder, monkeypatch, size):
    monkeypatch.setenv("CDC_CACHE_GB", size)
    with pytest.raises(ConfigError, match=f"CDC_CACHE_GB.*{size}"):
        cache.make_room(folder / "features-d.npy", 1)


def test_leftovers_of_killed_processes_are_removed_and_work_under_way_is_left(folder):
    for name in (".images-a-32.npy.abcd1234", "images-a-32.lock", ".images-b-32.json.abcd1234", ".film.npy.abcd1234"):
        keep(folder, name, 10, 0)
    with FileLock(folder / "images-b-32.lock"):
        cache.remove_leftovers(folder)
        assert names(folder) == [".film.npy.abcd1234", ".images-b-32.json.abcd1234", "images-b-32.lock"]
    with cache.lock_entry(folder / "images-b-32.npy"):  # whoever writes an entry removes what is left of earlier tries
        assert names(folder) == [".film.npy.abcd1234", "images-b-32.lock"]
    assert names(folder) == [".film.npy.abcd1234"]


def test_one_thread_makes_an_entry_and_the_others_wait(folder):
    path, made = folder / "features-a.npy", []

    def make():
        made.append(1)
        time.sleep(0.05)
        path.write_text("complete")
        return "complete"

    def ask(_):
        return cache.find_or_make(path, lambda: path.read_text() if path.exists() else None, make)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["complete"] * 4
    assert made == [1]
    assert names(folder) == ["features-a.npy"]


def test_a_lock_is_released_after_a_failure(folder):
    def fail():
        raise OutputError("no")

    for _ in range(2):
        with pytest.raises(OutputError):
            cache.find_or_make(folder / "features-a.npy", lambda: None, fail)
    assert names(folder) == []


def _hold_for_ever(path, held):
    with cache.lock_entry(path):
        held.set()
        time.sleep(600)


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_the_lock_of_a_killed_process_is_taken_over(folder):
    context = get_context("fork")
    held = context.Event()
    owner = context.Process(target=_hold_for_ever, args=(folder / "features-a.npy", held))
    owner.start()
    assert held.wait(60)
    owner.kill()
    owner.join()
    assert names(folder) == ["features-a.lock"]
    with cache.lock_entry(folder / "features-a.npy"):
        pass
    assert names(folder) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_too_full_for_a_lock_is_no_obstacle_but_one_that_cannot_be_written_is(folder, monkeypatch, number):
    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileLock, "acquire", fail)
    entered = []
    expected = nullcontext() if number == errno.ENOSPC else pytest.raises(OutputError, match="cannot be written")
    with expected, cache.lock_entry(folder / "a"):
        entered.append(1)
    assert bool(entered) == (number == errno.ENOSPC)


@pytest.mark.skipif(os.name == "nt", reason="folders have no owner there")
def test_a_folder_for_private_files_is_the_cache_or_ones_own(folder, tmp_path_factory, monkeypatch):
    assert cache._find_scratch_folder() == folder
    monkeypatch.setenv("CDC_CACHE", "off")
    above = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(above))
    private = cache._find_scratch_folder()
    assert private.parent == above
    assert private.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    (above / "cdc-plugin-123456").mkdir()
    assert cache._find_scratch_folder() is None
