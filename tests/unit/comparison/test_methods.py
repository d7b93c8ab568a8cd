"""Methods by name, with settings, and as second stages."""

import pytest

from cdc_plugin.comparison.grid import add_first_stages
from cdc_plugin.comparison.methods import ALIASES, METHODS, check_settings, find_method, replace_shares
from cdc_plugin.comparison.train import TRAININGS
from cdc_plugin.config.load import load_config
from cdc_plugin.errors import UserError


@pytest.mark.parametrize("name", [*METHODS, *ALIASES])
def test_every_name_stands_for_a_training_and_for_settings_that_a_run_takes(name):
    method = find_method(name)
    assert method.training in TRAININGS
    check_settings(list(method.settings))
    assert method.after is None or find_method(method.after).after is None


def test_the_rows_of_all_methods_have_different_names():
    rows = [row for method in METHODS.values() for row in method.rows]
    assert len(set(rows)) == len(rows)


def test_settings_after_colons_are_part_of_the_method_and_of_its_row():
    method = find_method("cdc:mini_clusters=40:batch_size=500")
    assert method.settings == ("mini_clusters=40", "batch_size=500")
    assert method.rows == ("CDC-Cal, K 40, B 500",)
    config = load_config(overrides=find_method("fixed-0.99:epochs=3").settings)
    assert (config.selection, config.threshold, config.epochs) == ("fixed", 0.99, 3)


def test_cdc_after_an_opponent_keeps_its_head_and_comes_after_all_that_it_continues():
    method = find_method("scan3+cdc")
    assert (method.after, method.settings, method.rows) == ("scan3", ("init=keep",), ("SCAN-3 + CDC",))
    names = [m.name for m in add_first_stages([find_method(n) for n in ("scan3+cdc", "kmeans", "scan3", "kmeans")])]
    assert names == ["scan2", "scan3", "scan3+cdc", "kmeans"]


def test_shares_become_numbers_of_the_batch():
    assert replace_shares(["mini_clusters=10%", "batch_size=200"], 1000, 40) == ["mini_clusters=20", "batch_size=200"]
    assert replace_shares(["mini_clusters=0.01%"], 1000, 40) == ["mini_clusters=1"]
    assert replace_shares(["hidden=256"], 1000, 40) == ["hidden=256"]


def test_shares_of_k_are_those_of_the_recipe_whatever_the_batch_and_need_one():
    assert replace_shares(["mini_clusters=80%K", "batch_size=150%"], 1000, 150)[0] == "mini_clusters=120"
    with pytest.raises(UserError, match="none is stated; take one of B"):
        replace_shares(["mini_clusters=80%K"], 1000, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cdd", "did you mean 'cdc'"),
        ("kmeans+cdc", "no method"),
        ("linear+cdc", "no method"),
        ("cdc:hidden", "expected key=value after a colon"),
        ("cdc:hiden=3", "did you mean hidden"),
        ("cdc:selection=confidant", "did you mean 'confident'"),
        ("cdc:calibration=temperature", "labelled images"),
        ("cdc:batch_size=x%", "expected a number before the %"),
        ("cdc:mini_clusters=x%K", "expected a number before the %"),
        ("cdc:batch_size=80%K", "batch_size"),
        ("cdc:heads=three", "heads is one of dual, clu, clu+cal"),
        ("cdc:epochs=-1", "epochs must be at least 0"),
        ("cdc:augment.flip=false", "augment.flip is the same for all methods"),
        ("cdc:frozen_views=8", "frozen_views is the same for all methods"),
        ("cdc:seed=3", "seed is the same for all methods"),
    ],
)
def test_a_wrong_name_or_setting_is_refused_before_anything_runs(name, words):
    with pytest.raises(UserError, match=words.replace("+", r"\+")):
        find_method(name)
