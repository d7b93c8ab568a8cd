"""Backbones inside models of lightly's users and of well-known self-supervised methods."""

import pytest
import timm
import torch
from torch import nn
from torchvision.models import VisionTransformer

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from tests.helpers.checkpoint_builders.networks import named, with_noise
from tests.helpers.checkpoint_builders.self_supervised import dino, lightning

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SPEC = {"family": "resnet", "block": "basic", "depths": [1, 1, 1, 1], "widths": [4, 6, 8, 10]}


def resnet(**stem):
    return with_noise(build(SPEC | {"stem": stem})[0], seed=int(torch.randint(1000, ())))


def in_a_list(network):
    return nn.Sequential(*[part for name, part in network.named_children() if name != "fc"])


def features(network, images=IMAGES):
    with torch.no_grad():
        return network.eval()(images).flatten(1)


def prefixed(**parts):
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}


def loaded(path, network, branch=None, images=IMAGES):
    found = load_checkpoint(path, wanted=Wanted(branch=branch))
    assert torch.allclose(features(found.backbone, images), features(network, images), atol=1e-5)
    return found


def test_list_without_a_pool_says_so_by_its_places(tmp_path):
    network = resnet(kernel=3, stride=1, padding=1, pool=False)
    parts = [network.conv1, network.bn1, network.relu, *(getattr(network, f"layer{n}") for n in range(1, 5))]
    torch.save(prefixed(f=nn.Sequential(*parts), g=nn.Linear(10, 4)), tmp_path / "a.pth")
    found = loaded(tmp_path / "a.pth", network)
    assert found.backbone.spec["stem"]["pool"] is False
    assert found.backbone.inferred == ("mean", "std", "input_size", "stem.padding", "stem.stride")


def test_bare_list_and_compiled_or_parallel_parts_are_read(tmp_path):
    network = resnet()
    torch.save(in_a_list(network).state_dict(), tmp_path / "bare.pth")
    assert loaded(tmp_path / "bare.pth", network).format == "lightly"
    state = {k.replace("backbone.", "backbone._orig_mod.module."): v for k, v in prefixed(backbone=network).items()}
    torch.save(state, tmp_path / "compiled.pth")
    loaded(tmp_path / "compiled.pth", network)


@pytest.mark.parametrize("splits", [0, 2])
def test_resnet_of_lightly_loses_its_first_relu_in_a_list(tmp_path, splits):
    models = pytest.importorskip("lightly.models")
    network = with_noise(models.ResNetGenerator("resnet-9", width=0.125, num_splits=splits))
    listed = nn.Sequential(*list(network.children())[:-1], nn.AdaptiveAvgPool2d(1))
    path = lightning(tmp_path, backbone=listed, projection_head=nn.Linear(64, 4))
    found = loaded(path, listed.train())  # eval() after train() joins the statistics of the splits
    assert found.backbone.spec["stem"]["relu"] is False
    assert found.backbone.inferred == ("mean", "std", "input_size")
    torch.save({f"model.{key}": value for key, value in network.state_dict().items()}, tmp_path / "named.pth")
    network.linear = nn.Identity()
    assert "relu" not in loaded(tmp_path / "named.pth", network.train()).backbone.spec["stem"]


@pytest.mark.parametrize(
    ("online", "momentum", "default"),
    [
        ("backbone", "backbone_momentum", "online"),  # MoCo, BYOL
        ("backbone", "teacher_backbone", "online"),
        ("student_backbone", "teacher_backbone", "momentum"),  # DINO
        ("student_backbone", "backbone", "momentum"),
        ("anchor_backbone", "backbone", "momentum"),  # MSN
        ("backbone.student", "backbone.teacher", "momentum"),  # stable-pretraining
        ("query_encoder", "key_encoder", "online"),
        ("base_encoder", "momentum_encoder", "online"),
        ("online_encoder", "target_encoder", "online"),
    ],
)
def test_branch_is_the_one_that_is_evaluated_or_asked_for(tmp_path, online, momentum, default):
    networks = {"online": resnet(), "momentum": resnet()}
    path = lightning(tmp_path, **{online: networks["online"], momentum: networks["momentum"]})
    assert "usually evaluated" in loaded(path, networks[default]).origin.why["branch"]
    for branch, network in networks.items():
        assert "as asked" in loaded(path, network, branch).origin.why["branch"]


def test_absent_branch_and_two_unlike_backbones_are_refused(tmp_path):
    path = lightning(tmp_path, backbone=resnet())
    with pytest.raises(UserError, match="no momentum branch"):
        load_checkpoint(path, wanted=Wanted(branch="momentum"))
    path = lightning(tmp_path, left=resnet(), right=resnet())
    with pytest.raises(UserError, match=r"2 backbones \(left\., right\.\)"):
        load_checkpoint(path)


