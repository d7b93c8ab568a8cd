"""SPICE's three stages, MoCo and FixMatch: files as they write them, small networks inside."""

import json

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.networks.fixmatch_wrn import FixMatchWideResNet
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
    with_statistics,
)

IMAGENET_MEAN = [0.485, 0.456, 0.406]


def written(folder, payload):
    torch.save(payload, folder / "checkpoint_last.pth.tar")
    return folder / "checkpoint_last.pth.tar"


def assert_features(loaded, network, size):
    given = images(size)
    torch.testing.assert_close(
        computed(loaded.backbone, given=given), computed(network, given=given), rtol=1e-5, atol=1e-5
    )


def self_state(network, heads, clusters=10, shortcut=True):
    made = [mlp("linear", "relu", "linear", clusters=clusters) for _ in range(heads)]
    state = named("module.feature_module.", network, shortcut)
    for number, head in enumerate(made):
        layers = {"0": "lin1", "2": "lin2"}
        inner = {f"{layers[key[0]]}{key[1:]}": value for key, value in head.state_dict().items()}
        state |= named(f"module.head.head_{number}.classifier.", inner)
    return state, made


def test_selected_checkpoint_of_spice_self_has_its_one_head(tmp_path):
    network = resnet(CIFAR_STEM, 32)
    state, (head,) = self_state(network, heads=1)
    loaded = load_checkpoint(written(tmp_path, state))
    assert loaded.format == "spice-self"
    assert_features(loaded, network, 32)
    features = computed(network, given=images(32))
    torch.testing.assert_close(computed(loaded.heads[0], given=features), computed(head, given=features))
    assert loaded.backbone.mean.tolist() == pytest.approx(IMAGENET_MEAN)
    assert loaded.backbone.inferred == ("input_size", "stem.pool")


def test_training_checkpoint_of_spice_self_asks_which_of_its_heads(tmp_path):
    network = resnet(CIFAR_STEM, 32)
    state, heads = self_state(network, heads=3)
    path = written(tmp_path, {"epoch": 2, "state_dict": state, "optimizer": {}})
    loaded = load_checkpoint(path)
    assert (loaded.heads, loaded.origin.epoch) == ((), 2)
    assert "head=0 to 2" in loaded.origin.why["head"]
    features = computed(network, given=images(32))
    chosen = load_checkpoint(path, wanted=Wanted(head=2)).heads[0]
    torch.testing.assert_close(computed(chosen, given=features), computed(heads[2], given=features))


@pytest.mark.parametrize(("size", "clusters"), [(96, 10), (32, 20), (32, 10)])
def test_spice_network_with_a_pool_for_all_data_sets_is_fed_at_the_right_size(tmp_path, size, clusters):
    network = resnet(STL_STEM, size, depths=(3, 4, 6, 3))
    state, _ = self_state(network, heads=1, clusters=clusters, shortcut=False)
    loaded = load_checkpoint(written(tmp_path, state))
    assert_features(loaded, network, size)
    assert loaded.backbone.input_size == size


@pytest.mark.parametrize(("arch", "stem", "size"), [("resnet18_cifar", CIFAR_STEM, 32), ("resnet18", STL_STEM, 96)])
def test_moco_gives_the_encoder_asked_for_with_the_stem_its_file_names(tmp_path, arch, stem, size):
    online, average = resnet(stem, 32), resnet(stem, 32)
    for weight in average.parameters():
        weight.data *= 1.1
    state = named("module.encoder_q.", online, shortcut=True) | named("module.encoder_k.", average, shortcut=True)
    state |= named("module.encoder_q.fc.", mlp("linear", "relu", "linear"))
    state |= {"module.queue": torch.randn(8, 16), "module.queue_ptr": torch.zeros(1)}
    path = written(tmp_path, {"epoch": 1000, "arch": arch, "state_dict": state, "optimizer": {}})
    loaded = load_checkpoint(path)
    assert (loaded.format, loaded.origin.epoch, loaded.backbone.input_size) == ("moco", 1000, size)
    assert_features(loaded, online, 32)
    assert_features(load_checkpoint(path, wanted=Wanted(branch="momentum")), average, 32)


def test_published_moco_has_the_query_encoder_alone(tmp_path):
    network = resnet(LARGE_STEM, 64)
    path = written(tmp_path, {"arch": "resnet50", "state_dict": named("module.encoder_q.", network)})
    assert_features(load_checkpoint(path), network, 64)
    with pytest.raises(UserError, match="no momentum encoder"):
        load_checkpoint(path, wanted=Wanted(branch="momentum"))


def semi_payload(online, average, clusters=10):
    states = []
    for network in (online, average):
        head = nn.Linear(computed(network, given=images(32)).shape[1], clusters)
        states.append((named("", network, shortcut=True) | named("fc.", head), head))
    (train, _), (evaluated, head) = states
    return {"train_model": train, "eval_model": evaluated, "optimizer": {}, "scheduler": {}, "it": 5}, head


@pytest.mark.parametrize(("clusters", "mean"), [(10, 125.3 / 255), (20, 129.3 / 255)])
def test_spice_semi_gives_the_average_that_fixmatch_evaluates(tmp_path, clusters, mean):
    torch.manual_seed(0)
    online, average = (with_statistics(FixMatchWideResNet(2, [4, 8, 12, 16], [1, 2, 2]), images(32)) for _ in range(2))
    payload, head = semi_payload(online, average, clusters)
    path = written(tmp_path, payload)
    loaded = load_checkpoint(path)
    assert loaded.format == "spice-semi"
    assert_features(loaded, average, 32)
    features = computed(average, given=images(32))
    torch.testing.assert_close(computed(loaded.heads[0], given=features), computed(head, given=features))
    assert loaded.backbone.mean.tolist()[0] == pytest.approx(mean)
    assert_features(load_checkpoint(path, wanted=Wanted(branch="online")), online, 32)
    again, _ = build(json.loads(json.dumps(loaded.backbone.spec)))
    again.load_state_dict(average.state_dict())
    torch.testing.assert_close(computed(again, given=images(32)), features)


def test_wide_network_of_four_stages_is_that_for_stl(tmp_path):
    network = with_statistics(FixMatchWideResNet(2, [4, 8, 12, 16, 20], [2, 2, 2, 2]), images(96))
    loaded = load_checkpoint(written(tmp_path, semi_payload(network, network)[0]))
    assert_features(loaded, network, 96)
    assert loaded.backbone.input_size == 96


def test_spice_semi_with_a_resnet_is_read_as_well(tmp_path):
    network = resnet(CIFAR_STEM, 32)
    loaded = load_checkpoint(written(tmp_path, semi_payload(network, network)[0]))
    assert_features(loaded, network, 32)
    assert loaded.heads[0].clusters == 10


def test_wide_network_with_a_lost_stage_is_refused(tmp_path):
    network = with_statistics(FixMatchWideResNet(2, [4, 8, 12, 16], [1, 2, 2]), images(32))
    payload, _ = semi_payload(network, network)
    payload["eval_model"] = {key: v for key, v in payload["eval_model"].items() if not key.startswith("block3.")}
    with pytest.raises(UserError, match="found 2 stages"):
        load_checkpoint(written(tmp_path, payload))


def test_projection_of_one_width_is_not_taken_for_a_head_of_another(tmp_path):
    state, _ = self_state(resnet(CIFAR_STEM, 32), heads=1)
    state["module.head.head_0.classifier.lin1.weight"] = torch.ones(WIDTHS[3], 7)
    with pytest.raises(UserError, match=f"expected a linear layer with {WIDTHS[3]} inputs"):
        load_checkpoint(written(tmp_path, state))
