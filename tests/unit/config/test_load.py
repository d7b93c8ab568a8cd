import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from cdc_plugin.config.load import FOUND_BETWEEN, keep_allowed, load_config, to_yaml
from cdc_plugin.config.schema import METHOD_SETTINGS, RECIPE_SETTINGS, RefineConfig
from cdc_plugin.errors import ConfigError


@pytest.fixture
def write_recipe(tmp_path):
    def write(text):
        (tmp_path / "mine.yaml").write_text(text)
        return tmp_path / "mine.yaml"

    return write


def test_later_layers_win_over_earlier_ones(write_recipe):
    recipe = write_recipe("clusters: 3\nepochs: 7\nseed: 1\naugment:\n  flip: false\n  operations: 2\n")
    config = load_config(
        recipe,
        {"epochs": 8, "seed": 2, "clusters": None},
        ["seed=3", "augment.operations=1"],
        {"clusters": 4, "data": "photos", "augment": {"cutout": 5}},
    )
    assert (config.clusters, config.epochs, config.seed, config.data) == (3, 8, 3, "photos")
    assert (config.augment.flip, config.augment.operations, config.augment.cutout) == (False, 1, 5)
    assert config.hidden == RefineConfig().hidden
    assert load_config(write_recipe("")) == RefineConfig()
    config = load_config(None, {"augment": {"flip": False, "exclude": ["solarize"]}, "out": recipe})
    assert (config.augment.flip, config.augment.exclude, config.out) == (False, ["solarize"], str(recipe))


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("epoch=3", ["'epoch'", "epochs"]),
        ("mini_cluster=3", ["mini_clusters"]),
        ("lr=0.1", ["'lr'", "lr_heads", "lr_backbone"]),
        ("flip=false", ["augment.flip"]),
        ("augment.flips=true", ["'augment.flips'", "augment.flip"]),
        ("augment=3", ["augment.flip"]),
        ("zzz=1", ["clusters", "augment.cutout"]),
        ("clusters", ["key=value", "'clusters'"]),
        ("clusters=many", ["clusters", "whole number", "'many'"]),
        ("clusters=1", ["at least 2", "found 1"]),
        ("hidden=1.5", ["hidden", "1.5"]),
        ("hidden=0", ["hidden", "at least 1"]),
        ("batch_size=0", ["batch_size", "at least 1"]),
        ("sub_batch_size=1", ["at least 2", "BatchNorm"]),
        ("epochs=-1", ["epochs", "at least 0"]),
        ("lr_heads=-0.1", ["lr_heads", "at least 0"]),
        ("lr_backbone=nan", ["lr_backbone", "at most 10"]),
        ("threshold=1.1", ["threshold", "at most 1"]),
        ("augment.crop_scale=0", ["augment.crop_scale", "above 0"]),
        ("schedule=linear", ["cosine", "constant", "'linear'"]),
        ("precision=float8", ["float32", "bfloat16", "did you mean"]),
        ("mean=[0.5]", ["mean", "3 numbers"]),
        ("out=${nowhere}", ["nowhere"]),
    ],
)
def test_a_wrong_word_is_refused_in_one_line_with_what_is_right(word, facts):
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=[word])
    assert "\n" not in str(refusal.value)
    assert all(fact in str(refusal.value) for fact in facts), str(refusal.value)


def test_all_that_is_wrong_is_reported_at_once(write_recipe):
    recipe = write_recipe("batchsize: 3\nepochs: -1\n")
    with pytest.raises(ValueError) as refusal:
        load_config(recipe, {"lr_head": 1e-3}, ["clusters=many", "passes=slow"])
    first, *lines = str(refusal.value).splitlines()
    assert "5" in first
    facts = ["mine.yaml.*did you mean batch_size", "did you mean lr_heads", "clusters", "passes", "mine.yaml.*epochs"]
    assert len(lines) == len(facts)
    assert all(re.search(fact, line) for fact, line in zip(facts, lines, strict=True))


CODE = "backbone: !!python/object/apply:os.getcwd []\n"


def test_of_very_many_mistakes_some_are_told():
    with pytest.raises(ConfigError) as refusal:
        load_config(defaults={f"name{number}": 1 for number in range(10_000)})
    assert len(str(refusal.value).splitlines()) < 100


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "\tclusters: 3", "just words", CODE])
def test_files_that_are_no_recipe_or_would_run_code_are_refused(write_recipe, text):
    with pytest.raises(ConfigError, match=r"mine\.yaml is not valid YAML" if text == CODE else r"mine\.yaml"):
        load_config(write_recipe(text))


