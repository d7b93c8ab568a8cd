"""Sentences from rows: who is best, whether CDC's calibration head is, and every row that it loses to."""

from __future__ import annotations

from cdc_plugin.comparison.table import Row, Value
from cdc_plugin.comparison.verdict import verdict


def row(label: str, accuracy: float | None, ece: float | None, deviation: float | None = 0.005, **more: object) -> Row:
    given = {"set": "digits", "group": "g", "method": label, "uses_labels": False, "seeds": 5, **more}
    seeds = 5 if deviation is not None else 1
    numbers = {"ACC": accuracy, "ECE": ece, "CONF": 0.9}
    values = {key: None if number is None else Value(number, deviation, seeds) for key, number in numbers.items()}
    return Row(label=label, values=values, **given)  # type: ignore[arg-type]


def said(*rows: Row) -> str:
    return " ".join(verdict(rows))


def test_a_win_names_the_best_the_close_ones_and_the_next_ece():
    sentences = verdict([row("CDC-Cal", 0.95, 0.01), row("SCAN", 0.943, 0.04), row("CC", 0.90, 0.001)])
    assert sentences == [
        "The best accuracy has CDC-Cal (95.0 ± 0.5 %), over 5 seeds.",
        "Within 1 point of it is SCAN (94.3 ± 0.5 %).",
        "Of these 2 rows the lowest ECE has CDC-Cal (1.0 ± 0.5 %), CDC's calibration head; "
        "next comes SCAN (4.0 ± 0.5 %).",
        "The accuracy of CDC-Cal is at least that of each of the 2 other rows within one standard deviation "
        "(of two rows the larger one counts).",
    ]


def test_every_row_that_it_loses_to_is_named_with_the_difference():
    words = said(row("CDC-Cal", 0.90, 0.01), row("A", 0.93, 0.02), row("B", 0.91, 0.02), row("C", 0.89, 0.02))
    assert "CDC-Cal is less accurate than A (by 3.0 points) and B (by 1.0 points), each time by more than one" in words
    assert "The accuracy of CDC-Cal is at least that of the other row." in words
    assert "CDC's calibration head is not among them: CDC-Cal (90.0 ± 0.5 %) is 3.0 points below" in words


def test_ahead_by_less_than_the_larger_deviation_is_within_the_spread():
    words = said(row("CDC-Cal", 0.90, 0.01, 0.001), row("A", 0.908, 0.02, 0.009), row("B", 0.902, 0.02, 0.0005))
    assert "Ahead of CDC-Cal, but within the spread, is A (by 0.8 points)." in words
    assert "less accurate than B (by 0.2 points)" in words


def test_another_row_with_a_lower_ece_is_named_before_it():
    words = said(row("CDC-Cal", 0.95, 0.02), row("A", 0.948, 0.012))
    assert "Of these 2 rows the lowest ECE has A (1.2 ± 0.5 %), not CDC's calibration head: " in words
    assert "CDC-Cal (2.0 ± 0.5 %), 0.8 points more." in words
    assert "0.3 points more, within the spread." in said(row("CDC-Cal", 0.95, 0.015), row("A", 0.948, 0.012))


def test_rows_that_use_labels_neither_win_nor_count():
    words = said(row("CDC-Cal", 0.90, 0.02), row("A", 0.89, 0.05), row("linear", 0.99, 0.001, uses_labels=True))
    assert "The best accuracy has CDC-Cal" in words
    assert "linear" not in words
    assert "Left out because labels were used: 1 of 3 rows." in words


def test_rows_that_state_no_confidence_are_named():
    words = said(row("CDC-Cal", 0.90, 0.02), row("k-means", 0.905, None))
    assert "the lowest ECE has CDC-Cal (2.0 ± 0.5 %), CDC's calibration head; k-means states no confidence." in words
    far = said(row("CDC-Cal", 0.80, 0.02), row("k-means", 0.905, None))
    assert "None of them states a confidence" in far
    assert "CDC's calibration head is not among them" in far


def test_one_seed_compares_bare_figures_and_says_so():
    words = said(row("CDC-Cal", 0.90, 0.02, None, seeds=1), row("A", 0.9004, 0.03, None, seeds=1))
    assert "over 1 seed." in words
    assert "CDC-Cal is less accurate than A (by less than 0.1 points)." in words
    assert "bare figures are compared" in words
    assert "spread" not in words


def test_rows_with_fewer_seeds_are_named():
    words = said(row("CDC-Cal", 0.90, 0.02), row("A", 0.89, 0.03, seeds=3))
    assert "over 3 to 5 seeds. Fewer than 5 seeds were finished by A (3)." in words


def test_of_several_calibration_heads_the_one_without_settings_is_judged():
    rows = [row("CDC-Cal", 0.95, 0.02, method="cdc:hidden=9"), row("CDC-Cal", 0.90, 0.02, method="cdc")]
    assert "CDC-Cal (cdc) is less accurate than CDC-Cal (cdc:hidden=9) (by 5.0 points)" in said(*rows)


def test_without_cdc_nothing_is_claimed_of_it():
    words = said(row("A", 0.95, 0.02), row("B", 0.949, 0.01))
    assert "Of these 2 rows the lowest ECE has B" in words
    assert "CDC's calibration head, CDC-Cal, is not among the rows." in words


def test_sets_are_named_where_there_are_several_and_judged_each():
    sentences = verdict(
        [row(label, accuracy, 0.1, set=name) for name in "xy" for label, accuracy in (("CDC-Cal", 0.9), ("A", 0.8))]
    )
    assert len(sentences) == 8
    assert [sentence[:3] for sentence in sentences] == ["x: "] * 4 + ["y: "] * 4


def test_without_labels_one_sentence_says_what_can_be_compared():
    (sentence,) = verdict([row("CDC-Cal", None, None), row("A", None, None)])
    assert sentence.startswith("Without labels only confidence and cluster sizes can be compared")


def test_a_single_row_or_none_that_counts_has_nothing_to_compare():
    assert verdict([row("CDC-Cal", 0.9, 0.1)]) == [
        "CDC-Cal (90.0 ± 0.5 %) stands alone: there is nothing to compare (5 seeds)."
    ]
    assert "Every row uses labels" in said(row("linear", 0.9, 0.1, uses_labels=True))
    assert verdict([]) == []
