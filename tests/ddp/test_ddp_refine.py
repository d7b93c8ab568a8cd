"""Several processes of ``torchrun`` train one network: they agree with each other; one of them writes and prints."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cdc_plugin.pipeline import refine
from tests.helpers.fault_runs import FILES, assert_same_results, count_epochs, list_names
from tests.helpers.torchrun import torchrun

TABLE = "in %, before -> after"  # the first line of what a run prints in the end
SETTINGS = {"hidden": 16, "batch_size": 75, "sub_batch_size": 38, "mini_clusters": 12, "clusters": 5, "epochs": 3}
USUAL = [*(f"{name}={value}" for name, value in SETTINGS.items()), "device=cpu"]
USUAL += ["augment.flip=false", "augment.crop_scale=0.8", "sync_batchnorm=true"]
FEW = [*USUAL, "clusters=2", "batch_size=40", "sub_batch_size=20"]
# ``cdc-refine`` several times, each given as the name of its folder and its words, in which RANK stands for the number
# of the process. Every process saves what was selected in every batch and how each run has ended. "stopped" gets
# SIGTERM in its 4th batch; "resumed" continues a copy of it.
DRIVER = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from cdc_plugin.cli.refine import refine_command
from cdc_plugin.training.refiner import Refiner

out, runs = sys.argv[1], json.loads(sys.argv[2])
rank, compute, masks, codes = os.environ["RANK"], Refiner.compute_targets, [], {}

def computing(*arguments):
    targets = compute(*arguments)
    masks.append(targets.selection.mask.clone())
    if name == "stopped" and rank == "1" and len(masks) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return targets

Refiner.compute_targets = computing
for name, words in runs.items():
    codes[name] = 0
    if name == "resumed" and rank == "0":
        shutil.copytree(f"{out}/stopped", f"{out}/resumed")
    try:
        refine_command([*(word.replace("RANK", rank) for word in words), "--out", f"{out}/{name}"])
    except SystemExit as end:
        codes[name] = end.code
    torch.save(list(masks), f"{out}/{name}.{rank}.masks")
    masks.clear()
    if not dist.is_initialized():  # the first run has joined and left by itself; the others find us joined
        threads = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
        assert not [name for name in threads if "gloo" in name], "the group has ended, its threads have not"
        dist.init_process_group("gloo")
with open(f"{out}/codes.{rank}", "w") as file:
    json.dump(codes, file)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Inputs:
    """A tiny checkpoint, and a folder with sets of images."""

    checkpoint: Path
    folder: Path

    def words(self, settings: list[str], data: str = "151.npz") -> list[str]:
        """Return the arguments of a run without --out."""
        return ["--backbone", str(self.checkpoint), "--data", str(self.folder / data), *settings]


@dataclass(frozen=True)
class Ended:
    """Runs of several processes: the parent of their folders, and what was printed."""

    folder: Path
    size: int
    out: str
    errors: str

    def codes(self, name: str) -> set[int]:
        """Return the exit codes of a run's processes."""
        return {json.loads((self.folder / f"codes.{rank}").read_text())[name] for rank in range(self.size)}

    def masks(self, name: str) -> list[torch.Tensor]:
        """Return which images were selected in every batch, on which all processes must agree."""
        ranks = [torch.load(self.folder / f"{name}.{rank}.masks", weights_only=True) for rank in range(self.size)]
        assert {len(masks) for masks in ranks} == {len(ranks[0])}
        assert all(torch.equal(mask, masks[0]) for masks in zip(*ranks, strict=True) for mask in masks)
        return ranks[0]


def drive(folder: Path, processes: int, runs: dict[str, list[str]]) -> Ended:
    (folder / "driver.py").write_text(DRIVER)
    words = [folder / "driver.py", folder, json.dumps(runs)]
    done = torchrun(processes, *words, CDC_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return Ended(folder, processes, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, digits, tiny_checkpoint, write_images) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    for count in (151, 40):
        np.savez(folder / f"{count}.npz", x=digits[0][:count], y=digits[1][:count])
    for rank in range(2):
        write_images(folder / f"unequal-{rank}", digits[0][rank : 40 + rank])
        write_images(folder / f"unreadable-{rank}", digits[0][:40])
    (folder / "unreadable-1" / "image 007.png").write_bytes(b"x")
    return Inputs(tiny_checkpoint, folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs) -> Ended:
    runs = {
        "usual": inputs.words(USUAL),
        "frozen": inputs.words([*USUAL, "freeze_backbone=true"]),
        "rounds": inputs.words([*USUAL, "epochs=4", "rounds=2"]),
        "stopped": inputs.words(USUAL),
        "resumed": ["--resume"],
        "missing": inputs.words(USUAL, "nowhere.npz"),
        "crowded": inputs.words([*FEW, "sub_batch_size=3"], "40.npz"),
        "unequal": inputs.words(FEW, "unequal-RANK"),
        "unreadable": inputs.words(FEW, "unreadable-RANK"),
    }
    return drive(tmp_path_factory.mktemp("two"), 2, runs)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs) -> Ended:
    runs = {"usual": inputs.words(USUAL), "few": [*inputs.words(FEW, "40.npz"), "--quiet"]}
    return drive(tmp_path_factory.mktemp("three"), 3, runs)


