import dataclasses

import pytest

from cdc_plugin.config.schema import RefineConfig, batch_sizes, resolve, settings_table, sub_batches, walk_fields
from cdc_plugin.errors import UserError
from cdc_plugin.training.pretext.config import PretrainConfig
from tests.helpers import ROOT


def test_the_readme_shows_the_settings_as_the_schema_has_them():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, rest = readme.split("<!-- settings -->\n")
    table, _ = rest.split("\n<!-- end of settings -->")
    assert table == settings_table()


@pytest.mark.parametrize("schema", [RefineConfig, PretrainConfig])
def test_every_setting_has_a_help_and_every_number_or_name_says_what_stands_for_none(schema):
    for name, item in walk_fields(schema):
        assert item.metadata["help"] or name == "from_recipe"
        assert "\n" not in item.metadata["help"]
        assert "|" not in item.metadata["help"] + item.metadata["auto"], "would break the Markdown table"


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
