import argparse
import importlib
import shlex
import signal

import pytest

from cdc_plugin import __version__
from cdc_plugin.__main__ import COMMANDS
from cdc_plugin.cli import common
from cdc_plugin.cli.refine import refine_command, refine_parser
from cdc_plugin.errors import UserError, option
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
    parser = argparse.ArgumentParser()
    common.add_settings(parser, "batch_size", "flip", schema=PretrainConfig)
    text = parser.format_help()
    assert "images per step (default: 256)" in text
    assert "mirror left and right" in text


def test_hints_name_flags_inside_a_command_only(capsys):
    def refuse(_options):
        raise UserError(f"try {option('batch_size', 3)}")

    with pytest.raises(SystemExit) as end:
        common.run_command(refuse, refine_parser(), [])
    assert end.value.code == 2
    assert capsys.readouterr().err == "cdc-refine: error: try --batch-size 3\n"
    assert option("batch_size", 3) == "batch_size=3"


def test_an_error_of_the_program_is_not_disguised_as_the_users():
    with pytest.raises(ZeroDivisionError):
        common.run_command(lambda options: 1 / 0, refine_parser(), [])


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
    def interrupted(_options):
        try:
            raise interruption
        finally:
            if error is not None:
                raise error

    with pytest.raises(SystemExit) as ended:
        common.run_command(interrupted, refine_parser(), [], "continue with --resume")
    assert ended.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert line.endswith("continue with --resume")
