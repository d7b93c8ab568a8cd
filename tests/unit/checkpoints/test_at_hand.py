"""Backbones in the caches of a machine, for whoever names none."""

from pathlib import Path

import pytest

from cdc_plugin.checkpoints.at_hand import LARGE, choose_at_hand
from cdc_plugin.checkpoints.read import locate
from cdc_plugin.errors import UserError


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    weights = {}
    monkeypatch.setattr("cdc_plugin.checkpoints.at_hand.find_cached_weights", weights.get)

    def add(name, size, config='{"model_type": "dinov2"}'):
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        folder.mkdir()
        weights[name] = folder / "model.safetensors"
        (folder / "config.json").write_text(config)
        with weights[name].open("wb") as file:
            file.truncate(size)

    return tmp_path, add


def test_best_backbone_of_the_caches_is_taken_and_none_says_what_to_type(caches):
    folder, add = caches
    with pytest.raises(UserError, match=r"backbone='hf-hub:.*cdc-pretrain"):
        choose_at_hand()
    add("somebody/bert-base", 10)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "resnet50-0676ba61.pth").write_bytes(b"a")
    assert choose_at_hand() == (str(folder / "checkpoints" / "resnet50-0676ba61.pth"), [])
    for name, size in {"a/dinov2-small": 10, "a/dinov2-base": 20, "a/dinov2-giant": LARGE + 1, "b/clip": 9}.items():
        add(name, size)
    add("a/dinov3-of-another-kind", 10, '{"model_type": "some_dinov3"}')
    add("a/dinov3-with-code", 10, '{"model_type": "dinov3_vit", "auto_map": {"AutoModel": "a.b"}}')
    add("timm/siglip", 10, '{"architecture": "vit_base_patch16_siglip_224"}')
    chosen, others = choose_at_hand()
    assert chosen == "hf-hub:a/dinov2-base"
    assert others[:3] == ["hf-hub:a/dinov2-small", "hf-hub:a/dinov2-giant", "hf-hub:timm/siglip"]
    assert not any("dinov3" in name for name in others)


@pytest.mark.parametrize(
    ("typed", "advice"), [("resnet18", "timm:resnet18"), ("facebook/dinov2-small", "hf-hub:facebook/dinov2-small")]
)
def test_name_that_is_no_file_gets_the_way_to_type_it(tmp_path, monkeypatch, typed, advice):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=advice):
        locate(Path(typed))
