"""What the README and the notebooks tell people to type works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from cdc_plugin.cli.compare import compare_parser
from cdc_plugin.cli.evaluate import evaluate_parser
from cdc_plugin.cli.export import export_parser
from cdc_plugin.cli.inspect import inspect_parser
from cdc_plugin.cli.predict import predict_parser
from cdc_plugin.cli.pretrain import pretrain_parser
from cdc_plugin.cli.refine import refine_parser
from tests.helpers import ROOT

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


PARSERS = {
    "refine": refine_parser,
    "predict": predict_parser,
    "inspect": inspect_parser,
    "export": export_parser,
    "evaluate": evaluate_parser,
    "compare": compare_parser,
    "pretrain": pretrain_parser,
}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme_is_understood(line):
    program, *words = shlex.split(line, comments=True)
    PARSERS[program.removeprefix("cdc-")]().parse_intermixed_args(words)


@pytest.mark.parametrize("line", TORCHRUN)
def test_every_torchrun_of_the_readme_is_understood(line):
    words = shlex.split(line)[shlex.split(line).index("cdc_plugin") + 1 :]
    name = words.pop(0) if words[0] in PARSERS else "refine"
    PARSERS[name]().parse_intermixed_args(words)


def test_the_demo_runs_and_prints_a_table_and_where_the_files_are(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cdc_plugin", "--demo", "--epochs", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
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
