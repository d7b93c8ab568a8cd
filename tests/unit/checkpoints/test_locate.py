"""Which of a run's checkpoints is meant, and the settings found beside it."""

import json

import pytest

from cdc_plugin.checkpoints.read import locate, read_sidecars
from cdc_plugin.errors import UserError


def make(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (("simclr-91j4kng7-ep=9.ckpt", "simclr-91j4kng7-ep=10.ckpt", "args.json"), "simclr-91j4kng7-ep=10.ckpt"),
        (("epoch=3-step=40.ckpt", "epoch=3-step=400.ckpt", "epoch=12-step=5.ckpt"), "epoch=12-step=5.ckpt"),
        (("epoch=12-step=5.ckpt", "last.ckpt", "last-v1.ckpt"), "last-v1.ckpt"),
        (("checkpoint-12.pth.tar", "model_best.pth.tar", "last.pth.tar", "args.yaml"), "last.pth.tar"),
        (("checkpoint_100.tar", "checkpoint_1000.tar"), "checkpoint_1000.tar"),
        (("secu_cifar10_0200.pth.tar", "secu_cifar10_0390.pth.tar"), "secu_cifar10_0390.pth.tar"),
        (("model.safetensors", "pytorch_model.bin", "last.pt"), "model.safetensors"),
        (("checkpoint_last.pth.tar", "checkpoint_select.pth.tar"), "checkpoint_last.pth.tar"),
        (("checkpoints/last.ckpt", "checkpoints/epoch=1.ckpt", "exported_models/e_last.pt"), "checkpoints/last.ckpt"),
        (("exported_models/exported_last.pt", "train.log"), "exported_models/exported_last.pt"),
        (("91j4kng7/a-ep=1.ckpt", "91j4kng7/a-ep=2.ckpt", "91j4kng7/args.json"), "91j4kng7/a-ep=2.ckpt"),
        (("logs/version_0/checkpoints/epoch=0-step=2.ckpt",), "logs/version_0/checkpoints/epoch=0-step=2.ckpt"),
        (("only.pth", "notes.txt", ".cache/other.pth"), "only.pth"),
    ],
)
def test_latest_checkpoint_of_a_run_is_meant(tmp_path, names, meant):
    make(tmp_path, *names)
    assert locate(tmp_path) == tmp_path / meant


@pytest.mark.parametrize(
    "names",
    [
        ("a.pth", "b.pth"),
        ("a-ep=1.ckpt", "b-ep=2.ckpt"),
        ("checkpoint.pth.tar", "model.pth.tar"),
        ("run1/last.ckpt", "run2/last.ckpt"),
        ("checkpoint-1.pth", "checkpoint-2.pth.tar"),
        ("student_last.pth", "teacher_last.pth"),
    ],
)
def test_checkpoints_of_several_runs_are_left_to_the_user(tmp_path, names):
    make(tmp_path, *names)
    with pytest.raises(UserError, match=r"holds 2 checkpoints .*; name one of them"):
        locate(tmp_path)


def test_folder_with_an_empty_checkpoint_says_so(tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes"):
        locate(tmp_path)


def test_settings_of_the_run_are_found_beside_and_above(tmp_path):
    make(tmp_path, "checkpoints/last.ckpt")
    (tmp_path / "args.json").write_text(json.dumps({"method": "above"}))
    (tmp_path / "config.json").write_text("{}")  # of whatever lies in that folder, perhaps not this run
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    file = tmp_path / "checkpoints" / "last.ckpt"
    assert read_sidecars(file) == {"args.json": {"method": "above"}, "hparams.yaml": {"lr": 0.1}}
    (tmp_path / "checkpoints" / "args.json").write_text(json.dumps({"method": "beside"}))
    assert read_sidecars(file)["args.json"] == {"method": "beside"}


def test_objects_in_settings_are_read_as_plain_values(tmp_path):
    (tmp_path / "hparams.yaml").write_text(
        "args: !!python/object:argparse.Namespace\n  size: 32\n"
        f"run: !!python/object/apply:os.system\n- touch {tmp_path}/ran\n"
        "path: !!python/object/apply:pathlib.PosixPath [/, data]\nname: !!python/name:torch.relu ''\n"
    )
    found = read_sidecars(tmp_path / "last.ckpt")["hparams.yaml"]
    assert found["args"] == {"size": 32}
    assert found["path"] == ["/", "data"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["[" * 600, "{", "\x00", "a: [", "{[1]: 2}", "? {a: 1}\n: 2"])
def test_settings_that_cannot_be_read_are_left_out(tmp_path, text):
    for name in ("args.json", "args.yaml"):
        (tmp_path / name).write_text(text)
    assert "args.json" not in read_sidecars(tmp_path / "a.pth")
