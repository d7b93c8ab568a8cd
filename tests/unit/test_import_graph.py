"""Imports go down only, as declared in pyproject.toml; and only the command line prints and parses arguments."""

import ast
import subprocess
import sys

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "cdc_plugin"
COMMANDS = (PACKAGE / "cli", PACKAGE / "__main__.py")
BELOW_THE_COMMANDS = sorted(file for file in PACKAGE.rglob("*.py") if not {file, *file.parents} & set(COMMANDS))


def test_import_contracts_hold():
    # In a process of its own: import-linter disables the loggers of the one it runs in.
    words = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    ended = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("file", BELOW_THE_COMMANDS, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_only_the_command_line_prints_and_parses_arguments(file):
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not called & {"print", "exit", "quit", "input"}
    assert "argparse" not in imported
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), "a relative import"
