"""``cdc-pretrain`` as people type it, and ``cdc-refine`` on what it leaves."""

import json
import signal

from tests.helpers.commands import end_when, succeed

QUICK = ["batch_size=32", "hidden=16", "projection=8", "input_size=16", "--device", "cpu"]


def test_a_run_interrupted_by_the_keyboard_is_resumed_and_its_folder_refined(archive, tmp_path):
    out = tmp_path / "a backbone"
    words = ["--data", archive, "--method", "byol", "--epochs", 4, "--out", out, *QUICK]
    code, errors = end_when((out / "last.pt").is_file, "pretrain", *words, sign=signal.SIGINT)
    assert code == 130, errors
    assert errors.splitlines()[-1].endswith(f"continue with: cdc-pretrain --resume --out '{out}' device=cpu")
    assert json.loads((out / "model.json").read_text())["provenance"]["epochs"] < 4

    done = succeed("pretrain", "--resume", "--out", out, "--quiet")
    assert done.stderr == ""
    assert f"next: cdc-refine --backbone '{out}' --data {archive} --clusters C" in done.stdout
    epochs = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3, 4]

    refined = tmp_path / "refined"
    words = ["--backbone", out, "--data", archive, "--clusters", 5, "--epochs", 1, "--out", refined]
    succeed("refine", *words, "batch_size=100", "hidden=16", "--device", "cpu")
    assert json.loads((refined / "report.json").read_text())["clusters"] == 5
    assert "input_size: 16" in (refined / "config.yaml").read_text()
