"""The cache folder: where it is, how much it holds, and who may make an entry."""

import errno
import io
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from cdc_plugin.data import cache, locks
from cdc_plugin.errors import UserError

USAGE = namedtuple("USAGE", "total used free")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", str(tmp_path))
    monkeypatch.setenv("CDC_CACHE_GB", str(1000 / 1024**3))
    return tmp_path


@pytest.fixture(scope="module")
def dead():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def keep(folder, name, size, age):
    (folder / name).write_bytes(b"x" * size)
    os.utime(folder / name, (time.time() - age,) * 2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_is_the_users_wish_else_the_systems(tmp_path, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "mine"))
    assert cache.cache_folder() == tmp_path / "mine"
    assert cache.entry("features", "key", "f32") == tmp_path / "mine" / "features-key.f32"
    monkeypatch.delenv("CDC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "cdc-plugin"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache.cache_folder() == tmp_path / "home" / ".cache" / "cdc-plugin"


def test_the_cache_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("CDC_CACHE", "off")
    assert cache.cache_folder() is None
    assert cache.entry("index", "key", "npz") is None


def test_what_was_used_longest_ago_goes_first_and_only_as_much_as_it_takes(folder):
    keep(folder, "images-a-32.u8", 300, 300)
    keep(folder, "images-a-32.json", 50, 300)
    keep(folder, "features-b.f32", 300, 200)
    keep(folder, "index-c.npz", 300, 100)
    keep(folder, "my-thesis.tex", 900, 1000)  # not ours: neither counted nor removed
    cache.make_room(folder / "features-d.f32", 100)
    assert len(names(folder)) == 4 + 1 - 2
    assert "features-b.f32" in names(folder)
    cache.used(folder / "features-b.f32")
    cache.make_room(folder / "features-d.f32", 500)
    assert names(folder) == ["features-b.f32", "my-thesis.tex"]


def test_a_full_disk_costs_what_was_used_longest_ago_its_place(folder, monkeypatch):
    keep(folder, "features-a.f32", 300, 300)
    keep(folder, "features-b.f32", 300, 200)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: USAGE(1000, 950, 50))
    cache.make_room(folder / "features-d.f32", 300)
    assert names(folder) == ["features-b.f32"]


def test_what_no_sacrifice_would_make_room_for_costs_nobody_their_place(folder, monkeypatch):
    keep(folder, "features-a.f32", 300, 300)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: USAGE(1000, 950, 50))
    with pytest.raises(UserError, match="50 bytes are free"):
        cache.make_room(folder / "features-d.f32", 400)
    assert names(folder) == ["features-a.f32"]


def test_nothing_goes_as_long_as_there_is_room(folder):
    keep(folder, "features-b.f32", 300, 200)
    cache.make_room(folder / "features-d.f32", 700)
    assert names(folder) == ["features-b.f32"]


def test_an_entry_larger_than_the_cache_is_refused_and_costs_nobody_their_place(folder):
    keep(folder, "features-b.f32", 300, 200)
    with pytest.raises(UserError, match="CDC_CACHE_GB"):
        cache.make_room(folder / "features-d.f32", 1001)
    assert names(folder) == ["features-b.f32"]


@pytest.mark.parametrize("wish", ["many", "-1", "nan"])
def test_a_size_that_is_none_is_refused(folder, monkeypatch, wish):
    monkeypatch.setenv("CDC_CACHE_GB", wish)
    with pytest.raises(UserError, match="CDC_CACHE_GB is"):
        cache.make_room(folder / "features-d.f32", 1)


@pytest.mark.skipif(os.name == "nt", reason="a process can not be asked there whether it lives")
def test_leftovers_of_dead_processes_are_swept_and_work_under_way_is_left(folder, dead):
    host = socket.gethostname()
    keep(folder, f"images-a-32.u8.{host}.{dead}.part", 10, 0)
    keep(folder, f"images-b-32.u8.{host}.{os.getpid()}.part", 10, 0)
    keep(folder, "images-c-32.u8.elsewhere.1.part", 10, 0)
    keep(folder, "images-d-32.u8.elsewhere.1.part", 10, 2 * cache.ABANDONED)
    (folder / "images-a-32.u8.lock").write_text(f"{host}.{dead}")
    (folder / "images-b-32.u8.lock").write_text(f"{host}.{os.getpid()}")
    keep(folder, "film.mkv.part", 10, 2 * cache.ABANDONED)  # somebody else's
    cache.sweep(folder)
    assert names(folder) == [
        "film.mkv.part",
        "images-b-32.u8.lock",
        f"images-b-32.u8.{host}.{os.getpid()}.part",
        "images-c-32.u8.elsewhere.1.part",
    ]


