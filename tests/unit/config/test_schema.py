import dataclasses
import math

import pytest
import yaml

from cdc_plugin.config.load import load_config, to_yaml
from cdc_plugin.config.recipes import recipe_names, recipe_summary
from cdc_plugin.config.schema import RefineConfig, batch_sizes, check, resolve, sub_batches
from cdc_plugin.errors import UserError


def test_later_layers_win_over_earlier_ones(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("clusters: 3\nepochs: 7\nseed: 1\naugment:\n  flip: false\n  operations: 2\n")
    config = load_config(recipe, {"epochs": 8, "seed": 2, "clusters": None}, ["seed=3", "augment.operations=1"])
    assert (config.clusters, config.epochs, config.seed) == (3, 8, 3)
    assert config.augment.flip is False
    assert config.augment.operations == 1
    assert config.hidden == RefineConfig().hidden


def test_nested_flags_and_paths_are_taken(tmp_path):
    config = load_config(None, {"augment": {"flip": False, "exclude": ["solarize"]}, "out": tmp_path})
    assert config.augment.flip is False
    assert config.augment.exclude == ["solarize"]
    assert config.out == str(tmp_path)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("epoch=3", "unknown key 'epoch'; did you mean epochs?"),
        ("mini_cluster=3", "did you mean mini_clusters?"),
        ("augment.flips=true", "unknown key 'augment.flips'; did you mean augment.flip?"),
        ("zzz=1", "known keys: .*clusters"),
        ("clusters", "expected key=value, found 'clusters'"),
        ("clusters=many", "key=value: .*clusters"),
        ("hidden=1.5", "hidden"),
    ],
)
def test_wrong_words_name_the_nearest_right_one(word, message):
    with pytest.raises(UserError, match=message) as refusal:
        load_config(overrides=[word])
    assert "\n" not in str(refusal.value)


def test_unknown_keys_of_a_recipe_and_of_the_api_are_refused_too(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("batchsize: 3\n")
    with pytest.raises(UserError, match=r"mine\.yaml: unknown key 'batchsize'; did you mean batch_size"):
        load_config(recipe)
    with pytest.raises(UserError, match="unknown key 'lr_head'; did you mean lr_heads"):
        load_config(flags={"lr_head": 1e-3})


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "\tclusters: 3", "just words"])
def test_files_that_are_no_recipe_are_refused(tmp_path, text):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml"):
        load_config(recipe)


def test_an_empty_recipe_changes_nothing(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("")
    assert load_config(recipe) == RefineConfig()


def test_a_recipe_cannot_run_code(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("backbone: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(recipe)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="no recipe 'cifar1O': did you mean 'cifar10'"):
        load_config("cifar1O")


def test_every_shipped_recipe_has_a_summary():
    assert {"default", "digits", "cifar10"} <= set(recipe_names())
    assert all(recipe_summary(name) for name in recipe_names())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": 1}, "clusters must be at least 2, found 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"sub_batch_size": 1}, "at least 2: BatchNorm"),
        ({"epochs": -1}, "epochs must be 0 or more"),
        ({"lr_heads": -0.1}, "lr_heads must lie between"),
        ({"lr_backbone": math.nan}, "lr_backbone must lie between"),
        ({"schedule": "linear"}, "schedule is one of cosine, constant"),
        ({"precision": "float8"}, "precision is one of"),
        ({"mean": [0.5]}, "mean takes 3 numbers"),
        ({"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_values_that_no_run_can_use_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check(dataclasses.replace(RefineConfig(), **changes))


def test_yaml_of_a_config_reads_back_as_the_same_config(tmp_path):
    config = load_config("cifar10", {"out": "a folder/ä", "seed": 3, "backbone": "b: c.pt"})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["clusters"] == 10


@pytest.mark.parametrize("images", [4, 5, 7, 60, 200, 999, 1797, 13_000, 60_000, 1_000_000])
@pytest.mark.parametrize("clusters", [2, 3, 10, 37, 200])
@pytest.mark.parametrize("input_size", [32, 224])
def test_every_open_number_is_filled_in_within_its_bounds(images, clusters, input_size):
    config = RefineConfig(clusters=clusters)
    if images < clusters:
        with pytest.raises(UserError, match="fewer --clusters"):
            resolve(config, images, input_size)
        return
    found = resolve(config, images, input_size)
    assert found.batch_size is not None
    assert found.sub_batch_size is not None
    assert found.epochs is not None
    assert clusters <= found.batch_size <= images
    assert 2 <= found.sub_batch_size <= found.batch_size
    # Left open, it follows the confidence of every batch.
    assert found.mini_clusters is None or 1 <= found.mini_clusters <= found.batch_size
    assert found.epochs >= 1
    assert 0 < found.lr_backbone < 0.1
    assert 0 < found.lr_heads < 0.1
    assert found.input_size == input_size
    check(found)
    # Selection refuses a batch with fewer images than clusters, in whatever epoch it comes.
    assert min(batch_sizes(images, found.batch_size)) >= clusters
    assert resolve(found, images, input_size) == found


def test_numbers_that_are_given_are_kept():
    given = RefineConfig(
        clusters=5, batch_size=50, sub_batch_size=20, mini_clusters=9, epochs=6, lr_heads=0.0, lr_backbone=1e-6
    )
    assert resolve(given, 1000, 32) == dataclasses.replace(given, input_size=32)


@pytest.mark.parametrize(("epochs", "views"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_no_more_views_of_frozen_images_are_kept_than_epochs_look_at(epochs, views):
    assert resolve(RefineConfig(clusters=2, epochs=epochs), 60, 32).frozen_views == views


def test_sizes_beyond_the_data_are_cut_to_it():
    found = resolve(RefineConfig(clusters=2, batch_size=1000, sub_batch_size=500, mini_clusters=400), 60, 32)
    assert (found.batch_size, found.sub_batch_size, found.mini_clusters) == (60, 60, 60)


def test_a_batch_below_the_number_of_clusters_is_refused_with_advice():
    with pytest.raises(UserError, match="batch_size=40 or more"):
        resolve(RefineConfig(clusters=10, batch_size=8), 1000, 32)


@pytest.mark.parametrize(("images", "batch", "clusters"), [(14, 4, 4), (7, 2, 2), (1400, 400, 400)])
def test_no_batch_of_an_epoch_falls_below_the_number_of_clusters(images, batch, clusters):
    found = resolve(RefineConfig(clusters=clusters, batch_size=batch), images, 32)
    assert min(batch_sizes(images, found.batch_size or 1)) >= clusters


def test_batches_by_hand():
    assert batch_sizes(10, 4) == [5, 5]
    assert batch_sizes(11, 4) == [4, 4, 3]
    assert batch_sizes(3, 10) == [3]


def test_batches_hold_every_image_once_and_are_near_equal():
    for images in [*range(4, 120), 1797, 13_000, 999_999]:
        for batch in (2, 3, 7, 50, 64, 1000):
            sizes = batch_sizes(images, min(batch, images))
            assert sum(sizes) == images
            assert max(sizes) - min(sizes) <= 1


def test_sub_batches_never_hold_a_single_image():
    for images in range(2, 150):
        for part in range(2, 70):
            count = sub_batches(images, part)
            assert count >= 1
            assert images // count >= 2  # near-equal parts: the smallest has the floor
    assert sub_batches(1, 5) == 1
