"""Recipes of tables, seeds and methods as users write them."""

from dataclasses import replace

import pytest

from cdc_plugin.cli.compare import compare_parser, list_sets
from cdc_plugin.comparison.methods import find_method, replace_shares
from cdc_plugin.comparison.request import parse_methods, parse_seeds, read_table_recipe
from cdc_plugin.config.load import load_config
from cdc_plugin.config.recipes import recipe_names, recipe_summary
from cdc_plugin.data import datasets
from cdc_plugin.errors import ConfigError
from cdc_plugin.metrics.over_seeds import COSTS, WITH_LABELS

PAPER = ["ablation", "cost", "k-b-sweep", "main", "ood", "retrofit", "selection", "transfer"]


def test_there_is_a_recipe_for_every_kind_of_table_in_the_paper_and_an_unknown_one_names_the_nearest():
    assert recipe_names("tables") == PAPER
    with pytest.raises(ConfigError, match="did you mean 'main'"):
        read_table_recipe("tables/mian", full=False)


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("full", [False, True])
def test_every_shipped_recipe_can_be_run(name, full):
    recipe = read_table_recipe(f"tables/{name}", full)
    assert [find_method(method) for method in recipe.methods]
    assert recipe.title
    assert recipe_summary(name, "tables")
    assert set(recipe.sets) <= set(recipe_names())
    assert bool(recipe.sets) is full
    assert recipe.seeds >= 3 or (name, full) == ("cost", True)  # times hardly differ
    assert set(recipe.columns) <= {*WITH_LABELS, *COSTS}


def test_the_tables_of_transfer_and_of_costs_have_the_sets_of_the_paper_and_the_length_of_its_runs():
    transfer, cost = (read_table_recipe(name, full=True) for name in ("transfer", "cost"))
    assert (transfer.methods, transfer.sets) == (
        ("scan2", "scan3", "cdc"),
        ("imagenet50", "imagenet100", "imagenet200"),
    )
    source = load_config("imagenet10")
    for name in transfer.sets:
        moved = load_config(name)
        assert replace(moved, data=source.data, clusters=source.clusters) == source
    assert cost.sets == read_table_recipe("main", full=True).sets
    lengths = [load_config("cifar10", overrides=find_method(name).settings).epochs for name in cost.methods]
    assert lengths == [100, 200, 100]
    assert set(cost.columns) >= {"parameters", "seconds", "gpu_memory"}


def test_the_full_table_of_outside_images_has_the_pairs_of_the_paper():
    recipe = read_table_recipe("ood", full=True)
    far = ["tinyimagenet", "svhn", "dtd", "places365"]
    # CIFAR-20 has the images of CIFAR-100.
    assert recipe.outside == {"cifar10": ["cifar100", *far], "cifar20": ["cifar10", *far]}
    assert set(recipe.sets) == set(recipe.outside)
    assert {name for names in recipe.outside.values() for name in names} <= set(datasets.names())
    options = compare_parser().parse_args(["--recipe", "ood", "--full", "--backbone", "{set}.pt"])
    assert {made.name: list(made.outside) for made in list_sets(options, recipe)} == recipe.outside
    options.ood = ["mine.npz"]
    assert [made.outside for made in list_sets(options, recipe)] == [("mine.npz",)] * 2


@pytest.mark.parametrize(("name", "mini_clusters"), [("stl10", 150), ("cifar20", 40)])
def test_the_full_table_of_b_and_k_varies_both_around_the_recipe_of_the_set(name, mini_clusters):
    recipe = load_config(name)
    grid = set()
    for method in read_table_recipe("k-b-sweep", full=True).methods:
        words = replace_shares(find_method(method).settings, recipe.batch_size, recipe.mini_clusters)
        varied = load_config(name, overrides=words)
        grid.add((varied.batch_size, varied.mini_clusters))
    shares = (0.8, 1, 1.2)
    assert grid == {(batch, round(share * mini_clusters)) for batch in (500, 1000, 1500) for share in shares}


def test_another_recipe_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("methods: [cdc, kmeans]\nseeds: 7\nsettings: [epochs=3]\nfull: {seeds: 9}\n", encoding="utf-8")
    mine = read_table_recipe(str(path), full=False)
    assert (mine.methods, mine.seeds, mine.settings) == (("cdc", "kmeans"), 7, ("epochs=3",))
    assert read_table_recipe(str(path), full=True).seeds == 9


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("methods: [cdc]\nseed: 3\n", "did you mean seeds"),
        ("clusters: 10\n", "names no 'methods'"),
        ("methods: cdc\n", "methods takes a list"),
        ("methods: [cdc]\nseeds: many\n", "seeds takes a whole number"),
        ("methods: [cdc]\noutside: [svhn]\n", "outside takes a list for each set"),
        ("methods: [cdc]\noutside: {cifar10: svhn}\n", "outside takes a list for each set"),
        ("methods: [cdc]\nfull: 3\n", "full takes keys and values"),
        ("methods: [cdc\n", "not valid YAML"),
        ("- cdc\n", "expected keys and values"),
    ],
)
def test_a_wrong_recipe_says_what_is_wrong(tmp_path, content, words):
    path = tmp_path / "wrong.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_table_recipe(str(path), full=False)


def test_seeds_are_a_number_or_a_list():
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("4,0") == (4, 0)
    for wrong in ("0", "-1", "a", "1,1", "", "1001", "9" * 5000, "1_0", "\u0663"):
        with pytest.raises(ConfigError, match="seeds: expected how many"):
            parse_seeds(wrong)


def test_methods_are_separated_by_commas_or_blanks():
    assert [method.name for method in parse_methods(["cdc,kmeans", "scan"])] == ["cdc", "kmeans", "scan2"]
    with pytest.raises(ConfigError, match="no method is named"):
        parse_methods([","])
