"""Sentences from rows: who is best, whether CDC's calibration head is, and every row that it loses to."""

from cdc_plugin.comparison.table import Row, Value
from cdc_plugin.comparison.verdict import judge_rows


def row(label: str, accuracy: float | None, ece: float | None, deviation: float | None = 0.005, **more: object) -> Row:
    facts = {"set": "digits", "group": "g", "method": label, "uses_labels": False, "seeds": 5, **more}
    seeds = 5 if deviation is not None else 1
    numbers = {"ACC": accuracy, "ECE": ece, "CONF": 0.9}
    values = {key: None if number is None else Value(number, deviation, seeds) for key, number in numbers.items()}
    return Row(label=label, values=values, **facts)  # type: ignore[arg-type]


def judge(*rows: Row) -> str:
    (sentences,) = judge_rows(rows).values()
    return " ".join(sentences)


def test_a_win_names_the_best_the_close_ones_and_the_next_ece():
    rows = [row("CDC-Cal", 0.95, 0.01), row("SCAN", 0.943, 0.04), row("CC", 0.90, 0.001)]
    sentences = judge_rows(rows)["digits"]
    facts = [
        ("CDC-Cal", "best accuracy", "95.0 ± 0.5 %", "5 seeds"),
        ("Within 1 point", "SCAN (94.3 ± 0.5 %)"),
        ("CDC-Cal has the lowest ECE", "1.0 ± 0.5 %", "SCAN has 4.0 ± 0.5 %", "higher by 3.0 points"),
        ("No row is more accurate than CDC-Cal",),
    ]
    for sentence, parts in zip(sentences, facts, strict=True):
        assert all(part in sentence for part in parts), sentence
    assert "CC" not in " ".join(sentences)


def test_every_row_that_it_loses_to_is_named_with_the_difference():
    words = judge(row("CDC-Cal", 0.90, 0.01), row("A", 0.93, 0.02), row("B", 0.91, 0.02), row("C", 0.89, 0.02))
    assert "CDC-Cal is less accurate than A (by 3.0 points) and B (by 1.0 points)" in words
    assert "CDC-Cal, which is not among them, has an ECE of 1.0 ± 0.5 %" in words
    assert "No other row is within 1 point" in words


def test_a_difference_below_the_larger_deviation_is_within_one_standard_deviation():
    words = judge(row("CDC-Cal", 0.90, 0.01, 0.001), row("A", 0.908, 0.02, 0.009), row("B", 0.902, 0.02, 0.0005))
    assert "A (by 0.8 points, within one standard deviation) and B (by 0.2 points)" in words


def test_another_row_with_a_lower_ece_is_named_first():
    words = judge(row("CDC-Cal", 0.95, 0.02), row("A", 0.948, 0.012))
    assert "A has the lowest ECE of these rows: 1.2 ± 0.5 %; CDC-Cal has 2.0 ± 0.5 % (higher by 0.8 points)." in words
    near = judge(row("CDC-Cal", 0.95, 0.015), row("A", 0.948, 0.012))
    assert "higher by 0.3 points, within one standard deviation" in near


def test_rows_that_use_labels_neither_win_nor_count():
    words = judge(row("CDC-Cal", 0.90, 0.02), row("A", 0.89, 0.05), row("linear", 0.99, 0.001, uses_labels=True))
    assert "CDC-Cal has the best accuracy" in words
    assert "linear" not in words
    assert "labels were used: 1 of 3 rows" in words


def test_rows_that_state_no_confidence_are_named():
    words = judge(row("CDC-Cal", 0.90, 0.02), row("k-means", 0.905, None))
    assert "CDC-Cal has the lowest ECE" in words
    assert "no ECE: k-means." in words
    far = judge(row("CDC-Cal", 0.80, 0.02), row("k-means", 0.905, None))
    assert "lowest ECE" not in far
    assert "has an ECE of 2.0 ± 0.5 %" in far


def test_one_seed_has_no_deviation_and_rows_with_fewer_seeds_are_named():
    words = judge(row("CDC-Cal", 0.90, 0.02, None, seeds=1), row("A", 0.9004, 0.03, None, seeds=1))
    assert "over 1 seed." in words
    assert "CDC-Cal is less accurate than A (by less than 0.1 points)." in words
    assert "One seed has no standard deviation" in words
    words = judge(row("CDC-Cal", 0.90, 0.02), row("A", 0.89, 0.03, seeds=3))
    assert "over 3 to 5 seeds. Fewer than 5 seeds finished: A (3)." in words


def test_of_several_calibration_heads_the_one_without_settings_is_judged_and_without_cdc_none():
    rows = [row("CDC-Cal", 0.95, 0.02, method="cdc:hidden=9"), row("CDC-Cal", 0.90, 0.02, method="cdc")]
    assert "CDC-Cal (cdc) is less accurate than CDC-Cal (cdc:hidden=9) (by 5.0 points)" in judge(*rows)
    words = judge(row("A", 0.95, 0.02), row("B", 0.949, 0.01))
    assert "B has the lowest ECE" in words
    assert "CDC-Cal is not among the rows." in words


def test_several_sets_are_judged_separately_and_without_a_second_row_to_compare_one_sentence_says_so():
    rows = [row("CDC-Cal", 0.9, 0.1, set="x"), row("A", 0.8, 0.1, set="x"), row("B", 0.7, 0.1, set="y")]
    judged = judge_rows(rows)
    assert "CDC-Cal has the best accuracy" in judged["x"][0]
    assert "B (70.0 ± 0.5 %) is the only row" in judged["y"][0]
    assert "Without labels" in judge(row("CDC-Cal", None, None), row("A", None, None))
    assert "Every row uses labels" in judge(row("linear", 0.9, 0.1, uses_labels=True))
    assert judge_rows([]) == {}
