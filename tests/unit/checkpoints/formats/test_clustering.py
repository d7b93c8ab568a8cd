"""Choices and refusals of the formats of clustering networks; features and logits are in tests/interop/test_layouts."""

import re

import numpy as np
import pytest
import torch

from cdc_plugin.checkpoints import Wanted, load_checkpoint, read_checkpoint
from cdc_plugin.checkpoints.formats import formats
from cdc_plugin.checkpoints.read import whole_number
from cdc_plugin.errors import CheckpointError, UserError
from tests.helpers.checkpoint_builders import CIFAR20, IMAGENET
from tests.helpers.checkpoint_builders.clustering import (
    cdc_payload,
    moco_published,
    scan_state,
    secu_payload,
    spice_moco,
    spice_self_state,
    spice_semi_payload,
    wide_resnet,
    written,
)
from tests.helpers.checkpoint_builders.networks import CIFAR_STEM, STL_STEM, WIDTHS, computed, resnet

FEATURES = torch.rand(4, WIDTHS[3], generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def small():
    return resnet(CIFAR_STEM, 32)


def assert_same_logits(loaded, head):
    torch.testing.assert_close(computed(*loaded.heads, given=FEATURES), computed(head, given=FEATURES))


@pytest.mark.parametrize("make", [scan_state, spice_self_state])
def test_heads_that_no_one_ranks_are_left_to_the_user(tmp_path, small, make):
    state, heads = make(small, heads=3)
    path = written(tmp_path, {"state_dict": state, "epoch": 2})
    loaded = load_checkpoint(path)
    assert (loaded.heads, loaded.origin.epoch) == ((), 2)
    assert "head=0 to 2" in loaded.origin.why["head"]
    assert_same_logits(load_checkpoint(path, wanted=Wanted(head=1)), heads[1])
    with pytest.raises(CheckpointError, match="has 3 clustering heads, 3"):
        load_checkpoint(path, wanted=Wanted(head=3))


def test_path_decides_between_data_sets_that_fit_alike(tmp_path, small):
    folder = tmp_path / "results" / "cifar-100" / "pretext"
    folder.mkdir(parents=True)
    assert load_checkpoint(written(folder, scan_state(small)[0])).backbone.mean.tolist() == pytest.approx(CIFAR20[0])


def test_secu_head_is_that_of_the_wanted_number_of_clusters_or_the_first(tmp_path, small):
    payload, heads = secu_payload(small, [10, 20, 30], 500)
    path = written(tmp_path, payload)
    for wanted, head in ((Wanted(), 0), (Wanted(clusters=20), 1), (Wanted(head=2, clusters=20), 2)):
        assert_same_logits(load_checkpoint(path, wanted=wanted), heads[head])
    assert "size constraint" in load_checkpoint(path).origin.writer


@pytest.mark.parametrize(("count", "statistics", "size"), [(50_000, CIFAR20, 32), (105_000, IMAGENET, 96)])
def test_secu_data_set_is_recognised_by_the_number_of_labels_it_keeps(tmp_path, small, count, statistics, size):
    backbone = load_checkpoint(written(tmp_path, secu_payload(small, [20, 40], count)[0])).backbone
    assert backbone.std.tolist() == pytest.approx(statistics[1])
    assert backbone.input_size == size
    assert "stem.pool" not in backbone.inferred


@pytest.mark.parametrize("change", [("center_0", (11, 10)), ("center_0", (12, 9)), ("center_1", (12,))])
def test_secu_centres_that_do_not_fit_its_projection_are_refused(tmp_path, small, change):
    name, shape = change
    payload, _ = secu_payload(small, [10, 20], 50)
    payload["state_dict"][f"module.{name}"] = torch.ones(shape)
    with pytest.raises(CheckpointError, match=f"{name} of .* copy it again"):
        load_checkpoint(written(tmp_path, payload))


@pytest.mark.parametrize(("size", "clusters"), [(32, 20), (32, 10)])
def test_spice_network_with_a_pool_for_all_data_sets_is_fed_at_the_right_size(tmp_path, size, clusters):
    state, _ = spice_self_state(resnet(STL_STEM, size, (3, 4, 6, 3)), heads=1, clusters=clusters, shortcut=False)
    assert load_checkpoint(written(tmp_path, state)).backbone.input_size == size


def test_moco_stem_is_that_of_the_network_its_file_names(tmp_path):
    path = spice_moco(tmp_path).path
    payload = torch.load(path)
    torch.save(payload | {"arch": "resnet18_cifar"}, path)
    assert load_checkpoint(path).backbone.spec["stem"]["pool"] is False


def test_spice_semi_gives_its_trained_network_on_request(tmp_path):
    online = wide_resnet()
    path = written(tmp_path, spice_semi_payload(online, wide_resnet(seed=1))[0])
    loaded = load_checkpoint(path, wanted=Wanted(branch="online")).backbone
    assert torch.equal(loaded.module.conv1.weight, online.conv1.weight)
    assert loaded.mean[0].item() == pytest.approx(125.3 / 255)


def test_wide_network_with_a_lost_stage_is_refused(tmp_path):
    payload, _ = spice_semi_payload(wide_resnet(), wide_resnet())
    payload["eval_model"] = {key: v for key, v in payload["eval_model"].items() if not key.startswith("block3.")}
    with pytest.raises(CheckpointError, match="found 2 stages"):
        load_checkpoint(written(tmp_path, payload))


def test_projection_of_one_width_is_not_taken_for_a_head_of_another(tmp_path, small):
    state, _ = spice_self_state(small, heads=1)
    state["module.head.head_0.classifier.lin1.weight"] = torch.ones(WIDTHS[3], 7)
    with pytest.raises(CheckpointError, match=f"expected a linear layer with {WIDTHS[3]} inputs"):
        load_checkpoint(written(tmp_path, state))


def test_released_cdc_refuses_heads_that_disagree_or_diverged(tmp_path, small):
    with pytest.raises(CheckpointError, match="heads of 10 and 12 clusters"):
        load_checkpoint(written(tmp_path, cdc_payload(small, calibrated=12)[0]))
    saved, *_ = cdc_payload(small)
    saved["cali_mlp"]["module.calibration_head.0.bias"].fill_(float("nan"))
    with pytest.raises(UserError, match="NaN or infinite"):
        load_checkpoint(written(tmp_path, saved))


@pytest.mark.parametrize("several", [1, 3])
def test_clusterings_of_divclust_are_asked_for_where_there_are_several(tmp_path, small, several):
    own = {"backbone.conv1.": "backbone.layer0.0.", "backbone.bn1.": "backbone.layer0.1."}
    state = {f"backbone.{key}": value for key, value in small.state_dict().items() if not key.startswith("fc.")}
    state = {re.sub(r"^backbone\.(conv1|bn1)\.", lambda m: own[m[0]], key): value for key, value in state.items()}
    widths = [(WIDTHS[3], WIDTHS[3]), (WIDTHS[3], 10)]
    for layer, (inputs, outputs) in zip((0, 2), widths, strict=True):
        state[f"clu_mlp.{layer}.weight"] = torch.randn(several, outputs, inputs)
        state[f"clu_mlp.{layer}.bias"] = torch.randn(several, 1, outputs)
    path = written(tmp_path, state)
    if several > 1:
        assert not load_checkpoint(path).heads
    loaded = load_checkpoint(path, wanted=Wanted(head=several - 1))
    assert loaded.format == "divclust"
    hidden = FEATURES @ state["clu_mlp.0.weight"][-1].T + state["clu_mlp.0.bias"][-1]
    logits = hidden.relu() @ state["clu_mlp.2.weight"][-1].T + state["clu_mlp.2.bias"][-1]
    torch.testing.assert_close(computed(*loaded.heads, given=FEATURES), logits)
    broken = {**state, "clu_mlp.2.bias": torch.randn(several, 10)}
    with pytest.raises(CheckpointError, match="clusterings of unlike shapes"):
        load_checkpoint(written(tmp_path, broken))


@pytest.mark.parametrize(
    "lost",
    ["backbone.layer2.0.conv1.weight", "backbone.bn1.running_mean", "backbone.layer3.1.", "cluster_head.0.0.weight"],
)
def test_lost_weights_are_refused_in_one_line(tmp_path, small, lost):
    saved, *_ = cdc_payload(small)
    saved["model"] = {key: v for key, v in saved["model"].items() if not key.startswith(f"module.{lost}")}
    with pytest.raises(CheckpointError, match=r"^[^\n]*$"):
        load_checkpoint(written(tmp_path, saved), format="cdc")


def test_misshapen_weights_do_not_ask_for_memory(tmp_path, small):
    saved, *_ = cdc_payload(small)
    for key in ("module.backbone.layer4.0.conv1.weight", "module.backbone.layer2.0.conv1.weight"):
        saved["model"][key] = saved["model"][key].flatten()
    with pytest.raises(CheckpointError, match="expected a complete ResNet of CDC"):
        load_checkpoint(written(tmp_path, saved))


def test_files_with_parts_of_other_projects_are_not_taken_for_scan(tmp_path, small):
    state, _ = scan_state(small, heads=1)
    scan = formats.get("scan")
    assert scan.matches(read_checkpoint(written(tmp_path, state)))
    assert not scan.matches(read_checkpoint(written(tmp_path, state | {"memory.queue": torch.ones(3)})))


def test_one_network_has_no_moving_average(tmp_path, small):
    paths = [written(tmp_path, scan_state(small)[0], "scan.pth"), moco_published(tmp_path).path]
    for path, words in zip(paths, ("no moving average", "no momentum encoder"), strict=True):
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(path, wanted=Wanted(branch="momentum"))


@pytest.mark.parametrize("value", [True, 1.5, None, "3", np.float64(2)])
def test_only_integers_count_as_numbers_of_heads(value):
    assert whole_number(value) is None
    assert whole_number(torch.tensor(4)) == whole_number(4) == 4
