"""How a process that is all ours is set up, and that it is set up in time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc_plugin.cli import common, process
from cdc_plugin.cli.process import set_up_process
from cdc_plugin.cli.refine import refine_parser


class Library:
    """A C library that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def mallopt(self, what: int, value: int) -> None:
        self.told.append((what, value))


@pytest.fixture
def library(monkeypatch) -> Library:
    found = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    return found


def test_waiting_threads_sleep_and_freed_memory_is_kept(library):
    set_up_process()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    # glibc: M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD is -1; both values are int in C.
    assert dict(library.told) == {-3: 1 << 30, -1: 2**31 - 1}


def test_what_the_user_has_chosen_stays(library, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_up_process()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def no_library(name: str | None) -> None:
    raise OSError("no such library")


@pytest.mark.parametrize("other", [lambda name: object(), no_library], ids=["without mallopt", "not there"])
def test_another_c_library_is_no_trouble(library, monkeypatch, other):
    monkeypatch.setattr(ctypes, "CDLL", other)
    set_up_process()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_not_asked_for_memory(library, monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    set_up_process()
    assert library.told == []


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_the_real_c_library_takes_what_it_is_told():
    words = "import ctypes; from cdc_plugin.cli import process as p; c = ctypes.CDLL(None)"
    words += "; print(c.mallopt(p.MMAP_THRESHOLD, 1 << 30), c.mallopt(p.TRIM_THRESHOLD, (1 << 31) - 1))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "1"]  # in a process of its own, for this one is pytest's


def test_a_command_is_set_up_before_it_does_anything_and_before_torch_is_there(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(common, "set_up_process", lambda: events.append("set up"))
    common.run_command(lambda options: events.append("command"), refine_parser(), [])
    assert events == ["set up", "command"]
    words = "import sys; import cdc_plugin.cli.refine, cdc_plugin.cli.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], timeout=60, check=False).returncode == 0


def test_the_package_as_a_library_leaves_the_process_alone():
    package = Path(process.__file__).parents[1]
    using = {file.stem for file in package.rglob("*.py") if "set_up_process" in file.read_text(encoding="utf-8")}
    assert using == {"process", "common"}
