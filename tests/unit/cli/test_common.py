import contextlib
import ctypes
import importlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from cdc_plugin import __version__
from cdc_plugin.__main__ import COMMANDS
from cdc_plugin.cli import common
from cdc_plugin.cli.common import set_up_process
from cdc_plugin.cli.refine import refine_command, refine_parser
from cdc_plugin.errors import UserError, join_words, option
from cdc_plugin.training.pretext.config import PretrainConfig
from cdc_plugin.training.signals import Terminated


def command_and_parser(name):
    module = importlib.import_module(f"cdc_plugin.cli.{name}")
    return getattr(module, f"{name}_command"), getattr(module, f"{name}_parser")()


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("flag", "text"), [("--help", "example"), ("--version", __version__)])
def test_help_and_version_print_and_end_well(name, flag, text, capsys):
    command, _ = command_and_parser(name)
    with pytest.raises(SystemExit) as end:
        command([flag])
    assert end.value.code == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_the_help_is_understood(name):
    _, parser = command_and_parser(name)
    examples = [line for line in parser.epilog.splitlines() if line.startswith(f"  cdc-{name} ")]
    assert len(examples) >= 3
    for line in examples:
        parser.parse_intermixed_args(shlex.split(line.replace("> facts.json", ""), comments=True)[1:])


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--clusters", "many"], ["--resume", "--overwrite"]])
def test_words_that_no_option_takes_end_with_code_two(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        refine_command(arguments)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_an_option_that_is_not_given_is_no_flag():
    parser = refine_parser()
    assert common.collect_flags(parser.parse_args([])) == {}
    words = "--clusters 3 --freeze-backbone --no-labels --track wandb --track tensorboard --out here"
    assert common.collect_flags(parser.parse_args(words.split())) == {
        "clusters": 3,
        "freeze_backbone": True,
        "labels": False,
        "track": ["wandb", "tensorboard"],
        "out": "here",
    }


def test_the_help_of_an_option_is_that_of_its_setting():
    parser = common.make_parser("program", "", "")
    common.add_settings(parser, "batch_size", "flip", schema=PretrainConfig)
    text = parser.format_help()
    assert "images per step (default: 256)" in text
    assert "mirror left and right" in text


def test_hints_name_flags_inside_a_command_only(capsys):
    with pytest.raises(SystemExit) as end, common.run_command(refine_parser(), []):
        raise UserError(f"try {option('batch_size', 3)}")
    assert end.value.code == 2
    assert capsys.readouterr().err == "cdc-refine: error: try --batch-size 3\n"
    assert option("batch_size", 3) == "batch_size=3"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), OSError(36, "File name too long", "x" * 999)])
def test_a_failing_disk_is_one_line(capsys, error):
    with pytest.raises(SystemExit) as end, common.run_command(refine_parser(), []):
        raise error
    printed = capsys.readouterr()
    assert (end.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert error.strerror in printed.err


def test_an_error_of_the_program_is_not_disguised_as_the_users():
    with pytest.raises(ZeroDivisionError), common.run_command(refine_parser(), []):
        raise ZeroDivisionError


def test_an_interruption_that_a_library_has_lost_is_one_all_the_same(capsys):
    def lose():
        with contextlib.suppress(KeyboardInterrupt):  # as C code does within an import
            signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot load module more than once per process")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end, common.run_command(refine_parser(), []):
        lose()
    assert end.value.code == 130
    assert capsys.readouterr().err.startswith("cdc-refine: interrupted")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("error", [None, AttributeError("half cleaned up"), UserError("cannot write")])
@pytest.mark.parametrize(
    ("interruption", "code", "reason"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(), 143, "SIGTERM"),
        *((Terminated(n), 128 + n, n.name) for n in (getattr(signal, "SIGUSR1", signal.SIGTERM),)),
    ],
)
def test_what_fails_because_it_was_interrupted_is_an_interruption(error, interruption, code, reason, capsys):
    def interrupted():
        try:
            raise interruption
        finally:
            if error is not None:
                raise error

    with (
        pytest.raises(SystemExit) as ended,
        common.run_command(refine_parser(), ["--data", "my photos"], "continue with"),
    ):
        interrupted()
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert line.endswith("continue with: cdc-refine --data 'my photos'")


@pytest.fixture
def library(monkeypatch) -> Mock:
    """A C library that records the calls of mallopt."""
    monkeypatch.setattr(ctypes, "CDLL", found := Mock())
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    return found.return_value.mallopt


def test_names_that_are_no_text_are_printed_as_they_can_be(library, tmp_path, monkeypatch):
    with open(tmp_path / "out", "w", encoding="utf-8") as strict:
        monkeypatch.setattr(sys, "stdout", strict)
        set_up_process()
        print("\udcff.png")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "\\udcff.png\n"


def test_waiting_threads_sleep_and_freed_memory_is_kept(library):
    set_up_process()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    # glibc: M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD is -1; both values are int in C.
    assert sorted(call.args for call in library.call_args_list) == [(-3, 1 << 30), (-1, 2**31 - 1)]


def test_what_the_user_has_chosen_stays(library, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_up_process()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("other", [Mock(return_value=object()), Mock(side_effect=OSError)])
def test_another_c_library_is_no_trouble(library, monkeypatch, other):
    monkeypatch.setattr(ctypes, "CDLL", other)
    set_up_process()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_not_asked_for_memory(library, monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    set_up_process()
    library.assert_not_called()


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_the_real_c_library_accepts_the_settings():
    words = "import ctypes; from cdc_plugin.cli import common as p; c = ctypes.CDLL(None)"
    words += "; print(c.mallopt(p.MMAP_THRESHOLD, 1 << 30), c.mallopt(p.TRIM_THRESHOLD, (1 << 31) - 1))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "1"]  # in a process of its own, for this one is pytest's


def test_a_command_is_set_up_before_it_does_anything_and_before_torch_is_there(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(common, "set_up_process", lambda: events.append("set up"))
    with common.run_command(refine_parser(), []):
        events.append("command")
    assert events == ["set up", "command"]
    words = "import sys; import cdc_plugin.cli.refine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], timeout=60, check=False).returncode == 0


def test_the_package_as_a_library_leaves_the_process_alone():
    package = Path(common.__file__).parents[1]
    using = {file.stem for file in package.rglob("*.py") if "set_up_process" in file.read_text(encoding="utf-8")}
    assert using == {"common"}


def test_words_are_quoted_as_the_shell_of_the_system_takes_them(monkeypatch):
    words = ["--out", "my runs/a", "mean=[0.5,0.5,0.5]", "seed=1"]
    assert shlex.split(join_words(words)) == words
    monkeypatch.setattr("sys.platform", "win32")
    assert join_words(words) == '--out "my runs/a" "mean=[0.5,0.5,0.5]" seed=1'
