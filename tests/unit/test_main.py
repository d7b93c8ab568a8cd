import os
import subprocess
import sys

import pytest

from cdc_plugin.__main__ import COMMANDS, choose
from tests.helpers import ROOT


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_word_chooses_the_command(name):
    command, rest = choose([name, "--help", name])
    assert command.__name__ == f"{name}_command"
    assert rest == ["--help", name]


@pytest.mark.parametrize("words", [[], ["--demo"], ["epochs=3", "predict"], ["predicted"]], ids=str)
def test_without_the_name_of_a_command_all_words_are_for_refining(words):
    command, rest = choose(words)
    assert command.__name__ == "refine_command"
    assert rest == words


@pytest.mark.parametrize(("words", "said"), [(["predict"], "cdc-predict"), ([], "cdc-refine")])
def test_the_module_answers_as_the_command_does(words, said):
    done = subprocess.run(
        [sys.executable, "-m", "cdc_plugin", *words, "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"usage: {said}")
