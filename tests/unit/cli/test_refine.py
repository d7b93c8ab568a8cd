import numpy as np
import pytest
import yaml

from cdc_plugin.cli import refine as cli
from cdc_plugin.evaluation.records import Report

QUICK = ["hidden=16", "batch_size=40", "sub_batch_size=20", "mini_clusters=10", "--device", "cpu", "--quiet"]


@pytest.fixture
def photos(tmp_path, digits, write_images):
    return write_images(tmp_path / "photos", digits[0][:30])


def test_recipes_are_listed_with_what_they_are_for(capsys):
    cli.refine_command(["--list-recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("cifar10 ") and "60,000 images" in line for line in lines)
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


@pytest.mark.parametrize("word", ["epochs=0", "entropy_weight=1e38"])
def test_a_dry_run_plans_a_run_that_learns_nothing_or_diverges(capsys, photos, tiny_checkpoint, word):
    given = ["--backbone", str(tiny_checkpoint), "--data", str(photos), "--clusters", "3"]
    cli.refine_command(["--dry-run", *given, word])
    assert "# time: about" in capsys.readouterr().out


def test_a_dry_run_prints_a_recipe_and_the_plan_and_writes_nothing(capsys, tmp_path, photos, tiny_checkpoint):
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    cli.refine_command(
        ["--dry-run", "--backbone", str(tiny_checkpoint), "--data", str(photos), "--clusters", "3", "--out", str(out)]
    )
    printed = capsys.readouterr().out
    settings = yaml.safe_load(printed)
    assert settings["clusters"] == 3
    assert all(settings[name] is not None for name in ("batch_size", "sub_batch_size", "epochs", "lr_heads"))
    assert "# images: 30 from" in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_pictures_beside_features_need_no_backbone(capsys, tmp_path, photos):
    rows = np.random.default_rng(0).normal(size=(len(list(photos.rglob("*.*"))), 6)).astype(np.float32)
    np.save(tmp_path / "emb.npy", rows)
    words = ["--features", str(tmp_path / "emb.npy"), "--data", str(photos), "--clusters", "2", "--dry-run"]
    cli.refine_command(words)
    assert "features of 6 numbers" in capsys.readouterr().out


def test_words_may_stand_before_and_after_options(capsys, photos, tiny_checkpoint):
    cli.refine_command(
        ["epochs=7", "--dry-run", "--backbone", str(tiny_checkpoint), "seed=5", "--data", str(photos), "clusters=3"]
    )
    settings = yaml.safe_load(capsys.readouterr().out)
    assert (settings["epochs"], settings["seed"], settings["clusters"]) == (7, 5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--backbone": "nowhere.pt"}, "nowhere.pt"),
        ({"--backbone": None}, "missing --backbone"),
        ({"--data": "nowhere"}, "nothing at nowhere"),
        ({"--data": None}, "missing --data"),
        ({"--clusters": None}, "missing --clusters"),
        ({"--clusters": "1"}, "clusters must be at least 2"),
        ({"--clusters": "31"}, "too few for 31 clusters"),
        ({"--recipe": "cifar"}, "no recipe 'cifar'"),
        ({"--device": "gpu"}, "try --device cpu"),
        ({"--format": "solo"}, "unknown checkpoint format 'solo'"),
        ({"--arch": "resnet_99"}, "resnet_99"),
        ({"--epochs": "-1"}, "epochs must be at least 0"),
        ({"word": "epoch=3"}, "did you mean epochs?"),
        ({"word": "nonsense"}, "expected key=value"),
        ({"word": "batch_size=2"}, "batch_size=12 or more"),
        ({"word": "selection=best"}, "unknown selection 'best'"),
        ({"word": "augment.exclude=[blur]"}, "blur"),
        ({"word": "mean=[1,2]"}, "mean takes 3 numbers"),
    ],
    ids=str,
)
def test_mistakes_end_with_one_line(refuse, tmp_path, photos, tiny_checkpoint, changes, message):
    given = {"--backbone": tiny_checkpoint, "--data": photos, "--clusters": "3", "--out": tmp_path / "out", **changes}
    word = given.pop("word", None)
    words = [part for option, value in given.items() if value is not None for part in (option, value)]
    assert message in refuse("refine", *words, *([word] if word else []), "--quiet")


def figures(**changes) -> dict:
    head = {"ACC": 0.9, "NMI": 0.8, "ARI": 0.7, "ECE": 0.05, "CONF": 0.85, "cluster_sizes": [1, 1]}
    metrics = {
        "images": 2,
        "clusters": 2,
        "labels": True,
        "before": {"kmeans": {**head, "ECE": None}, "clustering_head": head, "calibration_head": head},
        "after": {"kmeans": {**head, "ECE": None}, "clustering_head": head, "calibration_head": {**head, "ACC": 0.95}},
        "label_free": {"expected_accuracy": 0.85, "heads_agree": 1.0, "warnings": []},
        "skipped": [],
    }
    return {**metrics, **changes}


def test_the_outcome_shows_before_and_after_and_a_dash_where_there_is_no_figure():
    text = cli.outcome(Report(figures(), np.rec.array([(1,)]), None))
    rows = {line[:24].strip(): line for line in text.splitlines()}
    assert "90.0 -> 95.0" in rows["calibration head"]
    assert "- -> -" in rows["k-means on the features"]
    assert "expected accuracy 85.0%" in text


def test_the_outcome_without_labels_states_no_accuracy_and_repeats_the_warnings_of_the_card():
    warnings = [{"kind": "empty", "text": "1 cluster is empty."}]
    facts = {"expected_accuracy": 0.85, "heads_agree": 1.0, "warnings": warnings}
    metrics = figures(labels=False, label_free=facts, skipped=[{"image": "a", "reason": "b"}])
    text = cli.outcome(Report(metrics, np.rec.array([(1,)]), None))
    assert "ACC" not in text
    assert "warning: 1 cluster is empty." in text
    assert "1 image could not be read; report.json names it" in text
