"""kill -9 at chosen and at random moments: only the current epoch is lost, and no incomplete file is accepted."""

import random
import shutil
import signal

import pytest

from tests.helpers.fault_runs import TRAIN_BATCH, Fault, assert_refused, count_epochs, list_names, refine, refine_until

# In the order of a run, so that one folder can pass through all of them, one fault per start.
POINTS = [
    Fault("cdc_plugin.training.prepare:initialise"),
    Fault("os:replace", matching="config.yaml"),
    Fault("os:replace", matching="config.yaml", after=True),
    Fault("torch:save", "half-kill"),
    Fault("os:fsync", call=2),
    Fault("os:replace", matching="last.pt", after=True),
    Fault(TRAIN_BATCH, call=2),
    Fault("torch:save", "half-kill", call=1),
    Fault("os:replace", matching="last.pt"),
    Fault("os:replace", matching="last.pt", after=True),
    Fault("os:replace", matching="metrics.jsonl"),
    Fault("os:replace", matching="model.safetensors"),
    Fault("os:replace", matching="model.safetensors", after=True),
    Fault("os:replace", matching="predictions.csv"),
    Fault("os:replace", matching="report.json", after=True),
    Fault("os:replace", matching="report.html"),
]


def test_a_run_killed_at_every_point_one_after_another_gives_the_same_result(case, tmp_path):
    out, last = tmp_path / "out", 0
    for fault in POINTS:
        words = ["--resume"] if (out / "config.yaml").is_file() else [*case.words, "--resume"]
        ended = refine(*words, "--out", out, fault=fault)
        assert ended.code == -signal.SIGKILL, f"{fault} ended with {ended}"
        assert "report.html" not in list_names(out)
        assert count_epochs(out) >= last, f"{fault} lost an epoch that was finished"
        last = count_epochs(out)
    assert last == 3
    case.check(out)


def test_a_run_killed_at_random_moments_gives_the_same_result(case, out):
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    for epoch in (0, 1, 2):
        words, delay = [*(["--resume"] if epoch else case.words), "--out", out], moments.random() * 0.3

        def begun(epoch: int = epoch) -> bool:
            return (out / "metrics.jsonl").is_file() and count_epochs(out) >= epoch

        ended = refine_until(begun, signal.SIGKILL, *words, delay=delay)
        assert ended.code in (0, -signal.SIGKILL), f"seed {seed}: {ended}"
    case.check(out)


@pytest.mark.parametrize("file", ["last.pt", "config.yaml"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_file_that_another_program_has_cut_is_refused_in_one_line(case, out, file, kept):
    shutil.copytree(case.whole, out)
    broken = out / file
    broken.write_bytes(broken.read_bytes()[: int(kept * broken.stat().st_size)])
    before = {path: path.read_bytes() for path in out.iterdir() if path.name != "train.log"}
    assert_refused(refine("--resume", "--out", out), file)
    assert {path: path.read_bytes() for path in out.iterdir() if path.name != "train.log"} == before


def test_an_unfinished_run_is_not_taken_for_a_backbone(case, tmp_path, out):
    refine(*case.words, "--out", out, fault=Fault(TRAIN_BATCH, call=5))
    words = [out if word == case.words[1] else word for word in case.words]
    assert_refused(refine(*words, "--out", tmp_path / "next"), "not finished|unfinished", "--resume")


def test_two_runs_do_not_write_to_the_same_folder_at_once(case, out):
    answers = []

    def second_run() -> bool:
        if not (out / "metrics.jsonl").is_file():
            return False
        for how in ("--resume", "--overwrite"):
            answers.append(refine(*case.words, "--out", out, how))
        return True

    refine_until(second_run, 0, *case.words, "--out", out)
    for answer in answers:
        assert_refused(answer, "another run")
    case.check(out)
