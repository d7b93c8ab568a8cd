"""Recipes of tables, seeds and methods as users write them."""

import pytest

from cdc_plugin.comparison.methods import find_method
from cdc_plugin.comparison.request import parse_methods, parse_seeds, read_table_recipe
from cdc_plugin.config.recipes import recipe_names, recipe_summary
from cdc_plugin.errors import ConfigError

PAPER = ["ablation", "k-b-sweep", "main", "ood", "retrofit", "selection"]


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
    assert recipe.seeds >= 3


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
    for wrong in ("0", "-1", "a", "1,1", ""):
        with pytest.raises(ConfigError, match="seeds: expected how many"):
            parse_seeds(wrong)


def test_methods_are_separated_by_commas_or_blanks():
    assert [method.name for method in parse_methods(["cdc,kmeans", "scan"])] == ["cdc", "kmeans", "scan2"]
    with pytest.raises(ConfigError, match="no method is named"):
        parse_methods([","])
