"""Numbers and sentences as people read them."""

import numpy as np
import pytest

from cdc_plugin.report.words import cluster_words, headline, shorten


@pytest.mark.parametrize(
    ("confidence", "said"),
    [
        ([0.99, 0.97], "All 2 images can be used at 95 % expected accuracy; over all images 98.0 % is expected."),
        ([0.99, 0.93, 0.3], "2 of 3 images (66.7 %) can be used at 95 %"),
        ([0.99, 0.3, 0.3], "Only 1 of 3 images (33.3 % of them) can be used"),
        ([0.5, 0.25], "None of the 2 images can be used at 95 % expected accuracy: the surest one has 50.0 %"),
        ([0.95], "The only image can be used"),
    ],
)
def test_the_headline_says_plainly_how_many_images_can_be_used(confidence, said):
    assert said in headline(np.array(confidence)).replace("\u00a0", " ")


def test_the_headline_counts_the_largest_set_that_keeps_the_mean():
    confidence = np.random.default_rng(0).beta(5, 1, 300)
    ordered = sorted(confidence, reverse=True)
    count = max(size for size in range(1, 301) if sum(ordered[:size]) / size >= 0.95)
    assert f"{count} of 300" in headline(confidence).replace("\u00a0", " ")


def test_clusters_that_stand_out_are_named():
    words = cluster_words([3, 0, 9], [0.5, None, 0.75]).replace("\u00a0", " ")
    assert "largest is 2 with 9 images, the smallest 0 with 3" in words
    assert "least sure is 0 with 50.0 %" in words
    assert "1 cluster is empty: 1." in words


def test_long_text_keeps_its_beginning_and_its_end():
    assert shorten("abcdefghij", 7) == "ab…ghij"
    assert shorten("abc", 3) == "abc"
