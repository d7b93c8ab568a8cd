"""What the README and the notebooks tell people to type works."""

import importlib
import re
import shlex

import pytest

from cdc_plugin.__main__ import COMMANDS as NAMES
from tests.helpers import ROOT
from tests.helpers.commands import run_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Every other part between fences is code; its first line is the language, or empty for commands.
BLOCKS = [part.partition("\n") for part in README.split("```")[1::2]]
LINES = [line for language, _, block in BLOCKS if not language for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("cdc-")]
TORCHRUN = [line for line in LINES if line.startswith("torchrun ")]


def test_readme_names_exactly_two_set_up_commands():
    assert len([line for line in LINES if "-m venv" in line]) == 2
    assert len(COMMANDS) >= 4
    assert len(TORCHRUN) >= 2


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "<!-- test command -->" in script
    assert "<!-- test command -->" in README


def understand(name, words):
    parser = getattr(importlib.import_module(f"cdc_plugin.cli.{name}"), f"{name}_parser")()
    parser.parse_intermixed_args(words)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme_is_understood(line):
    program, *words = shlex.split(line, comments=True)
    understand(program.removeprefix("cdc-"), words)


@pytest.mark.parametrize("line", TORCHRUN)
def test_every_torchrun_of_the_readme_is_understood(line):
    words = shlex.split(line)[shlex.split(line).index("cdc_plugin") + 1 :]
    understand(words.pop(0) if words[0] in NAMES else "refine", words)


def test_the_demo_runs_and_prints_a_table_and_where_the_files_are(tmp_path):
    done = run_python("-m", "cdc_plugin", "--demo", "--epochs", "2", cwd=tmp_path)
    assert "calibration head" in done.stdout
    folder = tmp_path / re.search(r"results: (\S+)", done.stdout).group(1)
    assert (folder / "predictions.csv").is_file()
    assert "1,797 from digits" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(notebook, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NotebookClient(nbformat.read(notebook, as_version=4), timeout=600, kernel_name="python3").execute()
