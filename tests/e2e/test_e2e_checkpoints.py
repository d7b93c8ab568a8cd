"""From other people's checkpoints to results and out again, with the commands in processes of their own."""

import json
import os

import pytest
import torch

from cdc_plugin.models.architectures import build
from tests.helpers import commands
from tests.helpers.commands import run_python
from tests.helpers.exported_models import SMALL_RESNET18

QUICK = ["hidden=16", "batch_size=60", "sub_batch_size=30", "mini_clusters=12", "--device", "cpu", "--epochs", "1"]


def succeed(*words) -> str:
    return commands.succeed(*words).stdout


@pytest.fixture(scope="module")
def retrofitted(tmp_path_factory, scan_checkpoint, archive):
    out = tmp_path_factory.mktemp("retrofit") / "run"
    table = succeed("refine", "--backbone", scan_checkpoint, "--data", archive, "--out", out, *QUICK)
    assert "old model" in table
    return out


def test_a_scan_model_is_retrofitted_and_compared_with_what_it_was(retrofitted):
    report = json.loads((retrofitted / "report.json").read_text(encoding="utf-8"))
    old = report["old_model"]
    assert (report["clusters"], old["clusters"], old["agreement_before"]) == (4, 4, 1.0)
    assert old["ACC"] == report["before"]["calibration_head"]["ACC"]
    assert old["ECE"] == pytest.approx(report["before"]["calibration_head"]["ECE"], abs=1e-5)
    assert 0 < old["agreement_after"] <= 1
    assert "init: keep" in (retrofitted / "config.yaml").read_text(encoding="utf-8")


def test_a_retrofit_without_labels_tells_agreement_and_confidence(scan_checkpoint, archive, tmp_path):
    words = ["--backbone", scan_checkpoint, "--data", archive, "--no-labels", "--init", "prototypes", "--clusters", 5]
    succeed("refine", *words, "--out", tmp_path / "run", *QUICK)
    old = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["old_model"]
    assert {"CONF", "agreement_before", "agreement_after"} <= set(old)
    assert "ACC" not in old


ENDS_AFTER_AN_EPOCH = """
import cdc_plugin.training.run_folder as p, os
keep = p.write_history
def stop(path, history):
    keep(path, history)
    if len(history) == 1: os._exit(9)
p.write_history = stop
from cdc_plugin.cli.refine import refine_command; refine_command()
"""


def test_an_interrupted_retrofit_goes_on_with_the_same_heads(scan_checkpoint, archive, tmp_path):
    words = ["--backbone", scan_checkpoint, "--data", archive, *QUICK[:-1]]
    succeed("refine", *words, 2, "--out", tmp_path / "whole")
    assert run_python("-c", ENDS_AFTER_AN_EPOCH, *words, "2", "--out", tmp_path / "parts").returncode == 9
    succeed("refine", "--resume", "--out", tmp_path / "parts")
    for name in ("model.safetensors", "predictions.csv"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("whole", "parts")]
    assert reports[0]["old_model"] == reports[1]["old_model"]


