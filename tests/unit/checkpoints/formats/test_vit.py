"""Vision transformers of MoCo v3, DINO, iBOT, MAE, DINOv2, VISSL and mmpretrain, and their images' size and mean."""

import json
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torchvision.models import VisionTransformer

from cdc_plugin.checkpoints import Wanted, load_backbone, load_checkpoint
from cdc_plugin.checkpoints.infer.resolve import resolve_input
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import UserError
from cdc_plugin.integrations.lightning_callback import identify_network, wrap_module
from cdc_plugin.training.prepare import open_network
from tests.helpers.checkpoint_builders import IMAGENET
from tests.helpers.checkpoint_builders.libraries import created
from tests.helpers.checkpoint_builders.networks import named, with_noise

TOKEN = torch.ones(1, 1, 64)


def saved(path, payload):
    torch.save(payload.state_dict() if isinstance(payload, nn.Module) else payload, path)
    return path


def features(network, size):
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return network.eval()(images)


def loaded(path, network, size, **wanted):
    """Return what is loaded by its content alone, once its features are the network's."""
    found = load_checkpoint(path, wanted=Wanted(**wanted))
    torch.testing.assert_close(features(found.backbone, size), features(network, size), rtol=1e-4, atol=1e-5)
    return found


def tiny(**settings):
    return with_noise(timm.create_model("vit_tiny_patch16_224", **{"num_classes": 0} | settings))


