"""Which of a run's checkpoints is meant; what opens safely, what is refused, and in which words."""

import argparse
import json
import lzma
import os
import re
import struct
import tarfile
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cdc_plugin.checkpoints.read import find_state_dict, locate, read_checkpoint, read_sidecars
from cdc_plugin.checkpoints.weights import strip_prefix
from cdc_plugin.errors import UserError

WEIGHTS = {"conv.weight": torch.arange(4.0), "conv.bias": torch.ones(1)}


class RunsACommand:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def refused(path):
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_safetensors_and_the_file_beside_it_are_read(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "resnet18"}')
    (tmp_path / "args.json").write_text("not json")
    checkpoint = read_checkpoint(tmp_path)
    assert set(checkpoint.state) == set(WEIGHTS)
    assert checkpoint.sidecar == {"config.json": {"architecture": "resnet18"}}


@pytest.mark.parametrize(
    "payload",
    [
        *({name: WEIGHTS, "epoch": 3, "optimizer": {"state": {}}} for name in ("state_dict", "teacher", "my_network")),
        {"temperature": torch.ones(1), "state_dict": WEIGHTS, "epoch": 1, "metric": 0.5},
        *({name: {"a": torch.ones(1)}, "state_dict": WEIGHTS} for name in ("state_dict_ema", "model_ema")),
        WEIGHTS | {3: torch.ones(1)},
    ],
)
def test_weights_are_found_among_stray_tensors_averages_and_keys_that_are_no_names(payload):
    assert find_state_dict(payload) == WEIGHTS


def test_names_of_weights_are_not_longer_than_those_of_any_network():
    wrapped = {f"{'module.' * 20_000}{number}": torch.ones(1) for number in range(100)}
    with pytest.raises(UserError, match="longer than 500 letters"):  # at once, not after 20,000 copies
        find_state_dict(wrapped)


def test_prefixes_go_only_if_every_key_has_them_and_letters_stay():
    wrapped = {f"module._orig_mod.{key}": value for key, value in {"model.w": 1, "dule.w": 2}.items()}
    wrapped = {key: torch.tensor(value) for key, value in wrapped.items()}
    assert list(find_state_dict(wrapped)) == ["model.w", "dule.w"]
    mixed = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert list(find_state_dict(mixed)) == ["module.a", "b"]
    assert strip_prefix({"a.a.b": 1, "c": 2}, "a.") == {"a.b": 1}


def test_file_that_would_run_a_command_is_refused_and_does_not_run(tmp_path):
    torch.save({"state_dict": WEIGHTS, "extra": RunsACommand(tmp_path / "ran")}, tmp_path / "a.pth")
    message = refused(tmp_path / "a.pth")
    assert "system" in message
    assert "refused" in message
    assert not (tmp_path / "ran").exists()


def test_pickled_network_is_refused_with_the_advice_to_save_a_state_dict(tmp_path):
    torch.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "a.pth")
    message = refused(tmp_path / "a.pth")
    for words in ("network (torch.nn.modules.container.Sequential)", "state_dict()", "trust_checkpoint=True"):
        assert words in message
    torch.save({"model": nn.Linear(2, 2), "epoch": 3}, tmp_path / "b.pth")
    assert "whole pickled network" in refused(tmp_path / "b.pth")


def test_pickled_network_opens_for_a_user_who_trusts_it_and_only_then(tmp_path):
    network = nn.Sequential(nn.Linear(2, 2))
    for payload in (network, {"model": network, "epoch": 3}):
        torch.save(payload, tmp_path / "a.pth")
        checkpoint = read_checkpoint(tmp_path / "a.pth", trust=True)
        assert torch.equal(checkpoint.state["0.weight"], network[0].weight)
    assert isinstance(checkpoint.payload["model"], nn.Module)


def test_trust_runs_no_code_where_none_is_needed(tmp_path, monkeypatch):
    def never(*_arguments, **_options):
        raise AssertionError("opened unsafely")

    torch.save({"state_dict": WEIGHTS, "args": argparse.Namespace(a=1)}, tmp_path / "a.pth")
    monkeypatch.setattr(torch, "load", never)
    assert set(read_checkpoint(tmp_path / "a.pth", trust=True).state) == set(WEIGHTS)


def test_trusted_file_whose_classes_are_gone_is_one_line(tmp_path):
    (tmp_path / "a.pth").write_bytes(b"\x80\x02cgone.package\nrun\n)R.")
    with pytest.raises(UserError, match="although it is trusted") as caught:
        read_checkpoint(tmp_path / "a.pth", trust=True)
    assert "\n" not in str(caught.value)


def test_network_among_the_settings_does_not_hide_the_weights(tmp_path):
    torch.save({"state_dict": WEIGHTS, "hyper_parameters": {"loss": nn.CosineSimilarity()}}, tmp_path / "a.pth")
    assert set(read_checkpoint(tmp_path / "a.pth").state) == set(WEIGHTS)


def test_missing_and_empty_checkpoints_are_refused_with_their_neighbours(tmp_path):
    assert "nothing" in refused(tmp_path)
    (tmp_path / "last.ckpt").write_bytes(b"")
    assert "0 bytes" in refused(tmp_path)
    torch.save({"epoch": 3}, tmp_path / "resnet18.pth")
    assert "found none (it holds: epoch)" in refused(tmp_path / "resnet18.pth")
    assert "resnet18.pth" in refused(tmp_path / "resnet19.pth")
    assert "nor a folder" in refused(tmp_path / "no" / "a.pth")


