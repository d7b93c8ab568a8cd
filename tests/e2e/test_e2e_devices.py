"""Every command and every variant on a GPU that this machine only pretends to have (see `PretendDevice`)."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cdc_plugin import CalibratedClusterer, export_model
from cdc_plugin.__main__ import main
from cdc_plugin.comparison.baselines import loop
from cdc_plugin.comparison.methods import METHODS
from cdc_plugin.training import review, train
from cdc_plugin.training.pretext.loop import Pretrainer
from cdc_plugin.training.refiner import Refiner
from tests.helpers.commands import read_table
from tests.helpers.pretend_device import PretendDevice

MOST_WAITS = 20  # of the host for the device, for one batch
SMALL = ["epochs=1", "batch_size=60", "sub_batch_size=30", "hidden=16", "--device", "cuda"]


@pytest.fixture
def device():
    with PretendDevice() as pretended:
        yield pretended
    assert not pretended.mixed, "tensors of two devices in one operation"
    assert not pretended.doubles, "float64, which not every device has"
    assert pretended.operations, "nothing was computed on the device"


@pytest.fixture
def waits(device, monkeypatch):
    """How often the host waited in each batch of CDC, of its opponents and of the pretext task."""
    counted = []

    def counting(work):
        def count(*arguments):
            before = sum(device.waits.values())
            result = work(*arguments)
            counted.append(sum(device.waits.values()) - before)
            return result

        return count

    def count_batches(*arguments):
        for batch in shuffle_batches(*arguments):
            before = sum(device.waits.values())
            yield batch
            counted.append(sum(device.waits.values()) - before)

    shuffle_batches = loop.shuffle_batches
    monkeypatch.setattr(Refiner, "train_batch", counting(Refiner.train_batch))
    monkeypatch.setattr(Pretrainer, "step", counting(Pretrainer.step))
    monkeypatch.setattr(loop, "shuffle_batches", count_batches)
    yield counted
    assert counted
    assert max(counted) <= MOST_WAITS, device.waits.most_common(12)


@pytest.fixture
def refine(tiny_checkpoint, archive, tmp_path):
    def run(*words: object, backbone=tiny_checkpoint, out="run"):
        arguments = ["refine", "--backbone", backbone, "--data", archive, "--clusters", 4, "--out", tmp_path / out]
        main([str(word) for word in (*arguments, *SMALL, *words)])
        return tmp_path / out

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["passes=full"],
        ["passes=fast"],
        ["heads=clu"],
        ["heads=clu+cal"],
        ["stop_gradient=false"],
        ["--freeze-backbone"],
        ["--init", "random"],
        ["precision=float16"],
        ["precision=bfloat16"],
        ["deterministic=true"],
        *(["selection=" + name] for name in ("confident-column", "fixed", "flexmatch+gsf", "freematch+ppf")),
        *(["calibration=" + name] for name in ("label-smoothing", "focal", "l1", "none")),
    ],
    ids=" ".join,
)
def test_every_variant_trains_on_the_device_and_seldom_waits_for_it(waits, refine, words):
    refine(*words)


def test_heads_start_again_on_the_device(waits, refine, monkeypatch):
    monkeypatch.setattr(review, "STUCK", 0.0)
    started = json.loads((refine("epochs=2", "rounds=2") / "report.json").read_text())["rounds"]
    assert [each["restarted"] for each in started] == [True, False]


def test_a_run_returns_to_its_first_features_on_the_device(waits, refine, monkeypatch):
    monkeypatch.setattr(review, "LEAST_IMAGES", 0)
    monkeypatch.setattr(review, "UNREADABLE", 9.0)
    monkeypatch.setattr(review, "round_epochs", lambda count: 1)
    assert json.loads((refine("epochs=2", "rounds=2") / "report.json").read_text())["returned_to_start"]


def test_features_of_others_are_clustered_on_the_device(waits, digits, tmp_path):
    np.save(tmp_path / "features.npy", digits[0].reshape(len(digits[0]), -1)[:, ::97].astype(np.float32))
    what, cuda = ["--features", tmp_path / "features.npy", "--out"], ["--device", "cuda"]
    for words in (
        ["refine", "--clusters", 4, *what, tmp_path / "run", *SMALL],
        ["predict", "--model", tmp_path / "run", *what, tmp_path / "a.csv", *cuda],
        ["evaluate", "--model", tmp_path / "run", *what, tmp_path / "evaluated", *cuda],
    ):
        main([str(word) for word in words])


def test_a_run_that_was_interrupted_goes_on_on_the_device(waits, refine, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(train, "detect_new", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(SystemExit):
            refine("epochs=2", "selection=freematch+gsf")
    main(["refine", "--resume", "--out", str(tmp_path / "run"), "--device", "cuda"])


def test_results_go_from_one_command_to_the_next_on_the_device(device, refine, archive, scan_checkpoint, tmp_path):
    run, cuda = refine(), ("--device", "cuda")
    for words in (
        ["predict", "--model", run, "--data", archive, "--out", tmp_path / "a", *cuda, "--audit", 9],
        ["predict", "--model", scan_checkpoint, "--data", archive, "--out", tmp_path / "b.csv", *cuda],
        ["evaluate", "--compare", run, scan_checkpoint, "--data", archive, "--out", tmp_path / "evaluated", *cuda],
        ["evaluate", "--model", run, "--ood", archive, "--out", tmp_path / "outside", *cuda],
        ["inspect", scan_checkpoint, "--data", archive, *cuda],
        ["export", "--model", run, "--out", tmp_path / "exported", "--to", "hub"],
    ):
        main([str(word) for word in words])
    on_device = CalibratedClusterer.from_pretrained(tmp_path / "exported", map_location="cuda")
    on_device.predict_proba(np.load(archive)["x"])
    export_model(on_device.clusterer, "hub", tmp_path / "from-the-device")
    refine("--init", "keep", backbone=run, out="kept")
    refine("--init", "keep", backbone=scan_checkpoint, out="kept-scan")


def test_opponents_and_references_train_on_the_device(waits, tiny_checkpoint, scan_checkpoint, archive, tmp_path):
    # Those that are CDC with other settings are the variants above.
    names = [m.name for m in METHODS.values() if m.name in ("cdc", "start") or m.training not in ("cdc", "old")]
    for out, backbone, methods in (("old", scan_checkpoint, ["old"]), ("grid", tiny_checkpoint, [*names, "scan2+cdc"])):
        words = ["compare", "--backbone", backbone, "--data", archive, "--clusters", 4, "--seeds", 1, "--jobs", 1]
        words += ["--methods", *methods, "--out", tmp_path / out, *SMALL, "sub_batch_size=5"]  # many to a batch
        main([str(word) for word in words])
    (row, *_) = (row for row in read_table(tmp_path / "grid" / "table.csv") if row["method"] == "cdc")
    assert float(row["gpu_memory"]) == 3  # megabytes


@pytest.mark.parametrize(("method", "optimizer"), [("mocov2", "sgd"), ("simsiam", "sgd"), ("byol", "lars")])
def test_pretraining_stays_on_the_device(waits, archive, tmp_path, method, optimizer):
    words = ["pretrain", "--data", archive, "--out", tmp_path / "pretrained", "--device", "cuda", "epochs=1"]
    main([*map(str, words), f"method={method}", f"optimizer={optimizer}", "batch_size=50", "arch=small"])


def test_apples_devices_need_no_later_torch(archive, scan_checkpoint, tiny_checkpoint, tmp_path):
    run, grid, apple = tmp_path / "run", tmp_path / "grid", ["--device", "mps"]
    few = [*SMALL, "--methods", "turtle,dcboost,secu", "--seeds", 1, "--jobs", 1]
    with PretendDevice("mps") as device:
        for words in (
            ["refine", "--backbone", tiny_checkpoint, "--data", archive, "--clusters", 4, "--out", run, *SMALL, *apple],
            ["compare", "--backbone", tiny_checkpoint, "--data", archive, "--clusters", 4, "--out", grid, *few, *apple],
            ["inspect", scan_checkpoint, "--data", archive, *apple],
            ["predict", "--model", run, "--data", archive, "--out", tmp_path / "a.csv", *apple],
        ):
            main([str(word) for word in words])
    assert device.operations
    assert not device.mixed + device.doubles + device.missing


def test_a_device_finds_what_it_is_there_for():
    with PretendDevice() as device:
        there = torch.ones(3, device="cuda")
        assert there.device == torch.device("cuda:0")
        assert (there + there.cpu()).sum().item() == 6
        there.double()
        there[torch.tensor([0])]
        with torch.autocast("cuda", torch.bfloat16):
            assert (there[None] @ there[:, None]).dtype == torch.bfloat16
    assert sum(device.mixed.values()) == 1
    assert sum(device.waits.values()) == 3  # to the CPU, the sum, an index on the CPU
    assert sum(device.doubles.values()) == 1