def fix_positions(network, rows_first):
    """Give a network the sines and cosines of MoCo v3, or of MAE, which begins with the columns."""
    count, width = network.pos_embed.shape[1] - 1, network.pos_embed.shape[2]
    places, frequencies = torch.arange(count), 10000.0 ** -(torch.arange(width // 4) / (width // 4))
    rows, columns = places // int(count**0.5), places % int(count**0.5)
    axes = (rows, columns) if rows_first else (columns, rows)
    waves = [wave(torch.outer(axis.float(), frequencies)) for axis in axes for wave in (torch.sin, torch.cos)]
    network.pos_embed.data = torch.cat([torch.zeros(1, width), torch.cat(waves, dim=1)]).unsqueeze(0)
    return network


def renamed(network, *pairs):
    """Return the weights under other names, by patterns and what replaces them."""
    state = network.state_dict()
    for pattern, name in pairs:
        state = {re.sub(pattern, name, key): value for key, value in state.items()}
    return state


def dinov2(size, depth=2):
    """Return a small network with DINOv2's gated layers, as timm has it."""
    settings = {"embed_dim": 384, "depth": depth, "num_heads": 6, "mlp_ratio": 2.0, "img_size": size, "num_classes": 0}
    return with_noise(timm.create_model("vit_giant_patch14_dinov2", **settings))


def dinov2_state(network):
    """Return its weights as DINOv2 trains them: in chunks, which count on, and with a mask token."""
    names = (r"^blocks\.(\d+)\.", r"blocks.\1.\1."), (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3")
    return renamed(network, *names) | {"mask_token": torch.ones(1, 384)}


@pytest.mark.parametrize("bare", [True, False])
def test_small_networks_of_moco_v3_have_twelve_heads(tmp_path, bare):
    network, average = (fix_positions(tiny(num_heads=12), rows_first=True) for _ in range(2))
    average.cls_token.data += 1
    head = {"head.0.weight": torch.ones(3, 192)}
    state = named("module.base_encoder.", network.state_dict() | head) | named("module.momentum_encoder.", average)
    state |= {"module.predictor.0.weight": torch.ones(4, 4)}
    payload = network.state_dict() if bare else {"arch": "vit_small", "epoch": 300, "state_dict": state}
    found = loaded(saved(tmp_path / "a.pth.tar", payload), network, 224)
    assert found.backbone.spec["kwargs"] == {"num_heads": 12}
    assert found.backbone.inferred == ("heads",)
    assert "no weight reveals" in found.origin.why["heads"]
    assert found.backbone.mean.tolist() == pytest.approx(IMAGENET[0])


def test_convolutions_before_the_transformer_are_moco_v3s(tmp_path):
    network = timm.create_model("vit_small_patch16_224", num_classes=0, depth=1, num_heads=12, img_size=64)
    layers = []
    for inputs, outputs in ((3, 48), (48, 96), (96, 192), (192, 384)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    network.patch_embed.proj = nn.Sequential(*layers, nn.Conv2d(384, 384, 1))
    found = loaded(saved(tmp_path / "a.pth", fix_positions(with_noise(network), True)), network, 64, partial=True)
    assert found.backbone.spec["family"] == "conv_stem_vit"


@pytest.mark.parametrize("whole", [True, False])
def test_masked_autoencoder_keeps_usual_heads_and_leaves_its_decoder(tmp_path, whole):
    network = fix_positions(tiny(), rows_first=False)
    rest = {"mask_token": TOKEN, "decoder_pos_embed": TOKEN, "decoder_blocks.0.attn.qkv.weight": torch.ones(6, 2)}
    state = network.state_dict() | (rest if whole else {})
    found = loaded(saved(tmp_path / "checkpoint-799.pth", {"model": state}), network, 224)
    assert found.backbone.inferred == ("heads",)  # other people give so narrow a network more
    assert "class token" in found.origin.why["features"]


def test_fixed_positions_of_small_images_leave_mean_and_std_open(tmp_path):
    network = fix_positions(tiny(img_size=32, patch_size=4), rows_first=False)
    found = loaded(saved(tmp_path / "mae_pretrain_vit.pth", network), network, 32)
    assert found.backbone.inferred == ("mean", "std", "heads")


@pytest.mark.parametrize(("name", "known"), [("dino_deitsmall16_pretrain", True), ("my_dino", False), ("a", False)])
@pytest.mark.parametrize(("classes", "mean"), [(0, 0.485), (10, 0.5)])
def test_mean_is_known_for_released_files_and_else_assumed(tmp_path, name, known, classes, mean):
    mean = 0.485 if known else mean
    state = {key: torch.zeros(value.shape) for key, value in tiny(num_classes=classes).state_dict().items()}
    found = load_checkpoint(saved(tmp_path / f"{name}.pth", state))
    assert found.backbone.mean[0].item() == pytest.approx(mean)
    assert ("mean" not in found.backbone.inferred) == known


def test_other_kinds_of_transformer_keep_timms_mean(tmp_path):
    with torch.device("meta"):
        state = timm.create_model("vit_xsmall_patch16_clip_224", num_classes=0).state_dict()
    path = saved(tmp_path / "a.pth", {key: torch.zeros(value.shape) for key, value in state.items()})
    assert load_backbone(path).mean[0].item() == pytest.approx(0.4815, abs=1e-4)


def test_mean_that_no_image_can_settle_is_asked_for(tmp_path, caplog):
    path = saved(tmp_path / "a.pth", created("test_vit", img_size=32, patch_size=8))
    resolve_input(load_backbone(path), open_images("digits", 32, labels=False, limit=8))
    assert "mean=[R,G,B]" in caplog.text


@pytest.mark.parametrize("whole", [True, False])
def test_training_checkpoint_of_dinov2_is_read(tmp_path, whole):
    teacher, student = dinov2(28), dinov2(28)
    student.cls_token.data += 1
    kept = named("backbone.", dinov2_state(teacher)) | {"dino_head.mlp.0.weight": torch.ones(3, 3)}
    together = named("teacher.", kept) | named("student.backbone.", dinov2_state(student))
    payload = {"model": together, "iteration": 5} if whole else {"teacher": kept}
    assert "DINOv2" in loaded(saved(tmp_path / "a.pth", payload), teacher, 28, partial=True).origin.writer


def test_lost_block_of_a_counted_transformer_is_noticed(tmp_path):
    state = dinov2_state(dinov2(28, depth=12))
    with pytest.raises(UserError, match="11 blocks"):
        load_checkpoint(saved(tmp_path / "a.pth", {k: v for k, v in state.items() if ".11.11." not in k}))
    assert load_backbone(saved(tmp_path / "b.pth", state)).spec["kwargs"]["depth"] == 12


def test_whole_numbers_for_position_embeddings_are_refused(tmp_path):
    state = created("test_vit", num_classes=0).state_dict()
    state["pos_embed"] = state["pos_embed"].mul(100).int()
    with pytest.raises(UserError):
        load_checkpoint(saved(tmp_path / "a.pth", state))


def test_narrow_transformer_with_assumed_heads_is_warned_of(tmp_path, caplog):
    path = saved(tmp_path / "a.pth", {"model": fix_positions(tiny(), rows_first=False).state_dict()})
    open_network(RefineConfig(backbone=str(path)), None)
    assert "3 attention heads" in caplog.text


def test_student_of_ibot_leaves_its_mask_behind(tmp_path):
    network = created("test_vit", num_classes=0)
    student = named("module.backbone.", network.state_dict() | {"masked_embed": TOKEN[0]})
    payload = {"student": student | {"module.head.mlp.0.weight": torch.ones(3, 3)}, "ibot_loss": {}}
    assert "iBOT" in loaded(saved(tmp_path / "a.pth", payload), network, 160).origin.writer
    loaded(saved(tmp_path / "b.pth", network.state_dict() | {"masked_embed": TOKEN[0]}), network, 160)


def test_whole_checkpoints_of_vissl_and_mmpretrain_are_read(tmp_path):
    network = created("test_vit", num_classes=0)
    model = {"trunk": network.state_dict(), "heads": {"0.clf.0.weight": torch.ones(3, 3)}}
    vissl = {"phase_idx": 9, "classy_state_dict": {"base_model": {"model": model, "meta": {}}}}
    names = [("embed.proj", "embed.projection"), ("^norm", "ln1"), ("^blocks", "layers"), (r"\.norm(\d)", r".ln\1")]
    names += [(r"mlp\.fc1", "ffn.layers.0.0"), (r"mlp\.fc2", "ffn.layers.1")]
    state = named("backbone.", renamed(network, *names)) | {"head.layers.head.weight": torch.ones(3, 64)}
    for payload, writer in ((vissl, "VISSL"), ({"meta": {}, "state_dict": state}, "mmpretrain")):
        found = loaded(saved(tmp_path / "a.pth", payload), network, 160)
        assert writer in found.origin.writer
        assert found.backbone.inferred == ("mean", "std")


def test_half_precision_does_not_round_the_sum_of_class_token_and_position(tmp_path):
    network = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=0, img_size=28)
    state = {key: value.half() for key, value in with_noise(network).state_dict().items()}
    token, position = (torch.full((1, 1, 384), value).half() for value in (1.0, 2**-12))
    grid = torch.cat([position, state.pop("pos_embed")], dim=1)
    state |= {"cls_token": token, "pos_embed": grid, "register_tokens": state.pop("reg_token")}
    network = load_checkpoint(saved(tmp_path / "a.pth", state)).backbone.module
    assert torch.equal(network.cls_token, token.float() + position.float())


def test_dinov2_is_taken_at_224_px_unless_asked_and_its_positions_are_resized(tmp_path, caplog):
    network = dinov2(518, depth=1)
    path, positions = saved(tmp_path / "a.pth", dinov2_state(network)), network.pos_embed
    found = load_checkpoint(path, wanted=Wanted(partial=True))
    assert features(found.backbone, 224).shape == (2, 384)
    assert found.backbone.input_size == 224
    assert "7.7 times" in found.origin.why["input_size"]
    grid = positions[:, 1:].unflatten(1, (37, 37)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, scale_factor=16.1 / 37, mode="bicubic").permute(0, 2, 3, 1).flatten(1, 2)
    torch.testing.assert_close(found.backbone.module.pos_embed, torch.cat([positions[:, :1], grid], dim=1))
    dear = load_checkpoint(path, wanted=Wanted(partial=True, input_size=518)).backbone
    assert torch.equal(dear.module.pos_embed, positions)
    with pytest.raises(UserError, match=r"220 px .* 14 px.*input_size=210"):
        load_checkpoint(path, wanted=Wanted(partial=True, input_size=220))
    backbone = identify_network(wrap_module(network, 518, None, None))
    assert (backbone.input_size, backbone.spec["name"]) == (518, "vit_giant_patch14_dinov2")
    save_file(named("backbone.module.", network), tmp_path / "model.safetensors")
    record = {"spec": backbone.spec, "feature_dim": 384, "mean": [0] * 3, "std": [1] * 3, "input_size": 518}
    (tmp_path / "model.json").write_text(json.dumps({"format": "cdc_plugin", "version": 1, "backbone": record}))
    assert load_backbone(tmp_path / "model.safetensors").input_size == 518  # our own file states what it takes


def test_settings_of_a_run_choose_the_size_but_a_recipe_does_not(tmp_path):
    path = str(saved(tmp_path / "a.pth", created("test_vit", num_classes=0)))
    asked = open_network(RefineConfig(backbone=path, input_size=96), None).backbone
    assert features(asked, 96).shape == (2, 64)
    by_recipe = RefineConfig(backbone=path, input_size=96, from_recipe=["input_size"])
    assert open_network(by_recipe, None).backbone.input_size == 160
    assert features(open_network(RefineConfig(input_size=96), load_backbone(path)).backbone, 96).shape == (2, 64)


def test_transformer_of_torchvision_is_resized(tmp_path):
    network = with_noise(VisionTransformer(32, 16, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=96))
    network.heads = nn.Identity()
    path = saved(tmp_path / "a.pth", named("backbone.", network))
    assert features(load_backbone(path, input_size=64), 64).shape == (2, 192)


def test_target_encoder_of_ijepa_has_no_class_token_and_is_averaged(tmp_path):
    settings = {"class_token": False, "global_pool": "avg", "fc_norm": False, "depth": 1, "img_size": 28}
    network = with_noise(timm.create_model("vit_huge_patch14_224", num_classes=0, **settings))
    encoder = {f"module.{key}": value + 1 for key, value in network.state_dict().items()}
    payload = {"encoder": encoder, "target_encoder": named("module.", network), "predictor": {"module.a": TOKEN}}
    found = loaded(saved(tmp_path / "a.pth.tar", payload), network, 28, partial=True)
    assert "I-JEPA" in found.origin.why["features"]


def test_xcit_under_its_authors_names_is_recognised(tmp_path):
    network = created("xcit_nano_12_p16_224", num_classes=0)
    state = network.state_dict()
    for key in [key for key in state if ".attn.q." in key]:
        parts = [state.pop(key.replace(".q.", f".{part}.")) for part in "qkv"]
        state[key.replace(".q.", ".qkv.")] = torch.cat(parts)
    payload = {"teacher": named("backbone.", state), "student": named("module.backbone.", state)}
    loaded(saved(tmp_path / "a.pth", payload), network, 64)
    loaded(saved(tmp_path / "b.pth", state), network, 64)