def test_what_cannot_be_kept_is_refused(refuse, scan_checkpoint, archive, tmp_path, tiny_checkpoint):
    for backbone, words, reason in (
        (scan_checkpoint, ["keep", "--clusters", 7], "leave --clusters 7 out"),
        (tiny_checkpoint, ["keep", "--clusters", 3, "arch=null"], "clustering head"),
        (scan_checkpoint, ["chance"], "keep"),
        (scan_checkpoint, ["keep", "--head", 5], "2 clustering heads"),
    ):
        given = ["--backbone", backbone, "--data", archive, "--out", tmp_path / "run", "--quiet", "--init", *words]
        assert reason in refuse("refine", *given)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_of_solo_learn_needs_nothing_else_and_its_clusters_go_back(digits, write_images, tmp_path):
    network, _ = build(SMALL_RESNET18)
    photos = write_images(tmp_path / "photos", digits[0][:90], digits[1][:90] % 3)
    run = tmp_path / "trained_models" / "simclr" / "abc"
    run.mkdir(parents=True)
    state = {f"backbone.{k}": v for k, v in network.state_dict().items()} | {"classifier.weight": torch.zeros(3, 512)}
    torch.save({"epoch": 2, "pytorch-lightning_version": "2.1.2", "state_dict": state}, run / "simclr-abc-ep=1.ckpt")
    statistics = {"mean": [0.3] * 3, "std": [0.35] * 3}
    args = {
        "method": "simclr",
        "backbone": {"name": "resnet18", "kwargs": {}},
        "data": {"dataset": "custom", "train_path": str(photos), "num_classes": 3, "format": "image_folder"},
        "augmentations": [{"crop_size": 32, **statistics}],
        "cdc": {"epochs": 1, "hidden": 16, "batch_size": 60, "sub_batch_size": 30},
    }
    (run / "args.json").write_text(json.dumps(args))
    succeed("refine", "--backbone", run, "--device", "cpu", "--out", tmp_path / "clusters")
    report = json.loads((tmp_path / "clusters" / "report.json").read_text(encoding="utf-8"))
    assert (report["images"], report["clusters"], report["epochs"]) == (90, 3, 1)
    model = json.loads((tmp_path / "clusters" / "model.json").read_text(encoding="utf-8"))
    assert model["backbone"]["spec"]["stem"]["padding"] == 2
    assert model["backbone"]["mean"] == [0.3] * 3
    succeed("export", "--model", tmp_path / "clusters", "--to", "solo-learn", "--out", tmp_path / "exported")
    assert (tmp_path / "exported" / "args.json").is_file()


def test_inspect_tells_the_head_and_export_what_it_cannot_do(refuse, scan_checkpoint, retrofitted, archive, tmp_path):
    facts = json.loads(succeed("inspect", scan_checkpoint, "--json"))
    assert "SCAN" in json.dumps(facts)
    assert "heads" in succeed("inspect", scan_checkpoint, "--data", archive, "--device", "cpu")
    # torchvision has no ResNet of this width: the export says so and writes nothing.
    out = tmp_path / "backbone.pth"
    assert "torchvision has no network" in refuse("export", "--model", retrofitted, "--to", "torchvision", "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("program", ["inspect", "refine", "export"])
def test_a_hostile_or_broken_file_is_one_line(refuse, program, tmp_path, archive):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    torch.save({"state_dict": {"conv1.weight": torch.ones(2)}, "extra": Evil()}, tmp_path / "evil.pth")
    (tmp_path / "text.pth").write_text("not a checkpoint")
    for name in ("evil.pth", "text.pth", "absent.pth"):
        words = {
            "inspect": [tmp_path / name],
            "refine": ["--backbone", tmp_path / name, "--data", archive, "--clusters", 3, "--out", tmp_path / "o"],
            "export": ["--model", tmp_path / name, "--to", "torchvision", "--out", tmp_path / "o.pth"],
        }[program]
        assert name in refuse(program, *words)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "o").exists()


def test_several_heads_of_which_none_is_the_best_ask_for_a_word(refuse, scan_checkpoint, archive, tmp_path):
    payload = torch.load(scan_checkpoint, weights_only=False)
    torch.save(payload["model"], tmp_path / "heads.pth.tar")
    words = ["--data", archive, "--out", tmp_path / "out"]
    line = refuse("refine", "--backbone", tmp_path / "heads.pth.tar", *words, "--init", "keep", "--quiet")
    assert "2 heads and the file does not say which is best; pass --head 0 to 1" in line
    assert "pass --head" in refuse(
        "predict", "--model", tmp_path / "heads.pth.tar", "--data", archive, "--out", tmp_path / "b.csv"
    )
    assert "200 images" in succeed(
        "predict", "--model", tmp_path / "heads.pth.tar", "--head", 0, *words[:2], "--out", tmp_path / "a.csv"
    )
    table = succeed("refine", "--backbone", tmp_path / "heads.pth.tar", "--head", 1, *words, *QUICK)
    assert "100.0% of the images start in the old model's cluster" in table