def test_backbone_kept_twice_is_taken_once(tmp_path):
    network = resnet()
    model = nn.ModuleDict({"backbone": in_a_list(network), "projection_head": nn.Linear(10, 4)})
    loaded(lightning(tmp_path, backbone=model["backbone"], resnet_simclr=model), network)


def test_masked_transformer_of_lightly_leaves_its_mask_token_behind(tmp_path):
    network = with_noise(timm.create_model("test_vit", num_classes=0, img_size=48))
    wrapper = nn.Module()
    wrapper.vit, wrapper.mask_token = network, nn.Parameter(torch.zeros(1, 1, network.embed_dim))
    path = lightning(tmp_path, backbone=wrapper, decoder=nn.Linear(4, 4))
    found = loaded(path, network, images=torch.rand(2, 3, 48, 48))
    assert found.backbone.input_size == 48
    assert found.backbone.inferred == ("mean", "std")
    assert found.backbone.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])  # not timm's for this model


def test_transformer_of_torchvision_of_any_size_has_the_usual_heads(tmp_path):
    network = with_noise(VisionTransformer(32, 16, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=96))
    network.heads = nn.Identity()
    found = loaded(lightning(tmp_path, backbone=nn.ModuleDict({"vit": network})), network)
    assert "heads" in found.backbone.inferred
    assert "no weight reveals" in found.origin.why["heads"]
    rebuilt, size = build(found.backbone.spec)
    assert size == 192
    assert rebuilt.state_dict().keys() == found.backbone.module.state_dict().keys()


def test_size_in_the_hyper_parameters_is_taken(tmp_path):
    path = lightning(tmp_path, backbone=resnet())
    torch.save(torch.load(path) | {"hyper_parameters": {"input_size": 96}}, path)
    found = load_checkpoint(path)
    assert (found.backbone.input_size, found.origin.epoch) == (96, 5)


def test_well_known_layouts_are_read_and_their_writer_is_guessed(tmp_path):
    network = resnet()
    moco = prefixed(encoder_q=network, encoder_k=resnet()) | {"queue": torch.ones(4, 8)}
    for state, writer in ((moco, "MoCo"), (prefixed(**{"net.0": network}), "training script")):
        torch.save(named("module.", state), tmp_path / "a.pth.tar")
        found = load_checkpoint(tmp_path / "a.pth.tar", format="generic")  # a clustering method may claim MoCo's
        assert torch.allclose(features(found.backbone), features(network), atol=1e-5)
        assert writer in found.origin.writer


def test_student_in_one_file_with_its_teacher_is_taken_on_request(tmp_path):
    path = dino(tmp_path).path
    student = torch.load(path)["student"]["module.backbone.conv1.weight"]
    found = load_checkpoint(path, wanted=Wanted(branch="online"))
    assert torch.equal(found.backbone.module.conv1.weight, student)


def test_weights_inside_the_backbone_must_all_agree(tmp_path):
    state, name = prefixed(backbone=in_a_list(resnet())), "backbone.6.0.conv2.weight"
    transformer = VisionTransformer(32, 16, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=96)
    for changed in (
        {key: value for key, value in state.items() if key != name},
        state | {name: torch.ones(8, 8, 3, 2)},
        state | {"backbone.9.weight": torch.ones(3)},
        {key: value for key, value in prefixed(backbone=transformer).items() if "encoder_layer_5" not in key},
    ):
        torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": changed}, tmp_path / "a.ckpt")
        with pytest.raises(UserError):
            load_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("lost", ["teacher_backbone.conv1.weight", "teacher_backbone.layer4.0.conv1.weight"])
def test_damaged_teacher_does_not_make_way_for_its_student(tmp_path, lost):
    state = prefixed(student_backbone=resnet(), teacher_backbone=resnet())
    del state[lost]
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": state}, tmp_path / "a.ckpt")
    with pytest.raises(UserError):
        load_checkpoint(tmp_path / "a.ckpt")
    load_checkpoint(tmp_path / "a.ckpt", wanted=Wanted(branch="online"))


def test_resnet_that_lost_a_whole_block_is_refused_but_for_the_users_word(tmp_path):
    network, _ = build(SPEC | {"depths": [2, 2, 1, 2]})
    path = lightning(tmp_path, backbone=network)
    with pytest.raises(UserError, match=r"\[2, 2, 1, 2\] blocks per stage.*partial_weights=True"):
        load_checkpoint(path)
    found = load_checkpoint(path, wanted=Wanted(partial=True))
    assert torch.equal(features(found.backbone), features(network))
