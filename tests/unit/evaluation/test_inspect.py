"""The checkpoint doctor, in Python and as a command."""

import json

import pytest
import torch

from cdc_plugin.cli import inspect as cli_inspect
from cdc_plugin.config.recipes import demo_settings
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import ConfigError, UserError
from cdc_plugin.evaluation.inspect import (
    build_random_twin,
    choose_image_count,
    compare_neighbours,
    inspect,
    measure_neighbours,
    measure_spread,
)
from tests.helpers.json_records import check_record

DEMO = demo_settings()["backbone"]


@pytest.fixture(scope="module")
def examined(digits):
    return inspect(DEMO, digits[0], device="cpu")


def test_a_device_that_is_not_there_is_refused_although_no_image_asks_for_it():
    with pytest.raises(ConfigError, match="'gpu' cannot be used here"):
        inspect(DEMO, device="gpu")


def broken(tiny_checkpoint, folder):
    """A state dict with one name misspelt and one weight of another shape."""
    state = torch.load(tiny_checkpoint, weights_only=True)
    state["layer2.0.conv2.weights"] = state.pop("layer2.0.conv2.weight")
    state["layer4.0.bn2.bias"] = torch.zeros(5)
    path = folder / "broken.pt"
    torch.save(state, path)
    return path


def run(capsys, *arguments):
    code = 0
    try:
        cli_inspect.inspect_command([str(word) for word in arguments])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_facts_of_a_bare_state_dict_say_what_is_assumed_and_why(tiny_checkpoint, tiny_backbone):
    found = inspect(tiny_checkpoint)
    assert found["parameters"] == sum(p.numel() for p in tiny_backbone.parameters())
    assert found["loadable"]
    assert found["error"] is None
    assert (found["format"], found["feature_dim"], found["heads"]) == ("torchvision", 8, [])
    assert found["weights"]["matched"] == 1.0
    assert found["file"]["bytes"] == tiny_checkpoint.stat().st_size
    assert {"mean", "std", "input_size"} <= set(found["input"]["inferred"])
    assert {"mean", "std", "input_size"} <= set(found["why"])
    assert found["branches"] == ["online"]
    assert "images" not in found


def test_weights_that_do_not_fit_are_all_listed_with_their_neighbours(tiny_checkpoint, tmp_path):
    found = inspect(broken(tiny_checkpoint, tmp_path))
    assert not found["loadable"]
    weights = found["weights"]
    assert weights["missing"] == [{"name": "layer2.0.conv2.weight", "near": "layer2.0.conv2.weights"}]
    assert weights["unexpected"] == [{"name": "layer2.0.conv2.weights", "near": "layer2.0.conv2.weight"}]
    assert weights["misshapen"] == [{"name": "layer4.0.bn2.bias", "found": [5], "expected": [8]}]
    assert 0.9 < weights["matched"] < 1


def test_what_cannot_be_loaded_is_reported_not_raised(tiny_checkpoint, tmp_path):
    path = tmp_path / "notes.pth"
    path.write_text("these are notes")
    for found, words in ((inspect(path), "text"), (inspect(tiny_checkpoint, arch="no_such_net"), "no_such_net")):
        assert not found["loadable"]
        assert words in found["error"]


def test_images_fit_a_backbone_that_was_trained_on_them_and_keep_neighbours(examined):
    found = examined["images"]
    assert found["batchnorm"]["verdict"] == "fits"
    assert found["batchnorm"]["variants"][0]["changed"] == {}
    assert not found["features"]["collapsed"]
    near = found["neighbours"]
    assert near["better"] is True
    assert near["trained"]["kept"] > 2 * near["random"]["kept"]
    assert near["trained"]["found"] > 2 * near["random"]["found"]


def test_untrained_network_is_not_better_than_random_weights_which_leave_the_random_state_alone(tiny_backbone, digits):
    pixels = torch.from_numpy(digits[0][:100]).permute(0, 3, 1, 2)
    before = torch.get_rng_state()
    first, second = build_random_twin(tiny_backbone, pixels), build_random_twin(tiny_backbone, pixels)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.module.conv1.weight, second.module.conv1.weight)
    _, comparison = compare_neighbours(first, pixels)
    assert comparison.better is False
    assert "better than random weights" in comparison.words


