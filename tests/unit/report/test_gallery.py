"""What the page shows of the images: cards, confused pairs, what to look at first, and how the pictures are made."""

import base64
import io
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.records import build_prediction_table, build_table
from cdc_plugin.report.gallery import (
    BUDGET,
    ClusterCard,
    Thumbnail,
    ThumbnailSize,
    choose_examples,
    cluster_cards,
    confused_pairs,
    confusion,
    encode,
    fingerprint,
    look_first,
    make_thumbnails,
    pictures_per_kind,
    rank_pairs,
    size_within,
    spread_over_clusters,
    take_turns,
)
from cdc_plugin.report.page_data import PageData
from cdc_plugin.report.run_page import measure_clusters

AMPLE = ThumbnailSize(96, 100_000)


def data_of(
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
    clustering = probs if clustering is None else np.asarray(clustering, np.float32)
    table = build_prediction_table(names, clustering, probs, columns)
    return PageData("x", [], [], [], {}, table, probs, ImageSet(pixels, names, labels, class_names))


def random_data(count: int, clusters: int, **more) -> PageData:
    return data_of(np.random.default_rng(1).dirichlet(np.full(clusters, 0.2), count), **more)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def cards_of(page: PageData, budget: int = BUDGET) -> list[ClusterCard]:
    return cluster_cards(page, measure_clusters(page, None), budget)


def every_thumbnail(page: PageData, budget: int = BUDGET) -> list[Thumbnail]:
    return [
        *(t for card in cards_of(page, budget) for t in card.typical + card.borderline + card.doubtful),
        *(t for pair in confused_pairs(page, budget=budget) for t in pair.examples),
        *(t for t, _, _ in look_first(page, budget=budget)),
    ]


def test_cards_come_in_order_with_size_and_mean_confidence_and_an_empty_cluster_has_none():
    cards = cards_of(data_of([[0.9, 0.1, 0], [0.1, 0, 0.9], [0.3, 0, 0.7]]))
    words = [(card.number, plain(card.size), plain(card.confidence)) for card in cards]
    assert words == [(0, "1 image", "90.0 %"), (2, "2 images", "80.0 %")]
    assert [thumbnail.name for thumbnail in cards[1].typical + cards[1].borderline] == ["1.png", "2.png"]


def test_captions_say_how_sure_and_what_else_it_might_be():
    (card,) = cards_of(data_of([[0.97, 0.03, 0], [0.54, 0.05, 0.41], [0.5, 0.3, 0.2]]))
    captions = [plain(thumbnail.caption) for thumbnail in card.typical + card.borderline + card.doubtful]
    assert captions == ["97 %", "54 % here, 41 % cluster 2", "50 %"]
    (card,) = cards_of(data_of([[1, 0], [0.9996, 0.0004]]))  # only what is certain reads as 100 %
    assert [plain(thumbnail.caption) for thumbnail in card.typical] == ["100 %", "over 99 %"]


def test_labels_decide_nothing_that_is_shown():
    without = random_data(200, 5)
    labels = np.random.default_rng(2).integers(0, 5, 200)
    assert every_thumbnail(replace(without, images=replace(without.images, labels=labels))) == every_thumbnail(without)


def test_copies_of_one_picture_are_typical_once():
    found = data_of(np.tile([[0.999, 0.001]], (40, 1)), distance=np.arange(40.0))
    found.images.images[:20] = found.images.images[0]
    names = [thumbnail.name for thumbnail in cards_of(found)[0].typical]
    assert names == ["0.png"] + [f"{index}.png" for index in range(20, 31)]


@pytest.mark.parametrize(
    ("clusters", "pictures"), [(1, 12), (10, 12), (33, 12), (50, 8), (100, 4), (200, 4), (1000, 1), (100_000, 1)]
)
def test_more_clusters_have_fewer_pictures_each(clusters, pictures):
    assert pictures_per_kind(clusters, 3_400_000) == pictures


def test_all_pictures_of_the_page_stay_within_the_budget_even_of_noise():
    found = random_data(1500, 40, side=48)
    budget = 400_000
    shown = every_thumbnail(found, budget)
    assert len(shown) > 300
    assert sum(len(thumbnail.uri) for thumbnail in shown) < 1.4 * budget  # base64 takes a third more


def test_where_clusters_are_too_many_the_largest_have_pictures():
    probs = np.eye(20)[[*range(20), 7, 7, 11]] * 0.8 + 0.01
    cards = cards_of(data_of(probs), budget=3 * 900 * 2 * 100 // 76 + 100)
    assert [card.number for card in cards] == [7, 11]


def test_pairs_count_the_images_expected_in_the_wrong_cluster_and_show_the_likeliest():
    sure = np.tile([[0.0, 0.0, 1.0]], (50, 1))
    probs = np.concatenate([np.tile([[0.8, 0.2, 0.0]], (10, 1)), np.tile([[0.3, 0.7, 0.0]], (10, 1)), sure])
    (pair,) = confused_pairs(data_of(probs))
    assert (pair.first, pair.second) == (0, 1)
    assert plain(pair.images) == "5 images"
    captions = [plain(thumbnail.caption) for thumbnail in pair.examples]
    assert captions == ["80 % cluster 0, 20 % cluster 1"] * 4 + ["30 % cluster 0, 70 % cluster 1"] * 4
    probs = [[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.95, 0.05], [0.8, 0.2], [0.45, 0.55]]
    (pair,) = confused_pairs(data_of(probs))
    assert [thumbnail.name for thumbnail in pair.examples] == ["1.png", "2.png", "4.png", "0.png", "5.png"]


def test_each_reason_to_look_is_told_in_plain_words():
    sure = [0.98, 0.01, 0.01]
    probs = np.array([sure] * 4 + [[0.45, 0.44, 0.11], [0.6, 0.2, 0.2], [0.5, 0.24, 0.26]])
    clustering = np.array([sure] * 4 + [[0.45, 0.44, 0.11], [0.99, 0.01, 0], [0.5, 0.24, 0.26]])
    outlier = np.arange(7) == 2
    shown = look_first(data_of(probs, clustering, outlier=outlier, distance=outlier * 3.0))
    assert [(thumbnail.name, plain(why)) for thumbnail, _, why in shown] == [
        ("2.png", "far from what is typical of any cluster"),
        ("4.png", "torn between cluster 0 (45 %) and cluster 1 (44 %)"),
        ("5.png", "the clustering head is 99 % sure, after calibration 60 % remain"),
        ("6.png", "among the least sure of cluster 0; cluster 2 comes next with 26 %"),
    ]
    assert plain(shown[1][0].caption) == "cluster 0, 45 %"


def test_images_to_look_at_come_once_from_all_clusters_and_the_furthest_outliers_first():
    found = random_data(2000, 10)
    shown = look_first(found)
    names = [thumbnail.name for thumbnail, _, _ in shown]
    assert len(names) == len(set(names)) == 48
    clusters = found.table["cluster"][[int(name.removesuffix(".png")) for name in names]]
    assert np.bincount(clusters, minlength=10).min() >= 3
    assert len({why.split()[0] for _, _, why in shown}) == 2  # torn, and among the least sure
    outlier = np.array([True, True, False])
    found = data_of([[1, 0]] * 3, outlier=outlier, distance=np.array([2.0, 5.0, 1.0]))
    assert [thumbnail.name for thumbnail, _, _ in look_first(found)] == ["1.png", "0.png"]


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
    found = data_of(probs)
    cards = cards_of(found)
    assert [card.number for card in cards] == np.unique(found.table["cluster"]).tolist()
    shown = [t.name for card in cards for t in card.typical + card.borderline + card.doubtful]
    assert len(shown) == len(set(shown)) > 0
    assert all(pair.first < pair.second for pair in confused_pairs(found))
    assert len(look_first(found)) <= len(probs)


def examples(confidence, second_confidence, count: int, cluster=None, clusters: int = 1, looks=None, **columns):
    """Choose examples, all of one cluster and of different looks unless stated."""
    cluster = np.zeros(len(confidence), dtype=np.int64) if cluster is None else cluster
    columns |= {"cluster": cluster, "confidence": confidence, "second_confidence": second_confidence}
    looks = np.arange(0.0, 9 * len(confidence), 9)[:, None] if looks is None else looks
    return choose_examples(build_table(["x"] * len(cluster), columns), clusters, count, lambda index: looks[index])


def test_each_kind_of_example_by_hand():
    confidence = np.array([0.90, 0.99, 0.55, 0.40, 0.48, 0.80])
    second = np.array([0.06, 0.01, 0.40, 0.10, 0.45, 0.15])
    (found,) = examples(confidence, second, 2)
    assert found.typical == [1, 0]
    assert found.borderline == [4, 2]  # margins .03 and .15
    assert found.doubtful == [3, 5]  # .40; .48 and .55 are among the borderline already


def test_the_kinds_are_disjoint_and_of_their_own_cluster():
    probs = np.random.default_rng(0).dirichlet(np.full(7, 0.3), 300)
    second, confidence = np.sort(probs, axis=1)[:, -2:].T
    cluster = probs.argmax(axis=1)
    for number, found in enumerate(examples(confidence, second, 5, cluster, 7)):
        every = found.typical + found.borderline + found.doubtful
        assert len(set(every)) == len(every) == 15
        assert set(cluster[every]) == {number}


@pytest.mark.parametrize(
    ("size", "kinds"), [(0, (0, 0, 0)), (1, (1, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (5, (2, 2, 1))]
)
def test_a_small_cluster_is_shared_out(size, kinds):
    found = examples(np.full(size, 0.6), np.full(size, 0.4), 4, clusters=2)[0]
    assert (len(found.typical), len(found.borderline), len(found.doubtful)) == kinds


def test_equally_sure_images_come_from_all_over_the_data_or_by_their_distance_and_none_is_doubtful():
    (found,) = examples(np.ones(1000), np.zeros(1000), 4)
    assert found.borderline == found.doubtful == []
    assert len(set(found.typical)) == 4
    assert max(found.typical) - min(found.typical) > 500
    distance = np.array([5.0, 1.0, 3.0, 2.0, 0.0])
    confidence = np.array([0.9999, 0.9998, 1.0, 0.9997, 0.97])
    assert examples(confidence, np.zeros(5), 3, distance=distance)[0].typical == [1, 3, 2]


def test_near_duplicates_are_typical_once_and_again_only_where_there_is_nothing_else():
    looks = np.array([[0.0], [1.0], [100.0], [101.0], [50.0]])
    confidence = np.array([0.999, 0.998, 0.997, 0.996, 0.995])
    assert examples(confidence, np.zeros(5), 3, looks=looks)[0].typical == [0, 2, 4]
    assert examples(confidence, np.zeros(5), 4, looks=looks)[0].typical == [0, 2, 4, 1]


def test_confusion_agrees_with_a_plain_loop_and_counts_every_image():
    found = random_data(400, 6)
    plain = np.zeros((6, 6))
    for row, own in zip(found.probs.astype(np.float64), found.table["cluster"], strict=True):
        plain[own] += row
    np.testing.assert_allclose(confusion(found.table["cluster"], found.probs), plain, atol=1e-9)
    assert plain.sum() == pytest.approx(400, rel=1e-6)


def test_pairs_add_both_directions_and_come_most_confused_first():
    expected = np.array([[90.0, 2.0, 5.0], [3.0, 80.0, 9.0], [1.0, 2.0, 70.0]])
    assert rank_pairs(expected, np.array([97, 92, 73]), 9) == [(1, 2, 11.0), (0, 2, 6.0), (0, 1, 5.0)]
    assert rank_pairs(expected, np.array([97, 92, 73]), 1) == [(1, 2, 11.0)]


@pytest.mark.parametrize(("images", "size", "shown"), [(0.99, 10, 0), (1.0, 10, 1), (19.9, 1000, 0), (20.0, 1000, 1)])
def test_pairs_below_one_image_or_one_per_cent_are_left_out(images, size, shown):
    pairs = rank_pairs(np.array([[size, images], [0.0, size]]), np.array([size, size]), 9)
    assert pairs == [(0, 1, images)] * shown


def test_the_best_of_every_cluster_comes_before_the_second_best_of_any():
    cluster = np.array([0, 0, 0, 1, 1, 2])
    score = np.array([9.0, 8.0, 7.0, 1.0, 2.0, 5.0])
    assert spread_over_clusters(np.arange(6), score, cluster).tolist() == [0, 5, 4, 1, 3, 2]
    assert spread_over_clusters(np.array([2, 3]), score, cluster).tolist() == [2, 3]
    assert spread_over_clusters(np.array([], dtype=np.int64), score, cluster).tolist() == []


def test_orders_take_turns_and_no_image_is_taken_twice():
    assert take_turns([[1, 2, 3], [1, 3, 5], []], 9, 9) == [[1, 2], [3, 5], []]
    assert take_turns([[1, 2, 3], [1, 3, 5]], 3, 9) == [[1, 2], [3]]
    assert take_turns([[1, 2, 3, 4], [5]], 9, 2) == [[1, 2], [5]]
    assert take_turns([[1], [2]], 0, 9) == [[], []]


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def slope(height: int, width: int) -> np.ndarray:
    """A colour picture without noise, so that JPEG keeps it nearly as it is."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([across, down, 255 - across], axis=2).astype(np.uint8)


def noise(side: int) -> np.ndarray:
    """The worst case: what no format can make small."""
    return np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_a_thumbnail_shows_the_image_with_its_name_and_caption():
    images = ImageSet(np.stack([noise(32), slope(32, 32)]), ["a/noise.png", "b/slope.png"])
    (thumbnail,) = make_thumbnails(images, [1], ["97 %"], AMPLE)
    kind, content = thumbnail.uri.split(",")
    assert kind == "data:image/jpeg;base64"
    assert (thumbnail.name, thumbnail.caption) == ("b/slope.png", "97 %")
    shown = np.asarray(decoded(base64.b64decode(content)).convert("RGB"), dtype=int)
    assert np.abs(shown - slope(32, 32)).mean() < 4


def test_grey_images_stored_in_three_channels_are_kept_in_one():
    grey = np.repeat(slope(64, 64)[:, :, :1], 3, axis=2)
    assert decoded(encode(grey, AMPLE)).mode == "L"
    grey[5, 5, 2] ^= 128  # one coloured pixel makes it a colour image
    assert decoded(encode(grey, AMPLE)).mode == "RGB"


@pytest.mark.parametrize(
    ("given", "size"),
    [((8, 8), (8, 8)), ((31, 31), (31, 31)), ((48, 48), (48, 48)), ((256, 256), (96, 96)), ((100, 200), (96, 48))],
)
def test_large_images_are_made_small_keep_their_shape_and_none_is_enlarged(given, size):
    assert decoded(encode(slope(*given), AMPLE)).size == size


@pytest.mark.parametrize("most_bytes", [3000, 1500, 900])
@pytest.mark.parametrize("side", [32, 64, 256])
def test_even_noise_stays_within_the_bytes_given(side, most_bytes):
    assert len(encode(noise(side), ThumbnailSize(96, most_bytes))) <= most_bytes
    assert decoded(encode(noise(side), ThumbnailSize(96, 10))).size == (8, 8)  # at the least


def test_more_thumbnails_are_smaller_and_together_never_pass_the_budget():
    counts = (0, 1, 100, 1000, 2000, 4000, 1_000_000)
    sizes = [size_within(4_500_000, count) for count in counts]
    assert [size.side for size in (*sizes[:3], sizes[-1])] == [96, 96, 96, 32]
    assert all(a.side >= b.side for a, b in pairwise(sizes))
    assert all(size.most_bytes * count <= 4_500_000 for size, count in zip(sizes, counts, strict=True))


def test_an_image_that_comes_up_again_is_encoded_once_and_keeps_both_captions():
    reads = []

    class Counted:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> np.ndarray:
            reads.append(index)
            return slope(32, 32)

    images = ImageSet(Counted(), ["first", "second", "third"])  # type: ignore[arg-type]
    shown = make_thumbnails(images, [2, 0, 2], ["a", "b", "c"], AMPLE)
    assert reads == [0, 2]  # in the order in which they lie on a disk
    assert [(t.name, t.caption) for t in shown] == [("third", "a"), ("first", "b"), ("third", "c")]
    assert shown[0].uri is shown[2].uri


def test_the_fingerprint_is_the_mean_brightness_of_each_field_and_tells_copies_from_other_digits(digits):
    fields = np.zeros((16, 16, 3), dtype=np.uint8)
    fields[:2, :2] = 200
    fields[0, 2:4] = 100  # half of the field beside it
    assert fingerprint(fields)[:3].tolist() == [200, 50, 0]
    pixels, _ = digits
    copy = np.asarray(decoded(encode(pixels[0], AMPLE)).convert("RGB"))
    looks = np.stack([fingerprint(image) for image in pixels])
    apart = np.abs(looks - fingerprint(copy)).mean(axis=1)
    assert apart[0] < 4
    assert (apart[1:] > 4).all()