def test_arrays_come_back_and_damaged_ones_do_not(folder, monkeypatch):
    monkeypatch.setenv("CDC_CACHE_GB", "1")
    path = folder / "index-a.npz"
    assert cache.load_arrays(path) is None
    cache.save_arrays(path, {"a": np.arange(5)})
    assert cache.load_arrays(path)["a"].tolist() == [*range(5)]
    assert names(folder) == ["index-a.npz"]
    path.write_bytes(path.read_bytes()[:100])
    assert cache.load_arrays(path) is None


def test_arrays_that_do_not_fit_are_done_without(folder):
    cache.save_arrays(folder / "index-a.npz", {"a": np.zeros(1000)})
    assert names(folder) == []


def test_one_thread_makes_an_entry_and_the_others_wait(folder, monkeypatch):
    monkeypatch.setattr(locks, "PAUSE", 0.01)
    path, made = folder / "features-a.f32", []

    def make():
        made.append(1)
        time.sleep(0.05)
        path.write_text("whole")
        return "whole"

    def ask():
        answers.append(cache.made_once(path, lambda: path.read_text() if path.exists() else None, make))

    answers = []
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (answers, made) == (["whole"] * 4, [1])
    assert names(folder) == ["features-a.f32"]


def test_a_lock_is_given_back_after_a_failure(folder):
    def fail():
        raise UserError("no")

    with pytest.raises(UserError):
        cache.made_once(folder / "features-a.f32", lambda: None, fail)
    assert names(folder) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_too_full_for_a_lock_is_no_obstacle_but_one_that_can_not_be_written_is(folder, monkeypatch, number):
    class Bad(io.StringIO):
        def write(self, text):
            raise OSError(number, os.strerror(number))

    real, held = os.fdopen, []
    monkeypatch.setattr(os, "fdopen", lambda handle, *how, **more: (real(handle).close(), Bad())[1])
    expected = nullcontext() if number == errno.ENOSPC else pytest.raises(UserError, match="can not be written")
    with expected, locks.locked(folder / "a"):
        held.append(1)
    assert bool(held) == (number == errno.ENOSPC)
    assert names(folder) == []


@pytest.mark.skipif(os.name == "nt", reason="folders have no owner there")
def test_a_folder_for_private_files_is_the_cache_or_ones_own(folder, tmp_path_factory, monkeypatch):
    assert cache.scratch_folder() == folder
    monkeypatch.setenv("CDC_CACHE", "off")
    above = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(above))
    found = cache.scratch_folder()
    assert found.parent == above
    assert found.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    (above / "cdc-plugin-123456").mkdir()
    assert cache.scratch_folder() is None


@pytest.mark.skipif(os.name == "nt", reason="a process can not be asked there whether it lives")
def test_the_lock_of_a_dead_process_is_taken_over(folder, dead, caplog):
    (folder / "a.lock").write_text(f"{socket.gethostname()}.{dead}")
    with caplog.at_level(logging.INFO), locks.locked(folder / "a"):
        assert (folder / "a.lock").read_text() == f"{socket.gethostname()}.{os.getpid()}"
    assert "taken over" in caplog.text
    assert names(folder) == []


def test_the_lock_of_a_machine_that_shows_no_life_is_taken_over(folder, monkeypatch, caplog):
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    monkeypatch.setattr(locks, "PAUSE", 0.01)
    (folder / "a.lock").write_text("elsewhere.1")
    with caplog.at_level(logging.INFO), locks.locked(folder / "a"):
        pass
    assert "another process makes a; waiting for it" in caplog.text


def test_an_owner_shows_that_it_lives(folder, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.01)
    with locks.locked(folder / "a"):
        os.utime(folder / "a.lock", (1, 1))
        for _ in range(500):
            if (folder / "a.lock").stat().st_mtime > 1:
                break
            time.sleep(0.01)
        assert (folder / "a.lock").stat().st_mtime > 1