def test_files_that_are_no_checkpoints_are_told_apart(tmp_path):
    torch.save(WEIGHTS, tmp_path / "whole.pth")
    torch.save(WEIGHTS, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("readme", "x")
    expected = {
        "empty.pth": (b"", "is empty"),
        "text.pth": (b"<html>404</html>", "is text"),
        "pointer.pth": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        "cut.pth": ((tmp_path / "whole.pth").read_bytes()[:700], "damaged or cut short (700 bytes)"),
        "cut_legacy.pth": ((tmp_path / "legacy.pth").read_bytes()[:-8], "damaged"),
        "cut.safetensors": (b"\x40\x00\x00\x00\x00\x00\x00\x00{", "safetensors"),
        "noise.pth": (bytes(range(256)), "something else"),
        "archive.zip": ((tmp_path / "archive.zip").read_bytes(), "zip archive"),
        "archive.tar": (tarfile.TarInfo("a.pth").tobuf() + bytes(1024), "is a tar archive"),
        "endless.pth": (lzma.compress(bytes(1 << 20)), "is compressed"),  # it is not unpacked to see what it is
    }
    for name, (content, words) in expected.items():
        (tmp_path / name).write_bytes(content)
        assert words in refused(tmp_path / name), name


def test_containers_are_told_by_content_not_by_name(tmp_path):
    save_file(WEIGHTS, tmp_path / "a.pth")
    assert set(read_checkpoint(tmp_path / "a.pth").state) == set(WEIGHTS)
    torch.save(WEIGHTS, tmp_path / "b.safetensors")
    assert set(read_checkpoint(tmp_path / "b.safetensors").state) == set(WEIGHTS)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("conv.weight", torch.tensor([1.0, -2e13]), "impossible values in conv.weight"),
        ("conv.weight", torch.tensor([1.0, float("-inf")]), "infinite values in 1 of 2 tensors, as conv.weight"),
        ("bn.running_var", torch.tensor([1.0, -0.5]), "impossible values in bn.running_var"),
        ("conv.weight", torch.tensor([float("nan")]).half(), "NaN or infinite"),
    ],
)
def test_values_that_no_network_has_are_refused(tmp_path, name, value, words):
    torch.save({name: value, "b": torch.ones(1)}, tmp_path / "a.pth")
    assert words in refused(tmp_path / "a.pth")


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
        (("model.safetensors", "model.json", "export/model.safetensors", "export/model.json"), "model.safetensors"),
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
        ("backbone.pt", "new/model.safetensors", "new/model.json"),
        ("cells/set/cdc/seed0/model.safetensors", "cells/set/scan/seed0/last.pt"),
        ("checkpoints/last.ckpt", "run/model.safetensors", "run/model.json"),
        ("checkpoint-1.pth", "checkpoint-2.pth.tar"),
        ("student_last.pth", "teacher_last.pth"),
    ],
)
def test_checkpoints_of_several_runs_are_left_to_the_user(tmp_path, names):
    make(tmp_path, *names)
    with pytest.raises(UserError, match=r"holds 2 (checkpoints .*; name|runs; give) one of them"):
        locate(tmp_path)


def test_runs_in_a_folder_are_listed_newest_first_and_each_once(tmp_path):
    for age in range(7):
        make(tmp_path, f"run{age}/model.safetensors", f"run{age}/model.json")
        os.utime(tmp_path / f"run{age}" / "model.safetensors", (1e9 - age, 1e9 - age))
    make(tmp_path, "run1/last.pt", "run1/config.yaml")
    (tmp_path / "run1" / "model.json").unlink()
    (tmp_path / "latest").symlink_to("run0")
    with pytest.raises(UserError, match=r"holds 7 runs.*and 2 more") as error:
        locate(tmp_path)
    assert re.findall(r"run\d[^,]*", str(error.value))[:3] == ["run1 (unfinished)", "run0", "run2"]


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


MERGED = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 41))
NESTED = MERGED.replace("{<<: [", "[").replace("]}", "]")
BRACKETS = "[" * 50_000 + "]" * 40_000
TAGS = ("!!bool maybe", "!!timestamp never", "!!float 1:" + "1:" * 900 + "1.5")


@pytest.mark.parametrize(
    "text", ["[" * 99_999, "{", "\x00", "a: [", "{[1]: 2}", "? {a: 1}\n: 2", MERGED, NESTED, BRACKETS, "&a [*a]", *TAGS]
)
def test_settings_that_cannot_be_read_are_left_out(tmp_path, text):
    for name in ("args.json", "args.yaml"):
        (tmp_path / name).write_text(text)
    told: list[str] = []
    assert read_sidecars(tmp_path / "a.pth", told.append) == {}
    assert [line.partition(" cannot")[0] for line in told] == [str(tmp_path / f"args.{s}") for s in ("json", "yaml")]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}, "float4.*expected float32"),
        (
            {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(60_000)},
            "60,000 tensors; expected the at most",
        ),
    ],
    ids=["four bits", "too many"],
)
def test_safetensors_that_hold_no_network_are_refused_in_one_line(tmp_path, tensors, words):
    header = json.dumps(tensors).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 if "a.weight" in tensors else 0))
    with pytest.raises(UserError, match=words):
        read_checkpoint(path)
