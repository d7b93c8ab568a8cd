"""Every open choice of a run, made from the size of the data and the backbone."""

import pytest

from cdc_plugin.config.load import load_config
from cdc_plugin.config.resolve import Facts, batch_sizes, choose_init, count_sub_batches, resolve
from cdc_plugin.config.schema import AugmentConfig, RefineConfig
from cdc_plugin.errors import ConfigError, UserError


def facts(image_count: int, input_size: int, **more) -> Facts:
    return Facts(image_count, input_size, [0.5] * 3, [0.25] * 3, **more)


@pytest.mark.parametrize("images", [4, 5, 7, 60, 200, 999, 1797, 13_000, 60_000, 1_000_000])
@pytest.mark.parametrize("clusters", [2, 3, 10, 37, 200])
@pytest.mark.parametrize("input_size", [32, 224])
def test_every_open_number_is_filled_in_within_its_bounds(images, clusters, input_size):
    config = RefineConfig(clusters=clusters)
    if images < clusters:
        with pytest.raises(UserError, match="fewer clusters"):
            resolve(config, facts(images, input_size))
        return
    found = resolve(config, facts(images, input_size))
    assert clusters <= found.batch_size <= images
    assert 2 <= found.sub_batch_size <= found.batch_size
    assert found.mini_clusters == 0  # it follows the confidence of every batch
    assert found.epochs >= 1
    assert 0 < found.lr_backbone < 0.1
    assert 0 < found.lr_heads < 0.1
    assert found.input_size == input_size
    # Selection refuses a batch with fewer images than clusters, in whatever epoch it comes.
    assert min(batch_sizes(images, found.batch_size)) >= clusters
    assert resolve(found, facts(images, input_size)) == found


def test_numbers_that_are_given_are_kept():
    given = RefineConfig(
        clusters=5, batch_size=50, sub_batch_size=20, mini_clusters=9, epochs=6, lr_heads=0.0, lr_backbone=1e-6
    )
    resolved = resolve(given, facts(1000, 32))
    names = ("clusters", "batch_size", "sub_batch_size", "mini_clusters", "epochs", "lr_heads", "lr_backbone")
    assert {name: getattr(resolved, name) for name in names} == {name: getattr(given, name) for name in names}


@pytest.mark.parametrize(("epochs", "views"), [(0, 1), (1, 1), (3, 3), (9, 4)])
def test_no_more_views_of_frozen_images_are_kept_than_epochs_look_at(epochs, views):
    assert resolve(RefineConfig(clusters=2, epochs=epochs), facts(60, 32)).frozen_views == views


def test_sizes_beyond_the_data_are_cut_to_it_and_a_batch_below_the_number_of_clusters_is_refused():
    found = resolve(RefineConfig(clusters=2, batch_size=1000, sub_batch_size=500, mini_clusters=40), facts(60, 32))
    assert (found.batch_size, found.sub_batch_size, found.mini_clusters) == (60, 60, 40)
    with pytest.raises(UserError, match="batch_size=40 or more"):
        resolve(RefineConfig(clusters=10, batch_size=8), facts(1000, 32))


@pytest.mark.parametrize(
    ("request_", "instead"),
    [
        (load_config("cifar10"), 30),  # K is 500 for 1,000 images, of which there are 60
        (load_config("cifar10", overrides=["batch_size=40"]), 20),
        (RefineConfig(clusters=4, mini_clusters=61), 30),
        (RefineConfig(clusters=4, mini_clusters=61, batch_size=61), 30),
    ],
)
def test_more_mini_clusters_than_a_batch_has_images_are_refused_with_a_number_that_fits(request_, instead):
    with pytest.raises(ConfigError, match=f"images of a batch.*mini_clusters={instead}, or 0"):
        resolve(request_, facts(60, 32))
    for fitting in (instead, 0):
        request_.mini_clusters = fitting
        assert resolve(request_, facts(60, 32)).mini_clusters == fitting


@pytest.mark.parametrize(("images", "batch", "clusters"), [(14, 4, 4), (7, 2, 2), (1400, 400, 400)])
def test_no_batch_of_an_epoch_falls_below_the_number_of_clusters(images, batch, clusters):
    found = resolve(RefineConfig(clusters=clusters, batch_size=batch), facts(images, 32))
    assert min(batch_sizes(images, found.batch_size)) >= clusters


def test_batches_hold_every_image_once_and_are_near_equal():
    assert (batch_sizes(10, 4), batch_sizes(11, 4), batch_sizes(3, 10)) == ([5, 5], [4, 4, 3], [3])
    for images in [*range(4, 120), 1797, 13_000, 999_999]:
        for batch in (2, 3, 7, 50, 64, 1000):
            sizes = batch_sizes(images, min(batch, images))
            assert sum(sizes) == images
            assert max(sizes) - min(sizes) <= 1


def test_sub_batches_never_hold_a_single_image():
    for images in range(2, 150):
        for part in range(2, 70):
            count = count_sub_batches(images, part)
            assert count >= 1
            assert images // count >= 2  # near-equal parts: the smallest has the floor
    assert count_sub_batches(1, 5) == 1


def test_what_the_user_states_is_kept_to_the_digit_a_recipe_yields_and_the_rest_follows_from_the_facts():
    stated = RefineConfig(clusters=4, mean=[0.123456789] * 3, std=[0.2] * 3, from_recipe=["std"])
    stated.augment = AugmentConfig(flip=False)
    resolved = resolve(stated, facts(300, 32, calibration_strength=0.1, processes=2))
    assert (resolved.mean, resolved.std) == ([0.123456789] * 3, [0.25] * 3)
    assert (resolved.calibration_strength, resolved.sync_batchnorm) == (0.1, True)
    # An open augmentation has the defaults of SCAN until it is chosen.
    assert (resolved.augment.flip, resolved.augment.crop_scale) == (False, 0.2)


@pytest.mark.parametrize(
    ("init", "heads", "clusters", "chosen"),
    [
        (None, (), 5, "prototypes"),
        (None, (5,), 5, "keep"),
        (None, (5, 5), 7, "prototypes"),
        ("random", (5,), 5, "random"),
        ("grow", (5, 5), 7, "grow"),
        ("grow", (5,), 5, "grow"),  # as a run that has grown is resumed
    ],
)
def test_heads_are_kept_where_they_fit_and_say_how_many_clusters_there_are(init, heads, clusters, chosen):
    resolved = resolve(RefineConfig(clusters=clusters, init=init), facts(300, 32, head_clusters=heads))
    assert resolved.init == chosen
    assert resolve(RefineConfig(), facts(300, 32, head_clusters=(7, 7))).clusters == 7


@pytest.mark.parametrize(
    ("request_", "heads", "words"),
    [
        (RefineConfig(), (), "clusters=10"),
        (RefineConfig(clusters=5, init="keep"), (), "clustering head"),
        (RefineConfig(clusters=5, init="keep"), (7,), "7 clusters"),
        (RefineConfig(clusters=5, init="grow"), (), "clustering head"),
        (RefineConfig(clusters=5, init="grow"), (7, 7), "clusters=8"),
    ],
)
def test_a_start_that_cannot_be_made_is_refused_in_the_words_of_python(request_, heads, words):
    with pytest.raises(ConfigError, match=words):
        resolve(request_, facts(300, 32, head_clusters=heads))


@pytest.mark.parametrize(
    ("sizes", "init"), [([10], "keep"), ([10, 10], "keep"), ([12], "prototypes"), ([], "prototypes")]
)
def test_old_heads_are_kept_only_where_they_have_the_right_size(sizes, init):
    assert choose_init(None, sizes, 10) == init
