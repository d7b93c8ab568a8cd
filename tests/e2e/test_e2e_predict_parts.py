"""``cdc-predict`` is killed at every bad moment and typed again: in the end nothing is lost and nothing is left."""

import signal

import numpy as np
import pytest

from tests.helpers.commands import names_in, run_python

# The command with small parts; the process ends itself at the moment that the first word names.
DRIVER = """
import os, signal, sys
import numpy as np
from cdc_plugin.evaluation import predict_resume
from cdc_plugin.evaluation import records as tables
from cdc_plugin.cli.predict import predict_command

predict_resume.PART = 16
moment, count = sys.argv[1], int(sys.argv[2])
calls = []

def ending(function, number):
    def ends(*arguments, **named):
        calls.append(1)
        if len(calls) == count:
            if moment == "writing a part":
                arguments[0].write(b"half a part")
                arguments[0].flush()
            os.kill(os.getpid(), number)
        return function(*arguments, **named)
    return ends

if moment == "between parts":
    predict_resume.PartFolder.save = ending(predict_resume.PartFolder.save, signal.SIGKILL)
elif moment == "writing a part":
    np.savez = ending(np.savez, signal.SIGKILL)
elif moment == "writing the table":
    tables._format = ending(tables._format, signal.SIGKILL)
elif moment == "told to end":
    predict_resume.PartFolder.save = ending(predict_resume.PartFolder.save, signal.SIGTERM)
predict_command(sys.argv[3:])
"""


@pytest.fixture
def words(tmp_path, tiny_clusterer, digits):
    model = tmp_path / "run"
    model.mkdir()
    tiny_clusterer.save(model, {})
    np.savez_compressed(tmp_path / "new.npz", x=digits[0][:150])
    return ["--model", str(model), "--data", str(tmp_path / "new.npz"), "--device", "cpu", "--target-accuracy", "0.3"]


def predict(*words):
    return run_python("-c", DRIVER, *words)


def test_the_same_command_resumes_after_any_kill(tmp_path, words):
    out, whole = tmp_path / "new.csv", tmp_path / "whole.csv"
    assert predict("never", 0, *words, "--out", whole).returncode == 0
    left = []
    for moment, count in (("between parts", 3), ("writing a part", 2), ("told to end", 3), ("writing the table", 200)):
        done = predict(moment, count, *words, "--out", out)
        assert done.stdout == "", moment
        assert not out.exists(), moment
        ended = 128 + signal.SIGTERM if moment == "told to end" else -signal.SIGKILL
        assert done.returncode == ended, (moment, done.stderr)
        left.append(len(list((tmp_path / ".new.csv.parts").glob("[!.]*.npz"))))
        if moment == "told to end":
            assert "resuming: 3 of 10 parts are finished" in done.stderr.splitlines()[0]
            assert done.stderr.splitlines()[1].startswith("cdc-predict: stopped by SIGTERM")
    assert left == [2, 3, 5, 10]
    done = predict("never", 0, *words, "--out", out)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == whole.read_bytes()
    assert len(whole.read_text().splitlines()) == 151
    assert "150 images" in done.stdout.splitlines()[0]
    assert names_in(tmp_path) == {"new.csv", "new.npz", "run", "whole.csv"}
