"""What the page shows of the images of a run: cards, confused pairs, and what to look at first."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.prediction_table import add_column, build_prediction_table, build_table
from cdc_plugin.report.gallery.cards import cluster_cards, confused_pairs, look_first, pictures_of_a_kind
from cdc_plugin.report.page_data import PageData


def findings_of(
    probs: np.ndarray,
    clustering: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    class_names: list[str] | None = None,
    side: int = 8,
    **columns: np.ndarray,
) -> PageData:
    """Predictions of random pictures; further columns of the table by name."""
    count = len(probs)
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    names = [f"{index}.png" for index in range(count)]
    probs = np.asarray(probs, dtype=np.float32)
    table = build_prediction_table(names, probs if clustering is None else np.asarray(clustering, np.float32), probs)
    for name, values in columns.items():
        table = add_column(table, name, values)
    return PageData("x", [], [], [], {}, table, probs, ImageSet(pixels, names, labels, class_names))


def random_findings(count: int, clusters: int, **more) -> PageData:
    return findings_of(np.random.default_rng(1).dirichlet(np.full(clusters, 0.2), count), **more)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def every_thumbnail(findings: PageData) -> list:
    cards = cluster_cards(findings)
    return [
        *(thumbnail for card in cards for thumbnail in card.typical + card.borderline + card.doubtful),
        *(thumbnail for pair in confused_pairs(findings) for thumbnail in pair.examples),
        *(thumbnail for thumbnail, _ in look_first(findings)),
    ]


def test_cards_come_in_order_with_size_and_mean_confidence_and_an_empty_cluster_has_one():
    cards = cluster_cards(findings_of([[0.9, 0.1, 0], [0.1, 0, 0.9], [0.3, 0, 0.7]]))
    assert [(card.number, card.size, round(card.confidence, 6)) for card in cards] == [
        (0, 1, 0.9),
        (1, 0, 0),
        (2, 2, 0.8),
    ]
    assert cards[1].typical == cards[1].borderline == cards[1].doubtful == []
    assert [thumbnail.name for thumbnail in cards[2].typical + cards[2].borderline] == ["1.png", "2.png"]


def test_captions_say_how_sure_and_what_else_it_might_be():
    cards = cluster_cards(findings_of([[0.97, 0.03, 0], [0.54, 0.05, 0.41], [0.5, 0.3, 0.2]]))
    assert [plain(thumbnail.caption) for thumbnail in cards[0].typical] == ["97 %"]
    assert [plain(thumbnail.caption) for thumbnail in cards[0].borderline] == ["54 % here, 41 % cluster 2"]
    assert [plain(thumbnail.caption) for thumbnail in cards[0].doubtful] == ["50 %"]


def test_only_what_is_certain_reads_as_100_per_cent():
    cards = cluster_cards(findings_of([[1, 0], [0.9996, 0.0004]]))
    assert [plain(thumbnail.caption) for thumbnail in cards[0].typical] == ["100 %", "over 99 %"]


def test_labels_name_clusters_and_say_how_many_are_right():
    probs = np.eye(3)[[0, 0, 0, 1, 1]] * 0.7 + 0.1
    labels = np.array([1, 1, 0, 0, 0])
    named = cluster_cards(findings_of(probs, labels=labels, class_names=["cat", "dog"]))
    assert [(card.class_name, card.accuracy) for card in named] == [("dog", 2 / 3), ("cat", 1.0), (None, None)]
    unnamed = cluster_cards(findings_of(probs, labels=labels))
    assert [card.class_name for card in unnamed] == ["class 1", "class 0", None]


def test_a_cluster_that_is_left_without_a_class_has_no_accuracy():
    probs = np.eye(3)[[0, 0, 1, 1, 2]] * 0.7 + 0.1
    cards = cluster_cards(findings_of(probs, labels=np.array([0, 0, 1, 1, 1])))
    assert [(card.class_name, card.accuracy) for card in cards] == [("class 0", 1.0), ("class 1", 1.0), (None, None)]


def test_labels_decide_nothing_that_is_shown():
    without = random_findings(200, 5)
    labels = np.random.default_rng(2).integers(0, 5, 200)
    assert every_thumbnail(replace(without, images=replace(without.images, labels=labels))) == every_thumbnail(without)


def test_of_equally_sure_images_the_nearest_are_typical():
    probs = np.tile([[1.0, 0.0]], (40, 1))
    distance = np.arange(40)[::-1].astype(np.float32)
    shown = cluster_cards(findings_of(probs, distance=distance))[0].typical
    assert [thumbnail.name for thumbnail in shown[:3]] == ["39.png", "38.png", "37.png"]


def test_copies_of_one_picture_are_typical_once():
    found = findings_of(np.tile([[0.999, 0.001]], (40, 1)), distance=np.arange(40.0))
    found.images.images[:20] = found.images.images[0]
    names = [thumbnail.name for thumbnail in cluster_cards(found)[0].typical]
    assert names == ["0.png"] + [f"{index}.png" for index in range(20, 31)]


@pytest.mark.parametrize(
    ("clusters", "pictures"), [(1, 12), (10, 12), (33, 12), (50, 8), (100, 4), (200, 4), (1000, 1), (100_000, 1)]
)
def test_more_clusters_have_fewer_pictures_each(clusters, pictures):
    assert pictures_of_a_kind(clusters, 3_400_000) == pictures


def test_all_pictures_of_the_page_stay_within_the_budget_even_of_noise():
    found = random_findings(1500, 40, side=48)
    budget = 400_000
    shown = [
        *(t for card in cluster_cards(found, budget) for t in card.typical + card.borderline + card.doubtful),
        *(t for pair in confused_pairs(found, budget=budget) for t in pair.examples),
        *(t for t, _ in look_first(found, budget=budget)),
    ]
    assert len(shown) > 300
    assert sum(len(thumbnail.uri) for thumbnail in shown) < 1.4 * budget  # base64 takes a third more


def test_where_clusters_are_too_many_the_largest_have_pictures():
    probs = np.eye(20)[[*range(20), 7, 7, 11]] * 0.8 + 0.01
    cards = cluster_cards(findings_of(probs), budget=3 * 900 * 2 * 100 // 76 + 100)
    assert [card.number for card in cards if card.typical] == [7, 11]
    assert len(cards) == 20


def test_pairs_count_the_images_expected_in_the_wrong_cluster():
    sure = np.tile([[0.0, 0.0, 1.0]], (50, 1))
    probs = np.concatenate([np.tile([[0.8, 0.2, 0.0]], (10, 1)), np.tile([[0.3, 0.7, 0.0]], (10, 1)), sure])
    (pair,) = confused_pairs(findings_of(probs))
    assert (pair.first, pair.second) == (0, 1)
    assert pair.images == pytest.approx(5.0, abs=1e-4)
    captions = [plain(thumbnail.caption) for thumbnail in pair.examples]
    assert captions == ["80 % cluster 0, 20 % cluster 1"] * 4 + ["30 % cluster 0, 70 % cluster 1"] * 4


def test_examples_of_a_pair_are_the_likeliest_to_be_in_the_wrong_cluster():
    probs = [[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.95, 0.05], [0.8, 0.2], [0.45, 0.55]]
    (pair,) = confused_pairs(findings_of(probs))
    assert [thumbnail.name for thumbnail in pair.examples] == ["1.png", "2.png", "4.png", "0.png", "5.png"]


def test_clusters_that_are_never_confused_make_no_pair():
    assert confused_pairs(findings_of(np.eye(4)[np.arange(40) % 4])) == []


def test_no_more_pairs_than_asked_for():
    assert len(confused_pairs(random_findings(500, 10))) == 12
    assert len(confused_pairs(random_findings(500, 10), limit=3)) == 3


def test_each_reason_to_look_is_told_in_plain_words():
    sure = [0.98, 0.01, 0.01]
    probs = np.array([sure] * 4 + [[0.45, 0.44, 0.11], [0.6, 0.2, 0.2], [0.5, 0.24, 0.26]])
    clustering = np.array([sure] * 4 + [[0.45, 0.44, 0.11], [0.99, 0.01, 0], [0.5, 0.24, 0.26]])
    outlier = np.arange(7) == 2
    shown = look_first(findings_of(probs, clustering, outlier=outlier, distance=outlier * 3.0))
    assert [(thumbnail.name, plain(why)) for thumbnail, why in shown] == [
        ("2.png", "far from what is typical of any cluster"),
        ("4.png", "torn between cluster 0 (45 %) and cluster 1 (44 %)"),
        ("5.png", "the clustering head is 99 % sure, after calibration 60 % remain"),
        ("6.png", "among the least sure of cluster 0; cluster 2 comes next with 26 %"),
    ]
    assert plain(shown[1][0].caption) == "cluster 0, 45 %"


def test_images_to_look_at_come_once_and_from_all_clusters():
    found = random_findings(2000, 10)
    shown = look_first(found)
    names = [thumbnail.name for thumbnail, _ in shown]
    assert len(names) == len(set(names)) == 48
    clusters = found.table["cluster"][[int(name.removesuffix(".png")) for name in names]]
    assert np.bincount(clusters, minlength=10).min() >= 3
    assert len({why.split()[0] for _, why in shown}) == 2  # torn, and among the least sure


def test_the_furthest_outliers_come_first():
    outlier = np.array([True, True, False])
    found = findings_of([[1, 0]] * 3, outlier=outlier, distance=np.array([2.0, 5.0, 1.0]))
    assert [thumbnail.name for thumbnail, _ in look_first(found)] == ["1.png", "0.png"]


def test_a_model_that_is_sure_of_everything_leaves_nothing_to_look_at():
    assert look_first(findings_of(np.eye(3)[np.arange(30) % 3])) == []


@pytest.mark.parametrize(
    "probs",
    [
        [[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]],
        np.full((30, 10), 0.1),
        np.eye(2)[np.zeros(20, dtype=int)],
        np.eye(10)[np.full(20, 9)] * 0.5 + 0.05,
    ],
    ids=["three images", "constant", "all certain", "one cluster holds everything"],
)
def test_degenerate_predictions_are_shown_as_they_are(probs):
    found = findings_of(probs)
    cards = cluster_cards(found)
    assert [card.size for card in cards] == np.bincount(found.table["cluster"], minlength=len(cards)).tolist()
    shown = [t.name for card in cards for t in card.typical + card.borderline + card.doubtful]
    assert len(shown) == len(set(shown)) > 0
    assert all(pair.first < pair.second for pair in confused_pairs(found))
    assert len(look_first(found)) <= len(probs)


def test_a_hundred_thousand_images_in_two_hundred_clusters_take_seconds():
    cluster = np.random.default_rng(0).integers(0, 200, 100_000)
    second = (cluster + 1) % 200
    confidence = np.random.default_rng(1).uniform(0.6, 0.9, 100_000).astype(np.float32)
    probs = np.zeros((100_000, 200), dtype=np.float32)
    probs[np.arange(100_000), cluster] = confidence
    probs[np.arange(100_000), second] = 1 - confidence
    names = [str(index) for index in range(100_000)]
    columns = {"cluster": cluster, "confidence": confidence, "clustering_confidence": confidence}
    table = build_table(names, {**columns, "second_cluster": second})
    pixels = np.random.default_rng(2).integers(0, 256, (100_000, 8, 8, 3), dtype=np.uint8)
    big = PageData("x", [], [], [], {}, table, probs, ImageSet(pixels, names))
    started = time.process_time()
    shown = every_thumbnail(big)
    assert time.process_time() - started < 8  # one or two on an idle core
    assert len(shown) > 2000
