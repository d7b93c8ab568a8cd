import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from cdc_plugin import __version__
from cdc_plugin.__main__ import COMMANDS, main, run_process
from cdc_plugin.errors import UserError
from tests.helpers import ROOT


@pytest.fixture
def chosen(monkeypatch):
    """Note which command is run with which words."""
    calls = []
    for name in COMMANDS:
        monkeypatch.setattr(
            f"cdc_plugin.cli.{name}.{name}_command", lambda words, name=name: calls.append((name, words))
        )
    return calls


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_word_chooses_the_command(name, chosen):
    main([name, "--help", name])
    assert chosen == [(name, ["--help", name])]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_help_lists_every_command(words, capsys):
    main(words)
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed and summary in printed for name, summary in COMMANDS.items())


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(("word", "said"), [("predct", "did you mean predict?"), ("zzz", "refine, predict")])
def test_an_unknown_command_ends_with_the_nearest_or_all_and_code_two(word, said, capsys):
    with pytest.raises(SystemExit) as end:
        main([word])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def ask(code: str, *words: str) -> str:
    return subprocess.run(
        [sys.executable, *code.split(maxsplit=1), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("words", "program"), [(["predict"], "cdc-predict"), ([], "cdc-refine"), (["epochs=3", "predict"], "cdc-refine")]
)
def test_the_module_refines_unless_its_first_word_is_a_command(words, program):
    assert ask("-m cdc_plugin", *words, "--help").startswith(f"usage: {program}")


def test_no_help_imports_anything_heavy():
    heavy = {"torch", "numpy", "omegaconf", "PIL", "scipy", "lightly"}
    lines = ["import sys, importlib", "from cdc_plugin.__main__ import COMMANDS, main", "main(['--help'])"]
    lines += ["for name in COMMANDS:", "    module = importlib.import_module(f'cdc_plugin.cli.{name}')"]
    lines += [
        "    getattr(module, f'{name}_parser')().format_help()",
        f"    assert not {heavy} & set(sys.modules), name",
    ]
    ask("-c", "\n".join(lines))


@pytest.mark.parametrize("told", [True, False])
def test_of_torchruns_processes_the_one_that_says_why_they_end_leaves_first(told, monkeypatch):
    def fail(words):
        try:
            error = UserError("no such device")
            error.told = told
            raise error
        except UserError:
            sys.exit(2)

    ends = Mock()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setattr("cdc_plugin.__main__.main", fail)
    monkeypatch.setattr("cdc_plugin.__main__.time.sleep", ends.wait)
    monkeypatch.setattr("cdc_plugin.__main__.os._exit", ends.leave)
    monkeypatch.setattr("cdc_plugin.__main__.logging.shutdown", ends.log)
    run_process(["refine"])
    assert [name for name, *_ in ends.method_calls] == ["log", *["wait"] * told, "leave"]
    ends.leave.assert_called_once_with(2)
