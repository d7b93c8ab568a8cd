"""Heads of TEMI and TURTLE on embeddings: chances as their own code computes them, and what is refused."""

import argparse

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cdc_plugin
from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.errors import UserError
from tests.helpers.checkpoint_builders.networks import with_noise

WIDTH, CLUSTERS = 6, 3
ROWS = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(0))


class Head(nn.Module):
    """A head as TEMI names it: layers, and cosines with directions of some length."""

    def __init__(self, layers):
        super().__init__()
        self.mlp = layers
        self.last_layer = nn.utils.weight_norm(nn.Linear(4, CLUSTERS, bias=False))

    def forward(self, rows):
        return self.last_layer(F.normalize(self.mlp(rows), dim=1))


def deep(batchnorm=False, dropout=False, final=False):
    layers = [nn.Linear(WIDTH, 5), *([nn.BatchNorm1d(5)] if batchnorm else []), nn.GELU()]
    layers += [nn.Dropout(0.5)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(5, 4), *([nn.GELU()] if final else []))


def temi(folder, make, epoch=5, more=None, **args):
    """Write a checkpoint of three heads with the second as the best; return the file and that head."""
    heads = nn.ModuleList(with_noise(Head(make()), seed=number).eval() for number in range(3))
    state = {f"head.heads.{key}": value for key, value in heads.state_dict().items()}
    state |= {"embed_mean": ROWS.mean(dim=0), "embed_std": ROWS.std(dim=0), "head.best_head_idx": torch.tensor(1)}
    state |= more or {}
    payload = {"student": {**state, "embed_mean": torch.zeros(WIDTH)}, "teacher": state, "epoch": epoch}
    torch.save({**payload, "args": argparse.Namespace(arch="clip_ViT-B/32", **args)}, folder / "checkpoint.pth")
    return folder / "checkpoint.pth", heads


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "args"),
    [
        (deep, {}),
        (lambda: nn.Linear(WIDTH, 4), {"teacher_temp": 0.05}),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU()), {"head_final_gelu": True}),
        (lambda: deep(batchnorm=True, dropout=True), {"l2_norm": True}),
        (lambda: deep(dropout=True, final=True), {"head_final_gelu": True}),
    ],
)
def test_best_head_of_temi_gives_its_own_chances(tmp_path, make, args):
    file, heads = temi(tmp_path, make, **args)
    rows = (ROWS - ROWS.mean(dim=0)) / ROWS.std(dim=0)
    rows = F.normalize(rows, dim=1) if "l2_norm" in args else rows
    model = load_model(file)
    with torch.no_grad():
        logits = heads[1](rows) / args.get("teacher_temp", 0.1)
        torch.testing.assert_close(model.calibration_head(model.backbone(ROWS)), logits, rtol=1e-4, atol=1e-5)
    found = load_checkpoint(file, wanted=Wanted(head=2, branch="online"))
    with torch.no_grad():
        rows = ROWS / ROWS.std(dim=0)
        rows = F.normalize(rows, dim=1) if "l2_norm" in args else rows
        logits = heads[2](rows) / args.get("teacher_temp", 0.1)
        torch.testing.assert_close(found.heads[0].eval()(found.backbone(ROWS)), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_temi_without_a_best_head_asks_for_one(tmp_path):
    file, _ = temi(tmp_path, deep, epoch=0)
    with pytest.raises(UserError, match="head=0"):
        load_model(file)
    assert load_model(file, head=2).clusters == CLUSTERS


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("more", "args", "message"),
    [
        ({"backbone.conv1.weight": torch.ones(2, 2)}, {}, r"clip_ViT-B/32.*timm:NAME"),
        ({"embed_std": torch.zeros(WIDTH)}, {}, "std above 0"),
        ({"embed_mean": torch.zeros(WIDTH + 1)}, {}, "embed_mean and embed_std of 6 numbers"),
        ({"head.heads.1.last_layer.weight_v": torch.ones(CLUSTERS, 7)}, {}, "linear layer with 4 inputs"),
        ({"head.heads.1.last_layer.weight_g": torch.ones(7)}, {}, "lacks the weights of its last layer"),
        ({"head.heads.1.mlp.x.weight": torch.ones(7)}, {}, "unknown kind"),
        ({"head.heads.1.mlp.2.weight": torch.ones(4, 9)}, {}, "linear layer with 5 inputs"),
        ({}, {"teacher_temp": 0.0}, "teacher_temp lies between"),
    ],
)
def test_broken_heads_of_temi_are_refused_in_one_line(tmp_path, more, args, message):
    with pytest.raises(UserError, match=message) as refusal:
        load_checkpoint(temi(tmp_path, deep, more=more, **args)[0])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("spaces", [[6], [4, 2]])
def test_heads_of_turtle_give_the_mean_of_the_chances_of_the_spaces(tmp_path, spaces):
    layers = [with_noise(nn.Linear(size, CLUSTERS), seed=size) for size in spaces]
    torch.save({f"phi{place + 1}": layer.state_dict() for place, layer in enumerate(layers)}, tmp_path / "turtle.pt")
    model = load_model(tmp_path / "turtle.pt")
    with torch.no_grad():
        parts = zip(layers, ROWS.split(spaces, dim=1), strict=True)
        expected = torch.stack([layer(part).softmax(dim=1) for layer, part in parts]).mean(dim=0)
        torch.testing.assert_close(model.calibration_head(model.backbone(ROWS)).softmax(dim=1), expected)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"phi1": {"weight": torch.ones(3, 4)}}, "weight and bias of each space"),
        ({"phi1": nn.Linear(4, 3).state_dict(), "phi2": nn.Linear(4, 2).state_dict()}, "as many clusters"),
        ({"phi1": {"weight": torch.ones(3, 4), "bias": torch.ones(2)}}, "does not fit"),
    ],
)
def test_broken_heads_of_turtle_are_refused_in_one_line(tmp_path, payload, message):
    torch.save(payload, tmp_path / "turtle.pt")
    with pytest.raises(UserError, match=message) as refusal:
        load_checkpoint(tmp_path / "turtle.pt")
    assert "\n" not in str(refusal.value)


def test_old_heads_are_evaluated_inspected_and_refined_on_embeddings(tmp_path):
    spaces = [np.concatenate([ROWS[:, :4].numpy() + 9 * k for k in range(3)]), np.tile(ROWS[:, 4:].numpy(), (3, 1))]
    layers = [nn.Linear(size, CLUSTERS) for size in (4, 2)]
    torch.save({f"phi{place + 1}": layer.state_dict() for place, layer in enumerate(layers)}, tmp_path / "turtle.pt")
    assert cdc_plugin.inspect(tmp_path / "turtle.pt")["input"] is None
    before = cdc_plugin.evaluate(tmp_path / "turtle.pt", features=spaces, out=tmp_path / "evaluated")
    assert len(before.predictions) == 180
    report = cdc_plugin.refine(tmp_path / "turtle.pt", features=spaces, out=tmp_path / "run", epochs=1)
    assert report.metrics["old_model"]["agreement_before"] == 1.0
    with pytest.raises(UserError, match=r"takes features of 4 \+ 2 numbers"):
        cdc_plugin.evaluate(tmp_path / "turtle.pt", features=spaces[0], out=tmp_path / "other")
