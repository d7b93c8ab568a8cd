"""Several processes of ``torchrun`` train what one process trains, bit for bit; one of them writes and speaks."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cdc_plugin.training.inputs import configure
from safetensors.torch import load_file

from cdc_plugin.pipeline import run
from cdc_plugin.training.refiner import BatchTargets, Refiner
from tests.helpers.torchrun import Watch, torchrun

FILES = {"config.yaml", "last.pt", "metrics.jsonl", "train.log", "predictions.csv", "report.json"}
FILES |= {"report.html", "model.safetensors", "model.json"}
TABLE = "in %, before -> after"  # what a run prints in the end begins with this
USUAL = ["hidden=16", "batch_size=75", "sub_batch_size=38", "mini_clusters=12", "clusters=5", "epochs=3", "device=cpu"]
USUAL += ["augment.flip=false", "augment.crop_scale=0.8", "sync_batchnorm=true"]
FEW = [*USUAL, "clusters=2", "batch_size=40", "sub_batch_size=20"]
# ``-m cdc_plugin`` for several runs one after another, each given as the name of its folder and its words. What was
# selected in every batch and how each run has ended is saved by every process. "stopped" gets SIGTERM in its 4th batch.
DRIVER = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from cdc_plugin.__main__ import choose
from cdc_plugin.training.refiner import Refiner

out, runs = sys.argv[1], json.loads(sys.argv[2])
rank, judge, masks, codes = os.environ["RANK"], Refiner.judge, [], {}

def judging(*arguments):
    found = judge(*arguments)
    masks.append(found.selection.mask.clone())
    if name == "stopped" and rank == "1" and len(masks) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return found

Refiner.judge = judging
for name, words in runs.items():
    codes[name] = 0
    command, rest = choose(words)
    try:
        command([*rest, "--out", f"{out}/{name}"])
    except SystemExit as end:
        codes[name] = end.code
    torch.save(list(masks), f"{out}/{name}.{rank}.masks")
    masks.clear()
    if not dist.is_initialized():  # the first run has joined and left by itself; the others find us joined
        dist.init_process_group("gloo")
dist.destroy_process_group()
with open(f"{out}/codes.{rank}", "w") as file:
    json.dump(codes, file)
"""


@dataclass(frozen=True)
class Material:
    """A tiny network, and digits."""

    backbone: Path
    folder: Path

    def words(self, words: list[str], data: str = "151.npz") -> list[str]:
        """The words of a command but for --out."""
        return ["--backbone", str(self.backbone), "--data", str(self.folder / data), *words]


@dataclass(frozen=True)
class Ended:
    """Runs of several processes: the folder that theirs are in, and what was printed."""

    folder: Path
    code: int
    out: str
    errors: str
    size: int

    def codes(self, name: str) -> list[int]:
        return [json.loads((self.folder / f"codes.{rank}").read_text())[name] for rank in range(self.size)]

    def masks(self, name: str) -> list[list[torch.Tensor]]:
        return [torch.load(self.folder / f"{name}.{rank}.masks", weights_only=True) for rank in range(self.size)]


def launched(folder: Path, processes: int, *words: object, watch: Watch | None = None) -> Ended:
    """So many processes, with a cache of their own."""
    folder.mkdir(exist_ok=True)
    ended = torchrun(processes, *words, watch=watch, CDC_CACHE=str(folder / "cache"))
    return Ended(folder, ended.returncode, ended.stdout, ended.stderr, processes)


def driven(folder: Path, processes: int, runs: dict[str, list[str]]) -> Ended:
    folder.mkdir()
    (folder / "driver.py").write_text(DRIVER)
    return launched(folder, processes, folder / "driver.py", folder, json.dumps(runs))


