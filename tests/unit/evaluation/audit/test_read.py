"""From answers to bounds, worked by hand, in numbers and in words."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from cdc_plugin.data.atomic import join_csv
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.audit.read import (
    compute_accuracy_bound,
    compute_accuracy_interval,
    read_answers,
    simulate_calibration_error,
)
from cdc_plugin.evaluation.audit.sheet import build_sheet
from cdc_plugin.metrics import correct_samples


@pytest.fixture
def filled(tmp_path) -> Callable[..., Path]:
    """filled(answers, images, cluster, confidence, selected): an audit of the first images with these answers."""

    def write(answers: Sequence[str], images: int = 500, **given: Sequence[float]) -> Path:
        given = {"cluster": [0, 1, 2], "confidence": [0.9], **given}
        columns = {name: np.resize(values, images) for name, values in given.items()}
        names = np.array([str(index) for index in range(images)], dtype=object)
        table = np.rec.fromarrays([names, *columns.values()], names=["index", *columns])
        lines = build_sheet(table, np.arange(len(answers)), "photos by model")
        for line, answer in zip(lines[1:], answers, strict=True):
            line[3] = answer
        path = tmp_path / "audit.csv"
        path.write_text(join_csv(lines), encoding="utf-8")
        return path

    return write


def test_bounds_that_can_be_worked_by_hand():
    # All of n right: p^n = 0.05 is the one-sided bound; none right: (1 - p)^n = 0.025 is the upper one.
    assert compute_accuracy_bound(20, 20) == pytest.approx(0.05 ** (1 / 20))
    assert compute_accuracy_interval(0, 20) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)))
    low, high = compute_accuracy_interval(13, 40)
    assert compute_accuracy_interval(27, 40) == pytest.approx((1 - high, 1 - low))
    wider_low, wider_high = compute_accuracy_interval(13, 40, certainty=0.99)
    assert wider_low < low < high < wider_high


def test_chance_gives_the_mean_absolute_deviation_of_a_binomial_and_less_with_more_answers():
    # One bin of 10 answers at confidence 0.5: E|X / 10 - 0.5| = 0.1230.
    assert simulate_calibration_error(np.full(10, 0.5), 1) == pytest.approx(0.1230, abs=0.012)
    few, many = (simulate_calibration_error(np.linspace(0.4, 1, count), 10) for count in (100, 1000))
    assert 0 < many < few / 2
    assert simulate_calibration_error(np.ones(50), 5) == 0


def test_yes_and_no_in_many_spellings_are_counted(filled):
    yes = ["y", "Yes", "JA", "1", "true", "right", " yes "]
    no = ["n", "NO", "nein", "0", "False", "wrong"]
    result = read_answers(filled([*yes, *no, "", "?", "u", "can’t tell"]))
    overall = result.overall
    assert (overall.right, overall.answered, result.drawn, result.image_count) == (7, 13, 17, 500)
    assert overall.accuracy == 7 / 13
    assert (overall.lower, overall.upper) == compute_accuracy_interval(7, 13)
    assert overall.at_least == compute_accuracy_bound(7, 13)
    assert result.selected is None


def test_selected_images_get_bounds_of_their_own(filled):
    result = read_answers(
        filled(["y"] * 30 + ["n"] * 10, confidence=[0.95] * 20 + [0.5] * 20, selected=[True] * 20 + [False] * 20)
    )
    assert result.selected is not None
    assert (result.selected.right, result.selected.answered) == (20, 20)
    assert result.selected.at_least == compute_accuracy_bound(20, 20)
    assert result.selected.confidence == pytest.approx(0.95)
    assert any("selected" in line and "100.0% (20 of 20 right)" in line for line in result.lines())


def test_bins_grow_with_the_answers(filled):
    counts = (1, 9, 19, 20, 99, 150, 400)
    assert [read_answers(filled(["y"] * count)).bins for count in counts] == [1, 1, 1, 2, 9, 15, 15]


def test_calibration_error_worked_by_hand(filled):
    # Two bins of ten: stated 0.5 and 0.9, right 5 and 6 of 10: (0 + 0.3) / 2.
    answers = ["y"] * 5 + ["n"] * 5 + ["y"] * 6 + ["n"] * 4
    result = read_answers(filled(answers, confidence=[0.5] * 10 + [0.9] * 10))
    assert result.bins == 2
    assert result.calibration_error == pytest.approx(0.15)
    assert 0.05 < result.calibration_error_by_chance < 0.15


@pytest.mark.parametrize(("confidence", "words"), [(0.9, "consistent"), (0.99, "too high"), (0.6, "too low")])
def test_the_stated_confidence_is_judged_by_the_interval(filled, confidence, words):
    result = read_answers(filled(["y"] * 85 + ["n"] * 15, confidence=[confidence] * 100))
    assert any(line.startswith(f"stated confidence: {confidence:.1%}") and words in line for line in result.lines())


def test_names_of_classes_are_matched_to_clusters(filled):
    answers = ["cat", "Cat ", "dog", "dog", "dog", "cat", "bird", "bird", "dog"]
    result = read_answers(filled(answers, cluster=[0, 0, 0, 1, 1, 1, 2, 2, 2]))
    assert (result.overall.right, result.overall.answered) == (6, 9)
    assert "3.0 per cluster" in result.notes[0]


@pytest.mark.parametrize(("accuracy", "per_cluster", "points"), [(0.3, 2, 20), (0.3, 5, 6), (0.6, 2, 3), (0.6, 5, 1)])
def test_matching_by_the_same_answers_overstates_the_accuracy_as_much_as_the_note_says(accuracy, per_cluster, points):
    randomness = np.random.default_rng(0)
    excess = []
    for _ in range(150):
        clusters = randomness.integers(0, 10, 10 * per_cluster)
        right = randomness.random(len(clusters)) < accuracy
        classes = np.where(right, clusters, (clusters + randomness.integers(1, 10, len(clusters))) % 10)
        excess.append(correct_samples(clusters, classes, 10).mean() - accuracy)
    assert 100 * np.mean(excess) == pytest.approx(points, abs=2)


def test_digits_may_be_names_and_clusters_without_a_name_have_no_right_image(filled):
    assert read_answers(filled(["0", "1", "7", "0", "1", "7"], cluster=[0, 1, 2])).overall.right == 6
    assert read_answers(filled(["cat", "dog", "cat"], cluster=[0, 1, 7])).overall.right == 2


def test_yes_and_names_together_and_no_answers_are_refused(filled):
    with pytest.raises(UserError, match=r"mixes yes or no \('yes' for r0-.*with other words \('yse' for r2-"):
        read_answers(filled(["yes", "1", "yse"]))
    with pytest.raises(UserError, match=r"no answers; open audit\.html"):
        read_answers(filled(["", "?", ""]))


def test_a_few_images_without_an_answer_give_a_second_bound(filled):
    result = read_answers(filled(["y"] * 97 + [""] * 3, confidence=np.linspace(0.2, 1, 100)))
    assert result.notes == ()
    assert result.lines()[-1].endswith(f"at least {compute_accuracy_bound(97, 100):.1%}")


def test_many_images_without_an_answer_and_those_that_are_the_least_sure_are_warned_of(filled):
    rising = np.linspace(0.2, 1, 100)
    (note,) = read_answers(filled(["y"] * 80 + [""] * 20, confidence=rising)).notes
    assert "left out" in note
    (note,) = read_answers(filled([""] * 4 + ["y"] * 96, confidence=rising)).notes
    assert "4 of the 4 images" in note
    assert read_answers(filled([""] * 4 + ["y"] * 96, confidence=[1.0])).notes == ()  # none is the least sure


def test_rows_that_were_removed_count_as_not_answered(filled):
    path = filled(["n"] * 2 + ["y"] * 28)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], *lines[3:]]), encoding="utf-8")
    result = read_answers(path)
    assert (result.overall.right, result.overall.answered, result.drawn) == (28, 28, 30)
    assert "2 of the 30 drawn images are not in the file" in result.notes[0]


def test_the_words_for_the_terminal(filled):
    assert "every image was looked at" in read_answers(filled(["y"] * 20, images=20)).lines()[-1]
    lines = read_answers(filled(["y"] * 95 + ["n"] * 5, confidence=[0.94] * 100)).lines()
    assert "100 of 100 images answered, drawn from 500 (photos by model)" in lines[0]
    assert all(fact in lines[1] for fact in ("95.0% (95 of 100 right)", "88.7%", "98.4%", "89.8%"))
    assert lines[3].startswith("calibration error: 1.0% in 10 bins")
    assert len(lines) == 4