@pytest.fixture(params=["two", "three"])
def several(request: pytest.FixtureRequest) -> Ended:
    return request.getfixturevalue(request.param)


def count_predictions(folder: Path) -> int:
    return len((folder / "predictions.csv").read_text().splitlines()) - 1


def test_all_processes_select_the_same_images_and_one_writes_and_prints(several):
    masks = several.masks("usual")
    assert [len(mask) for mask in masks] in ([75, 76] * 3, [76, 75] * 3)
    assert 0 < sum(int(mask.sum()) for mask in masks) < 3 * 151
    folder = several.folder / "usual"
    assert several.codes("usual") == {0}
    assert list_names(folder) == FILES
    assert count_epochs(folder) == 3
    assert count_predictions(folder) == 151
    assert (folder / "train.log").read_text().count("epoch 3/3") == 1
    finished = list(several.folder.glob("*/report.json"))
    assert several.out.count(TABLE) == len(finished) == {2: 4, 3: 2}[several.size]


def test_fewer_images_than_three_processes_could_share_are_clustered(three):
    assert three.codes("few") == {0}  # though one process has no image to predict in the end
    assert list_names(three.folder / "few") == FILES
    assert count_predictions(three.folder / "few") == 40


def test_a_frozen_backbone_keeps_its_weights_and_the_heads_are_trained(two, inputs):
    assert two.codes("frozen") == {0}
    assert list_names(two.folder / "frozen") == FILES
    assert count_epochs(two.folder / "frozen") == 3
    weights, start = load_file(two.folder / "frozen" / "model.safetensors"), torch.load(inputs.checkpoint)
    assert torch.equal(weights["backbone.conv1.weight"], start["conv1.weight"])
    report = json.loads((two.folder / "frozen" / "report.json").read_text())
    assert report["after"]["calibration_head"] != report["before"]["calibration_head"]


def test_all_processes_review_a_round_alike(two):
    assert two.codes("rounds") == {0}
    two.masks("rounds")  # they agree in every batch after the heads have started again
    first, last = json.loads((two.folder / "rounds" / "report.json").read_text())["rounds"]
    assert (first["epoch"], last["epoch"]) == (2, 4)
    assert first["restarted"]  # the network is random


def test_sigterm_in_one_process_saves_the_run_which_resumes_without_loss(two, inputs, tmp_path):
    assert two.codes("stopped") == {143}
    assert two.errors.count("stopped by SIGTERM") == 1
    assert count_epochs(two.folder / "stopped") == 1
    assert len(two.masks("stopped")) == 4  # in the second epoch, which has finished its batch
    assert len(two.masks("resumed")) == 2  # no batch is trained again
    assert_same_results(two.folder / "resumed", two.folder / "usual")
    alone = shutil.copytree(two.folder / "stopped", tmp_path / "alone")
    refine(inputs.checkpoint, inputs.folder / "151.npz", out=alone, resume=True, device="cpu")
    assert list_names(alone) == FILES
    assert count_epochs(alone) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "nowhere.npz"),
        ("crowded", "sub_batch_size=3 .*2 processes"),
        ("unequal", r"process 1 .*other images.*40 readable.* 40\b"),
        ("unreadable", r"process 1 .*other images.*39 readable.* 40\b"),
    ],
)
def test_a_mistake_ends_all_processes_and_is_reported_once(two, inputs, name, message):
    assert two.codes(name) == {2}
    assert "Traceback" not in two.errors
    lines = [line for line in two.errors.splitlines() if "cdc-refine: error: " in line]
    assert len(lines) == 4  # of four runs
    assert len([line for line in lines if re.search(message, line)]) == 1
    assert not any("checkpoint" in line or str(inputs.checkpoint) in line for line in lines)
    # A log alone is no result: the next run may use the folder.
    assert not (two.folder / name).exists() or list_names(two.folder / name) == {"train.log"}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_runs_in_any_number_of_processes(tmp_path, inputs, processes):
    done = torchrun(processes, "-m", "cdc_plugin", *inputs.words(USUAL), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(TABLE) == 1
    assert list_names(tmp_path / "run") == FILES
