import pytest

from cdc_plugin.config.load import load_config
from cdc_plugin.config.recipes import find_recipe, recipe_folder, recipe_names, recipe_summary
from cdc_plugin.config.resolve import Facts, resolve
from cdc_plugin.core.selection import selections
from cdc_plugin.data.sources.named import datasets
from cdc_plugin.data.views import ViewSettings
from cdc_plugin.errors import ConfigError

# Sec. 4.1 and the appendix: name, images, C, B, B_s, K, rate of the backbone, crop.
PAPER = [
    ("cifar10", 60_000, 10, 1000, 500, 500, 5e-5, 32),
    ("cifar20", 60_000, 20, 1000, 500, 40, 1e-5, 32),
    ("stl10", 13_000, 10, 1000, 500, 150, 5e-5, 96),
    ("imagenet10", 13_000, 10, 500, 125, 150, 5e-5, 224),
    ("imagenetdogs", 19_500, 15, 500, 125, 40, 5e-5, 224),
    ("tinyimagenet", 100_000, 200, 5000, 1000, 1000, 1e-5, 64),
]


@pytest.mark.parametrize(("name", "images", "clusters", "batch", "sub_batch", "mini", "rate", "crop"), PAPER)
def test_the_values_of_the_paper(name, images, clusters, batch, sub_batch, mini, rate, crop):
    config = load_config(name)
    assert (config.data, config.clusters, config.input_size, config.epochs) == (name, clusters, crop, 100)
    assert (config.batch_size, config.sub_batch_size, config.mini_clusters) == (batch, sub_batch, mini)
    assert (config.lr_backbone, config.lr_heads) == pytest.approx((rate, 1e-4))
    assert (config.hidden, config.entropy_weight, config.schedule) == (512, 1.0, "constant")
    augment = config.augment  # of the released code, whose crops have torchvision's default area
    assert (augment.crop_scale, augment.operations, augment.cutout) == (0.08, 4, 16 if crop == 32 else 32)
    resolved = resolve(config, Facts(images, crop, [0.5] * 3, [0.5] * 3))
    # Nothing of what the paper states is changed by what is filled in.
    names = ("clusters", "batch_size", "sub_batch_size", "mini_clusters", "epochs", "lr_heads", "lr_backbone", "hidden")
    assert {name: getattr(resolved, name) for name in names} == {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_run(name):
    config = load_config(name, {"clusters": 10} if name == "default" else None)
    assert config.clusters is not None
    resolved = resolve(config, Facts(60_000, config.input_size or 224, [0.5] * 3, [0.5] * 3))
    assert config.data is None or config.data in datasets
    assert config.selection in selections
    augment = config.augment
    ViewSettings(
        resolved.input_size,
        tuple(config.mean or (0.5,) * 3),
        tuple(config.std or (0.5,) * 3),
        flip=bool(augment.flip),
        crop_scale=augment.crop_scale or 0.2,
        operations=augment.operations,
        cutout=augment.cutout,
        excluded=tuple(augment.exclude),
    )


@pytest.mark.parametrize("group", ["cdc", "pretrain"])
def test_every_file_beside_the_recipes_is_one_and_opens_with_what_it_is_for(group):
    assert {path.name for path in recipe_folder(group).iterdir()} == {f"{name}.yaml" for name in recipe_names(group)}
    assert all(len(recipe_summary(name, group)) > 20 for name in recipe_names(group))


def test_a_recipe_is_found_by_name_or_path_and_an_unknown_one_names_the_nearest_and_all_others(tmp_path):
    file = tmp_path / "mine.yaml"
    file.touch()
    assert find_recipe("cifar10") == find_recipe("cdc/cifar10") == recipe_folder() / "cifar10.yaml"
    assert find_recipe("paper-byol", "pretrain") == find_recipe("pretrain/paper-byol", "pretrain")
    assert find_recipe(file) == file
    with pytest.raises(ConfigError, match=r"did you mean 'cifar10'.*default, digits"):
        find_recipe("cifar1O")
