"""Checkpoints that solo-learn and CDC's version of it wrote, against what their own code computes."""

import pytest
import torch

from cdc_plugin.checkpoints import Wanted, infer_input, load_checkpoint
from cdc_plugin.checkpoints.formats.solo_learn.args import infer_settings
from cdc_plugin.checkpoints.read import read_run_args
from cdc_plugin.errors import UserError
from tests.helpers.checkpoint_builders.genuine import assert_facts, assert_features, needs_shared, raw_images, unpack

pytestmark = needs_shared
CASES = [
    *("solo-byol-r18-224", "solo-mae-vit_tiny", "solo-mocov2plus-r18-cifar", "solo-simclr-wrn-adamw"),
    *("solo-simsiam-wrn", "solo102-mocov2plus-r18-cifar", "cdcfork-mocov2plus-r34-cifar"),
]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    _, record, expected = unpack(request.param, folder)
    return folder, record, expected


def test_run_folder_alone_gives_the_features_and_all_facts(case):
    folder, record, expected = case
    found = load_checkpoint(folder)
    assert (found.format, found.backbone.inferred) == ("solo-learn", ())
    assert found.backbone.input_size == record["input_size"]
    assert_facts(found, record, expected)


def test_file_without_its_arguments_gives_the_same_features_and_says_what_it_assumed(case, tmp_path):
    folder, record, expected = case
    alone = tmp_path / "alone.ckpt"
    alone.hardlink_to(folder / record["checkpoint"])
    found = load_checkpoint(alone)
    assert found.format == "solo-learn"
    assert_features(found.backbone, expected)
    assert {"mean", "std"} <= set(found.backbone.inferred)
    if found.backbone.spec.get("stem", {}).get("kernel") == 3:
        assert "stem.padding" in found.backbone.inferred
        settled = infer_input(found.backbone, raw_images(record, expected)).backbone
        assert settled.spec["stem"] == found.backbone.spec["stem"]


def test_moving_average_is_another_network_or_a_clear_refusal(case):
    folder, record, expected = case
    if "momentum branch" not in record["shrink"]:
        with pytest.raises(UserError, match="no moving average"):
            load_checkpoint(folder, wanted=Wanted(branch="momentum"))
        return
    found = load_checkpoint(folder, wanted=Wanted(branch="momentum"))
    with torch.no_grad():
        difference = found.backbone.eval()(expected["inputs"]) - expected["features"]
    difference = difference.norm(dim=1) / expected["features"].norm(dim=1)
    assert difference.mean() > 0.1  # the fixtures' averages were made to differ
    assert found.origin.why["branch"].startswith("momentum_")


def test_arguments_imply_data_and_clusters_without_a_look_at_the_weights(case, tmp_path):
    folder, record, *_ = case
    (tmp_path / "args.json").write_text((folder / "args.json").read_text())
    fields = infer_settings(*read_run_args(tmp_path / record["checkpoint"]))
    expected = {"clusters": 3} if "custom" in record["checkpoint"] else {"data": "cifar10", "clusters": 10}
    assert fields == expected
