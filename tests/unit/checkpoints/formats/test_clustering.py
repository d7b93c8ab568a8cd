"""SCAN, SeCu, CC, TCL, ProPos, the released CDC: files as they write them, small networks inside."""

import argparse
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cdc_plugin.checkpoints import Wanted, load_checkpoint, read_checkpoint
from cdc_plugin.checkpoints.formats import formats
from cdc_plugin.checkpoints.read import whole_number
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from tests.helpers.clustering_files import (
    CIFAR_STEM,
    LARGE_STEM,
    STL_STEM,
    WIDTHS,
    computed,
    images,
    mlp,
    named,
    resnet,
)

CIFAR10 = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]
CIFAR20 = [0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def small():
    return resnet(CIFAR_STEM, 32)


@pytest.fixture(scope="module")
def large():
    return resnet(LARGE_STEM, 64)


def written(folder, payload, name="model.pth.tar"):
    torch.save(payload, folder / name)
    return folder / name


def assert_fed(backbone, statistics, size):
    assert backbone.mean.tolist() == pytest.approx(statistics[0])
    assert backbone.std.tolist() == pytest.approx(statistics[1])
    assert backbone.input_size == size


def assert_computes(loaded, network, *heads, size=32):
    given = images(size)
    features = computed(network, given=given)
    torch.testing.assert_close(computed(loaded.backbone, given=given), features, rtol=1e-5, atol=1e-5)
    assert len(loaded.heads) == len(heads)
    for found, head in zip(loaded.heads, heads, strict=True):
        torch.testing.assert_close(computed(found, given=features), computed(head, given=features))
    again, _ = build(json.loads(json.dumps(loaded.backbone.spec)))
    again.load_state_dict(loaded.backbone.module.state_dict())
    torch.testing.assert_close(computed(again, given=given).flatten(1), features, rtol=1e-5, atol=1e-5)


def scan_state(network, heads=0, clusters=10, prefix=""):
    made = [nn.Linear(WIDTHS[3], clusters) for _ in range(heads)]
    state = named(f"{prefix}backbone.", network, shortcut=True)
    for number, head in enumerate(made):
        state |= named(f"{prefix}cluster_head.{number}.", head)
    if not heads:
        state |= named(f"{prefix}contrastive_head.", mlp("linear", "relu", "linear"))
    return state, made


def test_scan_pretext_gives_a_backbone_alone(tmp_path, small):
    state, _ = scan_state(small)
    loaded = load_checkpoint(written(tmp_path, {"optimizer": {}, "model": state, "epoch": 7}))
    assert (loaded.format, loaded.origin.epoch, loaded.origin.writer) == ("scan", 7, "SCAN (pretext)")
    assert_computes(loaded, small)
    assert_fed(loaded.backbone, CIFAR10, 32)
    assert {"mean", "std", "input_size", "stem.pool"} == set(loaded.backbone.inferred)


def test_second_stage_of_scan_uses_the_head_that_its_file_calls_best(tmp_path, small):
    state, heads = scan_state(small, heads=3, clusters=20)
    loaded = load_checkpoint(written(tmp_path, {"model": state, "head": np.int64(2)}))
    assert_computes(loaded, small, heads[2])
    assert_fed(loaded.backbone, CIFAR20, 32)


def test_interrupted_scan_run_keeps_prefix_and_best_head(tmp_path, small):
    state, heads = scan_state(small, heads=3, prefix="module.")
    loaded = load_checkpoint(written(tmp_path, {"model": state, "epoch": 4, "best_loss_head": np.int64(1)}))
    assert_computes(loaded, small, heads[1])


def test_heads_that_no_one_ranks_are_left_to_the_user(tmp_path, small):
    state, heads = scan_state(small, heads=3)
    path = written(tmp_path, state)
    loaded = load_checkpoint(path)
    assert_computes(loaded, small)
    assert "head=0 to 2" in loaded.origin.why["head"]
    assert_computes(load_checkpoint(path, wanted=Wanted(head=1)), small, heads[1])
    with pytest.raises(UserError, match="has 3 clustering heads, 3"):
        load_checkpoint(path, wanted=Wanted(head=3))


def test_scan_network_for_stl_is_told_from_that_for_cifar(tmp_path):
    network = resnet(STL_STEM, 96)
    state, heads = scan_state(network, heads=1)
    loaded = load_checkpoint(written(tmp_path, state))
    assert_computes(loaded, network, heads[0], size=96)
    assert_fed(loaded.backbone, IMAGENET, 96)


def test_pool_that_no_name_or_shape_tells_stays_open_for_images_to_settle(tmp_path, small):
    state, _ = scan_state(small)
    assert "stem.pool" in load_checkpoint(written(tmp_path, state)).backbone.inferred


def test_path_decides_between_data_sets_that_fit_alike(tmp_path, small):
    folder = tmp_path / "results" / "cifar-100" / "pretext"
    folder.mkdir(parents=True)
    assert_fed(load_checkpoint(written(folder, scan_state(small)[0])).backbone, CIFAR20, 32)


def secu_payload(network, sizes, num_images, imagenet=False):
    kinds = ("linear", "norm", "relu", "linear")
    projection = mlp(*(kinds[:3] + kinds if imagenet else kinds), clusters=12)
    if imagenet:
        projection.append(nn.BatchNorm1d(12).eval())
    state = named("encoder.", network, shortcut=not imagenet) | named("encoder.fc.", projection)
    for number, size in enumerate(sizes):
        state |= {f"center_{number}": torch.randn(12, size), f"counter_{number}": torch.zeros(size)}
        state |= {
            f"assign_labels_{number}": torch.ones(num_images, dtype=torch.long),
            f"ldual_{number}": torch.zeros(size),
        }
    if imagenet:
        state |= named("predictor.", mlp("linear", "norm", "relu", "linear", inputs=12, clusters=12))
    return {"epoch": 201, "state_dict": named("module.", state), "optimizer": {}}, projection, state


def cosine_logits(projection, centers, features):
    projected = F.normalize(computed(projection, given=features), dim=1)
    return projected @ F.normalize(centers, dim=0) / 0.05


@pytest.mark.parametrize("imagenet", [False, True])
def test_secu_head_is_the_cosine_to_centres_of_the_wanted_number(tmp_path, small, large, imagenet):
    network = large if imagenet else small
    payload, projection, state = secu_payload(network, [10, 20, 30], 500, imagenet)
    path = written(tmp_path, payload)
    features = computed(network, given=images(64))
    for wanted, center in ((Wanted(), 0), (Wanted(clusters=20), 1), (Wanted(head=2, clusters=20), 2)):
        loaded = load_checkpoint(path, wanted=wanted)
        assert loaded.format == "secu"
        torch.testing.assert_close(computed(loaded.backbone, given=images(64)), features, rtol=1e-5, atol=1e-5)
        expected = cosine_logits(projection, state[f"center_{center}"], features)
        torch.testing.assert_close(computed(loaded.heads[0], given=features), expected, rtol=1e-4, atol=1e-4)
    assert "size constraint" in loaded.origin.writer


def test_secu_tells_its_data_set_by_the_number_of_labels_it_keeps(tmp_path, small):
    told = {50_000: (CIFAR20, 32), 105_000: (IMAGENET, 96)}
    for count, (statistics, size) in told.items():
        payload, *_ = secu_payload(small, [20, 40], count)
        loaded = load_checkpoint(written(tmp_path, payload))
        assert_fed(loaded.backbone, statistics, size)
        assert "stem.pool" not in loaded.backbone.inferred


def test_secu_refuses_centres_that_do_not_fit_its_projection(tmp_path, small):
    for change in ({"center_0": torch.randn(11, 10)}, {"center_0": torch.randn(12, 9)}, {"center_1": torch.ones(12)}):
        payload, _, _ = secu_payload(small, [10, 20], 50)
        payload["state_dict"] |= named("module.", change)
        with pytest.raises(UserError, match=f"{next(iter(change))} of .* copy it again"):
            load_checkpoint(written(tmp_path, payload))


def test_cc_is_fed_without_normalisation_at_the_size_its_maps_tell(tmp_path, large):
    head = mlp("linear", "relu", "linear")
    state = named("resnet.", large) | named("instance_projector.", mlp("linear", "relu", "linear"))
    loaded = load_checkpoint(written(tmp_path, {"net": state | named("cluster_projector.", head), "epoch": 3}))
    assert loaded.format == "cc"
    assert_computes(loaded, large, head, size=64)
    assert_fed(loaded.backbone, ([0, 0, 0], [1, 1, 1]), 64)


def test_tcl_keeps_the_linear_layer_after_its_resnet_and_says_its_data_set(tmp_path):
    network = resnet(LARGE_STEM, 64)
    network.fc = nn.Linear(WIDTHS[3], WIDTHS[3])
    head = mlp("norm", "relu", "linear", "norm", "relu", "linear")
    state = named("resnet.", network) | named("instance_projector.", head) | named("cluster_projector.", head)
    payload = {"model": state, "epoch": 9, "args": argparse.Namespace(dataset="CIFAR-100", nb_cluster=20)}
    loaded = load_checkpoint(written(tmp_path, payload, "checkpoint-9.pth"))
    assert loaded.format == "tcl"
    assert_computes(loaded, network, head, size=64)
    assert_fed(loaded.backbone, CIFAR20, 224)
    assert loaded.backbone.inferred == ()


@pytest.mark.parametrize(("stem", "first"), [(CIFAR_STEM, 3), (LARGE_STEM, 4)])
def test_propos_takes_the_moving_average_unless_asked_otherwise(tmp_path, stem, first):
    size = 32 if first == 3 else 64
    online, average = resnet(stem, size), resnet(stem, size)
    for weight in average.parameters():
        weight.data *= 1.1
    places = {"conv1": 0, "bn1": 1} | {f"layer{stage + 1}": first + stage for stage in range(4)}
    state = {}
    for branch, network in (("q", online), ("k", average)):
        for key, value in network.state_dict().items():
            name, _, rest = key.partition(".")
            state[f"encoder_{branch}.{places[name]}.{rest}"] = value
        state |= named(f"projector_{branch}.", mlp("linear", "norm", "relu", "linear"))
    state |= named("predictor.", mlp("linear", "norm", "relu", "linear"))
    state |= {key.replace("encoder_k.", "encoder.0."): v for key, v in state.items() if key.startswith("encoder_k.")}
    path = written(tmp_path, state, "byol-1000")
    loaded = load_checkpoint(path)
    assert loaded.format == "propos"
    assert_computes(loaded, average, size=size)
    assert_computes(load_checkpoint(path, wanted=Wanted(branch="online")), online, size=size)


def cdc_payload(network, clusters=10, calibrated=10):
    kinds = ("linear", "norm", "relu", "linear")
    clustering, calibration = mlp(*kinds, clusters=clusters), mlp(*kinds, clusters=calibrated)
    for weight in calibration.parameters():
        weight.data += 0.1
    model = named("module.backbone.", network) | named("module.cluster_head.0.", clustering)
    saved = {"model": model, "cali_mlp": named("module.calibration_head.", calibration), "epoch": 5}
    return saved, clustering, calibration


def test_released_cdc_gives_both_heads(tmp_path, small):
    saved, clustering, calibration = cdc_payload(small)
    loaded = load_checkpoint(written(tmp_path, saved))
    assert (loaded.format, loaded.origin.epoch) == ("cdc", 5)
    assert_computes(loaded, small, clustering, calibration)
    assert_fed(loaded.backbone, CIFAR10, 32)


def test_released_cdc_alone_with_its_clustering_head_still_loads(tmp_path, small):
    saved, clustering, _ = cdc_payload(small)
    assert_computes(load_checkpoint(written(tmp_path, saved["model"])), small, clustering)


def test_released_cdc_refuses_heads_that_disagree_or_diverged(tmp_path, small):
    with pytest.raises(UserError, match="heads of 10 and 12 clusters"):
        load_checkpoint(written(tmp_path, cdc_payload(small, calibrated=12)[0]))
    saved, *_ = cdc_payload(small)
    saved["cali_mlp"]["module.calibration_head.0.bias"].fill_(float("nan"))
    with pytest.raises(UserError, match="NaN or infinite"):
        load_checkpoint(written(tmp_path, saved))


def test_heads_on_embeddings_are_named_and_refused(tmp_path):
    heads = {"embed_mean": torch.zeros(4), "embed_std": torch.ones(4), "head.best_head_idx": torch.tensor(0)}
    heads |= named("head.heads.0.mlp.", mlp("linear", "relu", "linear"))
    temi = {"student": heads, "teacher": heads, "epoch": 3, "args": argparse.Namespace(arch="clip_ViT-B/32")}
    with pytest.raises(UserError, match=r"heads of TEMI.*\(clip_ViT-B/32\).*timm:NAME"):
        load_checkpoint(written(tmp_path, temi))
    turtle = {f"phi{number}": nn.Linear(8, 10).state_dict() for number in (1, 2)}
    for spaces in ({"phi1": turtle["phi1"]}, turtle):
        with pytest.raises(UserError, match=r"linear heads of TURTLE.*timm:NAME"):
            load_checkpoint(written(tmp_path, spaces, "turtle.pt"))


@pytest.mark.parametrize(
    "lost",
    ["backbone.layer2.0.conv1.weight", "backbone.bn1.running_mean", "backbone.layer3.1.", "cluster_head.0.0.weight"],
)
def test_lost_weights_are_refused_in_one_line(tmp_path, small, lost):
    saved, *_ = cdc_payload(small)
    saved["model"] = {key: v for key, v in saved["model"].items() if not key.startswith(f"module.{lost}")}
    with pytest.raises(UserError) as refusal:
        load_checkpoint(written(tmp_path, saved), format="cdc")
    assert "\n" not in str(refusal.value)


def test_misshapen_weights_do_not_ask_for_memory(tmp_path, small):
    saved, *_ = cdc_payload(small)
    for key in ("module.backbone.layer4.0.conv1.weight", "module.backbone.layer2.0.conv1.weight"):
        saved["model"][key] = saved["model"][key].flatten()
    with pytest.raises(UserError, match="expected a complete ResNet of CDC"):
        load_checkpoint(written(tmp_path, saved))


def test_files_with_parts_of_other_projects_are_not_taken_for_scan(tmp_path, small):
    state, _ = scan_state(small, heads=1)
    scan = formats.get("scan")
    assert scan.matches(read_checkpoint(written(tmp_path, state)))
    assert not scan.matches(read_checkpoint(written(tmp_path, state | {"memory.queue": torch.ones(3)})))


def test_one_network_has_no_moving_average(tmp_path, small):
    with pytest.raises(UserError, match="no moving average"):
        load_checkpoint(written(tmp_path, scan_state(small)[0]), wanted=Wanted(branch="momentum"))


@pytest.mark.parametrize("value", [True, 1.5, None, "3", np.float64(2)])
def test_only_integers_count_as_numbers_of_heads(value):
    assert whole_number(value) is None
    assert whole_number(torch.tensor(4)) == whole_number(4) == 4