@pytest.mark.parametrize("stated", [{"flags": {"mean": [0.5] * 3}}, {"overrides": ["mean=[0.5,0.5,0.5]"]}])
def test_what_a_recipe_says_of_the_input_is_told_from_what_the_user_says(stated):
    assert load_config("cifar10").from_recipe == ["mean", "std", "input_size"]
    assert load_config("cifar10", **stated).from_recipe == ["std", "input_size"]
    assert load_config(**stated).from_recipe == []


def test_yaml_of_a_config_reads_back_as_the_same_config(tmp_path):
    config = load_config("cifar10", {"data_root": Path("a folder/ä"), "seed": 3, "backbone": "b: c.pt"})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["clusters"] == 10


GUARDED = {
    "trust_checkpoint": True,
    "partial_weights": True,
    "out": "elsewhere",
    "track": ["wandb"],
    "device": "cuda:7",
}


@pytest.mark.parametrize("name", GUARDED)
def test_what_lowers_a_guard_is_taken_from_the_caller_and_never_from_a_file(tmp_path, name, caplog):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({name: GUARDED[name], "epochs": 7}))
    config = load_config(recipe)
    assert (getattr(config, name), config.epochs) == (getattr(RefineConfig(), name), 7)
    assert (name in caplog.text) == (name not in ("out", "device"))
    assert getattr(load_config(recipe, {name: GUARDED[name]}), name) == GUARDED[name]
    assert keep_allowed({name: GUARDED[name], "epochs": 7}, METHOD_SETTINGS, "args.json") == {"epochs": 7}


def test_every_setting_is_either_allowed_in_a_file_or_guarded():
    assert {item.name for item in fields(RefineConfig)} == {*RECIPE_SETTINGS, *GUARDED}


@pytest.mark.parametrize(
    "word",
    [
        *(
            "epochs=[",
            "epochs=!!bool maybe",
            "mean=[0.5,0.5,0.5",
            "epochs=???",
            "seed=${epochs",
            "epochs==",
            "augment.flip=[1",
            "track=[a",
        ),
        *("epochs=${oc.env:HOME}", "backbone=${oc.env:HOME}", "backbone=${data}${data}", "track=['${oc.env:HOME}']"),
        *("mean=[" + "[" * 3000, "epochs=" + "9" * 5000, "epochs=0x" + "f" * 5000, "std=[.inf,1,1]", "mean=[.nan,0,0]"),
        *("mean=[[1],2,3]", "augment.exclude=[" + "x," * 200 + "]"),
        *("clusters=1" + "0" * 30, "seed=1" + "0" * 30, "x" * 10_000 + "=1", "augment.operations=1000000"),
    ],
    ids=lambda word: word[:20],
)
def test_a_word_that_cannot_be_used_is_refused_in_a_short_line_that_tells_nothing_of_the_machine(word):
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=[word])
    assert len(str(refusal.value)) < 1000
    assert "\n" not in str(refusal.value)
    assert str(Path.home()) not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
        *("labels: !!bool maybe", "epochs: !!python/object/apply:os.getcwd []", "[" * 150_000, "a: " + "{a: " * 5000),
        *("selection: ${oc.env:HOME}", "epochs: ???", "epochs: ${epochs", "# " + "x" * 300_000, "epochs: 1\0"),
    ],
    ids=lambda text: text[:20],
)
def test_a_recipe_that_is_no_plain_list_of_settings_is_refused(tmp_path, text):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match="recipe"):
        load_config(recipe)


def test_a_setting_may_refer_to_another_one(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("epochs: 7\nseed: ${epochs}\n")
    assert load_config(recipe).seed == 7


def test_auto_takes_the_place_of_a_number_and_a_number_that_of_auto(write_recipe):
    assert load_config(None, {"clusters": "auto"}).clusters_between == list(FOUND_BETWEEN)
    found = load_config(write_recipe("clusters: 10"), {"clusters": "auto:3-9"})
    assert (found.clusters, found.clusters_between) == (None, [3, 9])
    found = load_config(write_recipe("clusters: auto"), {}, ["clusters=7"])
    assert (found.clusters, found.clusters_between) == (7, None)
    found = load_config(write_recipe("clusters: auto"), {"clusters": "8"})
    assert (found.clusters, found.clusters_between) == (8, None)
    # What a run stores: the number that was found, and where it was looked for.
    found = load_config(write_recipe("clusters: 7\nclusters_between: [2, 50]"))
    assert (found.clusters, found.clusters_between) == (7, [2, 50])


@pytest.mark.parametrize("word", ["auto:9-3", "auto:1-5", "auto:2-", "auto:2-5000", "automatic", "ten", "auto:5-5"])
def test_a_range_that_is_none_is_refused_with_what_is_right(word):
    with pytest.raises(ConfigError, match="clusters"):
        load_config(None, {"clusters": word})