def alone(folder: Path, words: list[str], resume: bool = False) -> list[torch.Tensor]:
    """The same run in this one process; returns what was selected in every batch."""
    masks: list[torch.Tensor] = []
    judge = Refiner.judge

    def judging(*arguments: Any) -> BatchTargets:
        found = judge(*arguments)
        masks.append(found.selection.mask.clone())
        return found

    flags = {"backbone": words[1], "data": words[3], "out": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDC_CACHE", str(folder.parent / "cache of one"))
        patch.setattr(Refiner, "judge", judging)
        run(configure(None, flags, words[4:]), resume=resume)
    return masks


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory, digits, tiny_checkpoint) -> Material:
    folder = tmp_path_factory.mktemp("material")
    for count in (151, 40):
        np.savez(folder / f"{count}.npz", x=digits[0][:count], y=digits[1][:count])
    return Material(tiny_checkpoint, folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Path:
    """The folder of the runs of one process."""
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def usual(one: Path, material: Material) -> list[torch.Tensor]:
    """One process's selections in ``one / "usual"``."""
    return alone(one / "usual", material.words(USUAL))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Ended:
    runs = {
        "usual": material.words(USUAL),
        "frozen": material.words([*USUAL, "freeze_backbone=true"]),
        "apart": material.words([*USUAL, "sync_batchnorm=false"]),
        "mistaken": material.words(USUAL, "nowhere.npz"),
        "stopped": material.words(USUAL),
    }
    ended = driven(tmp_path_factory.mktemp("two") / "out", 2, runs)
    assert ended.code == 0, ended.errors
    return ended


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Ended:
    runs = {"usual": material.words(USUAL), "few": [*material.words(FEW, "40.npz"), "--quiet"]}
    ended = driven(tmp_path_factory.mktemp("three") / "out", 3, runs)
    assert ended.code == 0, ended.errors
    return ended


@pytest.fixture(params=[2, 3])
def several(request: pytest.FixtureRequest) -> Ended:
    return request.getfixturevalue({2: "two", 3: "three"}[request.param])


def history(folder: Path) -> list[dict[str, Any]]:
    """Records of all epochs, but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def report(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "report.json").read_text()), "seconds": None}


def assert_same_weights(folder: Path, other: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, other))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def assert_same_results(folder: Path, other: Path) -> None:
    """All that two runs leave is equal, but for times."""
    assert {path.name for path in folder.iterdir()} == FILES == {path.name for path in other.iterdir()}
    assert history(folder) == history(other)
    assert_same_weights(folder, other)
    assert (folder / "predictions.csv").read_bytes() == (other / "predictions.csv").read_bytes()
    assert report(folder) == report(other)


def test_every_process_selects_the_images_that_one_process_selects(usual, several):
    assert len(usual) == 3 * 2  # two batches an epoch
    assert {len(mask) for mask in usual} == {75, 76}
    assert 0 < sum(int(mask.sum()) for mask in usual) < 3 * 151
    for masks in several.masks("usual"):
        assert len(masks) == len(usual)
        assert all(torch.equal(*pair) for pair in zip(masks, usual, strict=True))


def test_several_processes_train_the_weights_of_one_bit_for_bit(usual, one, several):
    folder = several.folder / "usual"
    assert history(folder) == history(one / "usual")
    assert_same_weights(folder, one / "usual")
    assert report(folder) == report(one / "usual")


def test_the_predictions_of_two_processes_are_those_of_one(usual, one, two):
    assert_same_results(two.folder / "usual", one / "usual")


def test_the_predictions_of_three_processes_are_those_of_one(usual, one, three):
    assert_same_results(three.folder / "usual", one / "usual")


def test_one_process_writes_and_speaks(two, three):
    assert two.out.count(TABLE) == 3  # of five runs, three were finished
    assert three.out.count(TABLE) == 2
    assert three.errors.count("epoch 3/3: clustering loss") == 2
    log = (three.folder / "usual" / "train.log").read_text()
    assert log.count("epoch 3/3") == 1
    assert {path.name for path in (three.folder / "usual").iterdir()} == FILES


def test_a_frozen_backbone_gives_the_same_in_two_processes(one, two, material):
    alone(one / "frozen", material.words([*USUAL, "freeze_backbone=true"]))
    assert two.codes("frozen") == [0, 0]
    assert_same_results(two.folder / "frozen", one / "frozen")


def test_processes_with_statistics_of_their_own_train_another_network(usual, one, two):
    assert two.codes("apart") == [0, 0]
    ours, theirs = (load_file(path / "model.safetensors") for path in (two.folder / "apart", one / "usual"))
    assert ours.keys() == theirs.keys()
    assert not torch.equal(ours["backbone.conv1.weight"], theirs["backbone.conv1.weight"])
    assert all(tensor.isfinite().all() for tensor in ours.values())
    assert {path.name for path in (two.folder / "apart").iterdir()} == FILES
    assert len((two.folder / "apart" / "predictions.csv").read_text().splitlines()) == 152
    # Both processes have selected the same all the same: features are gathered.
    first, second = two.masks("apart")
    assert len(first) == 6
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_run_of_two_processes_that_one_was_told_to_end_is_gone_on_with_by_one(usual, one, two, material):
    folder = two.folder / "stopped"
    assert two.codes("stopped") == [143, 143]
    assert two.errors.count("cdc-refine: stopped by SIGTERM; finished epochs are kept") == 1
    assert len(history(folder)) == 1  # it was told so in the second epoch, which has finished its batch
    assert [len(masks) for masks in two.masks("stopped")] == [4, 4]
    masks = alone(folder, material.words(USUAL), resume=True)
    assert len(masks) <= 2  # no batch is trained again
    assert_same_results(folder, one / "usual")


def left_in(folder: Path) -> set[str]:
    """What a run that could not begin has left; its log is taken for nothing by the next run."""
    return {path.name for path in folder.iterdir()} - {"train.log"} if folder.exists() else set()


def test_a_mistake_ends_all_processes_and_leaves_no_results(two):
    assert two.codes("mistaken") == [2, 2]
    assert "cdc-refine: error: " in two.errors
    assert "Traceback" not in two.errors
    assert left_in(two.folder / "mistaken") == set()


def test_a_mistake_is_told_once(two):
    assert two.errors.count("cdc-refine: error: ") == 1


def test_torchrun_ends_on_a_mistake_and_nobody_is_left(tmp_path, material):
    words = material.words(USUAL, "nowhere.npz")
    ended = launched(tmp_path / "out", 2, "-m", "cdc_plugin", *words, "--out", tmp_path / "out" / "run")
    assert ended.code != 0
    assert "exitcode  : 2" in ended.errors
    assert "cdc-refine: error: " in ended.errors
    assert "cdc_plugin/" not in ended.errors  # no traceback of ours
    assert ended.out == ""
    assert left_in(tmp_path / "out" / "run") == set()


@pytest.fixture(scope="module")
def few(one: Path, material: Material) -> Path:
    """40 images in one process; of three processes, one has no image to look at in the end."""
    alone(one / "few", material.words(FEW, "40.npz"))
    return one / "few"


def test_fewer_images_than_processes_could_share_are_no_trouble(few, three):
    folder = three.folder / "few"
    assert three.codes("few") == [0, 0, 0]
    assert history(folder) == history(few)
    assert_same_weights(folder, few)
    assert {path.name for path in folder.iterdir()} == FILES


def test_fewer_images_than_processes_could_share_are_predicted_the_same(few, three):
    assert_same_results(three.folder / "few", few)


@pytest.mark.slow
def test_the_command_in_one_process_of_torchrun_and_in_two_gives_what_one_process_gives(usual, one, tmp_path, material):
    for processes in (1, 2):
        folder = tmp_path / f"{processes}"
        words = material.words(USUAL)
        ended = launched(folder, processes, "-m", "cdc_plugin", *words, "--out", folder / "run")
        assert ended.code == 0, ended.errors
        assert ended.out.count(TABLE) == 1
        assert_same_results(folder / "run", one / "usual")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_whose_torchrun_is_ended_is_gone_on_with_by_another_number_of_processes(
    usual, one, tmp_path, material, number
):
    folder = tmp_path / "two"
    out = folder / "run"

    def tell(process: subprocess.Popen[str]) -> None:
        while process.poll() is None and not (out / "metrics.jsonl").is_file():
            time.sleep(0.02)
        while process.poll() is None and not history(out):
            time.sleep(0.02)
        process.send_signal(number)

    ended = launched(folder, 2, "-m", "cdc_plugin", *material.words(USUAL), "--out", out, watch=tell)
    assert ended.code != 0
    assert 1 <= len(history(out)) <= 3
    alone(out, material.words(USUAL), resume=True)
    assert_same_results(out, one / "usual")