def test_few_images_give_no_verdict_on_neighbours_and_hardly_any_are_refused(tiny_checkpoint, digits):
    found = inspect(tiny_checkpoint, digits[0][:16], device="cpu")["images"]
    assert found["batchnorm"]["verdict"] == "untrained"
    assert found["neighbours"]["better"] is None
    assert "too few" in found["neighbours"]["words"]
    with pytest.raises(UserError, match="2 readable images"):
        inspect(tiny_checkpoint, digits[0][:2], device="cpu")


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (torch.ones(40, 6) + 1e-4 * torch.eye(40, 6), "nearly the same"),
        (torch.linspace(-1, 1, 40)[:, None] * torch.arange(1.0, 7), "single line"),
        (torch.cat([torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.ones(40, 6)], 1), "75%"),
    ],
)
def test_collapse_is_told_by_its_kind(features, words):
    found = measure_spread(features)
    assert found.collapsed
    assert words in found.words


def test_gaussian_features_use_their_whole_space(randomness):
    found = measure_spread(torch.randn(2000, 5, generator=randomness))
    assert found.effective_rank == pytest.approx(5, abs=0.05)
    assert found.dead_dimensions == 0
    assert found.mean_cosine == pytest.approx(0, abs=0.01)
    assert found.spread == pytest.approx(1, abs=0.01)
    assert found.words == "not collapsed"


def test_neighbours_kept_are_counted_by_hand():
    angles = torch.tensor([0.0, 10.0, 90.0, 100.0]).deg2rad()
    moved = torch.tensor([0.0, 60.0, 90.0, 100.0]).deg2rad()  # the second now lies nearest to the third
    features, views = (torch.stack([a.cos(), a.sin()], dim=1) for a in (angles, moved))
    found = measure_neighbours(features, views, 1)
    assert (found.kept, found.found) == (0.75, 0.75)


def test_slow_network_is_shown_fewer_images(tiny_backbone, digits, monkeypatch):
    pixels = torch.from_numpy(digits[0]).permute(0, 3, 1, 2)
    clock = iter([0.0, 8.0])
    monkeypatch.setattr("cdc_plugin.evaluation.inspect.time.monotonic", lambda: next(clock))
    assert choose_image_count(tiny_backbone, pixels) == 62


def test_command_prints_aligned_facts_on_one_screen(capsys, examined, monkeypatch):
    monkeypatch.setattr("cdc_plugin.evaluation.inspect.inspect", lambda *_, **__: examined)
    code, out, err = run(capsys, DEMO)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 30
    assert all(line == "" or line[13] == " " for line in lines)
    assert "better than random weights" in out
    assert "2 (linear-batchnorm-relu-linear)" in out or "heads         none" in out


def test_json_has_the_same_content(capsys, tiny_checkpoint):
    code, out, _ = run(capsys, tiny_checkpoint, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(inspect(tiny_checkpoint)))
    check_record(json.loads(out), "inspection")


def test_weights_that_do_not_fit_end_with_code_2_and_a_list(capsys, tiny_checkpoint, tmp_path):
    path = broken(tiny_checkpoint, tmp_path)
    code, out, err = run(capsys, path)
    assert code == 2
    assert "layer2.0.conv2.weight   (near: layer2.0.conv2.weights)" in out
    assert "layer4.0.bn2.bias   found 5, expected 8" in out
    assert len(err.splitlines()) == 1
    code, out, _ = run(capsys, path, "--json")
    assert code == 2
    assert json.loads(out)["loadable"] is False
    check_record(json.loads(out), "inspection")
    code, out, err = run(capsys, tmp_path / "none.pt")
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_folder_is_sampled_and_unreadable_images_are_counted(tiny_checkpoint, tmp_path, digits, write_images):
    folder = write_images(tmp_path / "photos", digits[0][:12])
    (folder / "zz.png").write_bytes(b"broken")
    found = inspect(tiny_checkpoint, str(folder), device="cpu")["images"]
    assert (found["count"], found["skipped"], found["size"]) == (12, 1, 32)


def test_arrays_are_read_to_the_limit(digits):
    found = open_images(digits[0], 32, limit=5)
    assert len(found) == 5
    assert (found.images[-1] == digits[0][-1]).all()
