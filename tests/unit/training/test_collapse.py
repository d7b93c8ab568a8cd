"""The collapse guard on histories that are made up, or copied down from runs that were made to collapse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.errors import UserError
from cdc_plugin.training.collapse import Finding, as_warnings, detect, detect_new, refuse_dead

History = list[dict[str, float]]
KEYS = {"selected": "selected", "confidence": "confidence", "largest": "largest_cluster", "used": "used_clusters"}


def settings(**changes: Any) -> ResolvedConfig:
    """A resolved config, as the pipeline has it while it trains."""
    numbers: dict[str, Any] = {"clusters": 10, "batch_size": 500, "epochs": 20, "init": "prototypes"}
    return ResolvedConfig(**{**numbers, "lr_backbone": 1e-3, "lr_heads": 2e-3, **changes})


def history(**columns: list[float]) -> History:
    """Epochs from one list a number; what is left out is as in a sound run of ten clusters."""
    length = len(next(iter(columns.values())))
    sound = {"selected": 0.8, "confidence": 0.8, "largest": 0.12, "used": 10}
    rows = [{KEYS[name]: (columns.get(name) or [sound[name]] * length)[row] for name in KEYS} for row in range(length)]
    return [{"epoch": number, "clustering_loss": 0.5, **row} for number, row in enumerate(rows, start=1)]


def kinds(found: list[Finding]) -> list[tuple[int, str, bool]]:
    return [(finding.epoch, finding.kind, finding.dead) for finding in found]


RISING = [0.6, 0.68, 0.72, 0.75, 0.74, 0.76]


@pytest.mark.parametrize(
    ("sound", "config"),
    [
        (history(selected=RISING, confidence=RISING), settings()),
        (history(selected=[0.4, 0.45, 0.5], confidence=[0.39, 0.45, 0.5]), settings()),  # CIFAR-10, weak features
        (history(selected=[0.99, 0.95, 0.87, 0.8, 0.74, 0.7]), settings(selection="freematch")),
        (history(selected=[0.26, 0.34, 0.5], confidence=[0.6, 0.65, 0.7]), settings(selection="fixed", threshold=0.8)),
        (history(used=[10, 10, 9, 9], largest=[0.12, 0.13, 0.15, 0.19]), settings()),  # loses one cluster
        (history(confidence=[0.93, 0.97, 0.99, 0.995]), settings()),  # sure, with all clusters in use
        (
            history(selected=[0.15], confidence=[0.2], used=[200], largest=[0.02]),
            settings(clusters=200, batch_size=5000),
        ),
        (history(confidence=[0.9, 0.8, 0.71], selected=[0.88, 0.78, 0.7]), settings(init="keep", batch_size=64)),
    ],
)
def test_a_sound_run_is_left_in_peace(sound, config):
    assert detect(sound, config) == []


def test_unequal_classes_are_no_collapse():
    # Ten clusters on digits of which one kind is 57 % of the images, and two clusters at ten to one: real runs.
    ten = history(
        selected=[0.57, 0.51, 0.45, 0.45, 0.49, 0.5],
        confidence=[0.597, 0.526, 0.466, 0.456, 0.509, 0.517],
        largest=[0.176, 0.176, 0.247, 0.189, 0.27, 0.253],
    )
    two = history(
        selected=[0.9, 0.82, 0.78, 0.74, 0.75, 0.71],
        confidence=[0.917, 0.84, 0.791, 0.753, 0.772, 0.725],
        largest=[0.845, 0.829, 0.861, 0.866, 0.936, 0.973],
        used=[2] * 6,
    )
    three = history(largest=[0.55, 0.6, 0.65, 0.7], used=[3] * 4)
    assert detect(ten, settings(batch_size=250)) == []
    assert detect(two, settings(clusters=2, batch_size=64)) == []
    assert detect(three, settings(clusters=3)) == []


def test_nothing_selected_is_warned_of_at_once_and_dead_after_two_epochs():
    found = detect(history(selected=[0.0, 0.0, 0.0]), settings(selection="fixed", threshold=0.999))
    assert kinds(found) == [(1, "nothing-selected", False), (2, "nothing-selected", True)]
    assert "Try selection=confident, or threshold=0.8, below the mean confidence of 80%." in found[0].text


def test_a_selection_that_begins_to_grow_is_not_dead():
    found = detect(history(selected=[0.001, 0.004, 0.03, 0.2]), settings())
    assert kinds(found) == [(1, "nothing-selected", False), (3, "few-selected", False)]


def test_a_fixed_threshold_that_nine_of_ten_images_miss_is_warned_of():
    few = history(selected=[0.07])
    assert kinds(detect(few, settings(selection="fixed"))) == [(1, "few-selected", False)]
    assert detect(few, settings()) == []


def test_a_selection_that_shrinks_from_its_own_best_is_warned_of():
    found = detect(history(selected=[0.26, 0.34, 0.25, 0.19]), settings(selection="fixed", threshold=0.8))
    assert kinds(found) == [(4, "selection-shrinks", False)]
    assert found[0].text.startswith("19% of the images are selected for training, after 34% at best.")


def test_a_confidence_that_falls_while_few_images_teach_is_warned_of_early():
    falling = {"confidence": [0.77, 0.67]}
    assert detect(history(**falling, selected=[0.7, 0.65]), settings()) == []
    found = detect(history(**falling, selected=[0.13, 0.14]), settings(selection="fixed"))
    assert kinds(found) == [(2, "confidence-falls", False)]


def test_settings_out_of_the_usual_are_watched_more_closely():
    falling = history(confidence=[0.47, 0.36], selected=[0.44, 0.36])
    assert detect(falling, settings()) == []
    fast = detect(falling, settings(lr_backbone=0.05))
    assert "Try lr_backbone=0.005, or freeze_backbone=True." in fast[0].text
    many = detect(history(confidence=[0.47, 0.35], used=[200, 199]), settings(clusters=200, batch_size=1797))
    assert "Try fewer clusters: a batch has 1797 images for 200, or batch_size=5000" in many[0].text


def test_confidence_at_chance_is_dead_when_it_stays_there():
    found = detect(history(confidence=[0.509, 0.505, 0.504], used=[2] * 3), settings(clusters=2))
    assert kinds(found) == [(1, "chance", False), (3, "chance", True)]
    rising = detect(history(confidence=[0.502, 0.505, 0.509], used=[2] * 3), settings(clusters=2))
    assert kinds(rising) == [(1, "chance", False)]


def test_one_cluster_that_swallows_the_rest_is_warned_of_then_dead():
    # A run at lr_backbone=0.05, one epoch longer than it was run.
    collapse = history(
        selected=[0.32, 0.21, 0.24, 0.24, 0.24],
        confidence=[0.32, 0.29, 0.34, 0.35, 0.36],
        largest=[0.24, 0.76, 0.95, 0.99, 1.0],
        used=[10, 8, 3, 2, 1],
    )
    found = detect(collapse, settings(lr_backbone=0.05))
    assert kinds(found) == [(2, "one-cluster", False), (5, "one-cluster", True)]
    assert found[0].text == (
        "One cluster holds 76% of the images, 24% in epoch 1. Try lr_backbone=0.005, or freeze_backbone=True."
    )


def test_a_backbone_that_puts_nearly_all_images_together_from_the_start_is_to_blame():
    found = detect(history(largest=[0.8, 0.8], used=[8, 8]), settings())
    assert kinds(found) == [(1, "one-cluster", False)]
    assert "Try another backbone" in found[0].text


def test_unsure_first_epochs_point_at_the_backbone():
    untrained = history(confidence=[0.2, 0.21], selected=[0.2, 0.17], largest=[0.27, 0.55], used=[10, 8])
    found = detect(untrained, settings())
    assert kinds(found) == [(2, "one-cluster", False)]
    assert "Try another backbone (cdc-inspect BACKBONE" in found[0].text


def test_of_two_clusters_an_empty_one_is_dead_after_two_epochs():
    found = detect(history(largest=[0.8, 1.0, 1.0], used=[2, 1, 1]), settings(clusters=2))
    assert kinds(found) == [(2, "one-cluster", False), (3, "one-cluster", True)]


def test_clusters_that_die_out_are_warned_of():
    found = detect(history(used=[9, 8, 7, 6], largest=[0.25] * 4), settings(init="random"))
    assert kinds(found) == [(3, "clusters-die", False)]
    assert found[0].text == "No image comes into 3 of 10 clusters. Try init='prototypes', or clusters=7."


def test_certainty_with_few_clusters_in_use_is_warned_of():
    found = detect(history(confidence=[0.8, 0.99], used=[8, 4], largest=[0.25, 0.3]), settings(entropy_weight=0.1))
    assert kinds(found) == [(2, "clusters-die", False), (2, "over-confident", False)]
    assert all("entropy_weight=1" in finding.text for finding in found)


def test_a_frozen_backbone_is_not_told_to_freeze_or_to_slow_down():
    config = settings(freeze_backbone=True, lr_backbone=0.05)
    found = detect(history(used=[6], largest=[0.3]), config)
    assert found[0].text.endswith(
        "Try clusters=6, or another backbone (cdc-inspect BACKBONE --data IMAGES shows whether this one tells "
        "images apart)."
    )


def test_each_kind_is_told_once_by_the_epoch_that_brings_it():
    whole = history(selected=[0.03, 0.02, 0.0, 0.0, 0.0], used=[10, 9, 7, 6, 5])
    config = settings(selection="fixed")
    told = [finding for end in range(1, 6) for finding in detect_new(whole[:end], config)]
    assert told == detect(whole, config)
    assert len({(finding.kind, finding.dead) for finding in told}) == len(told) == 4


def test_what_an_epoch_does_not_say_alarms_nobody():
    old = [{"epoch": epoch, "clustering_loss": 0.5, "selected": 0.8, "confidence": 0.8} for epoch in (1, 2)]
    resumed = [*old, {**old[0], "epoch": 3, "largest_cluster": 0.3, "used_clusters": 10}]
    assert detect(old, settings()) == detect(resumed, settings()) == []
    assert detect([{"epoch": 1, "loss": 1.0}, {"epoch": 2}], settings()) == []
    collapsed = [*old, {**old[0], "epoch": 3, "largest_cluster": 0.8, "used_clusters": 10}]
    assert detect(collapsed, settings())[0].text.startswith("One cluster holds 80% of the images. Try ")
    unknown = detect([{"epoch": 1, "selected": 0.0, "confidence": math.nan}], settings(selection="fixed"))
    assert "nan" not in unknown[0].text


def test_warnings_of_the_report_say_which_epoch_they_are_of():
    [warning] = as_warnings([Finding(2, "few-selected", "Only 3% are selected.")])
    text = "After epoch 2: Only 3% are selected."
    assert warning == {"kind": "few-selected", "text": text, "epoch": 2, "dead": False}


DEAD = history(selected=[0.03, 0.0, 0.0])


def test_a_dead_run_is_refused_in_one_line_that_says_what_to_change():
    config = settings(selection="fixed")
    refuse_dead(DEAD[:2], config)
    with pytest.raises(UserError) as error:
        refuse_dead(DEAD, config)
    said = str(error.value)
    assert said.startswith("stopped after epoch 3: 0.0% of the images are selected")
    assert "\n" not in said
    for word in ("selection=confident", "kept", "resume=True", "on_collapse=warn"):
        assert word in said


def test_a_dead_run_that_is_resumed_is_refused_again():
    longer = [*DEAD, {**DEAD[-1], "epoch": 4}]
    assert detect_new(longer, settings()) == []
    with pytest.raises(UserError, match="stopped after epoch 4"):
        refuse_dead(longer, settings())


def test_nothing_is_refused_after_the_last_epoch_or_where_the_user_wants_to_go_on():
    refuse_dead(DEAD, settings(epochs=3))
    refuse_dead(DEAD, settings(on_collapse="warn"))
    refuse_dead([], settings())


TWO, BOTH = {"clusters": 2}, {"used": [2, 2]}


@pytest.mark.parametrize(
    ("kind", "dead", "beyond", "within", "changes"),
    [
        ("nothing-selected", False, {"selected": [0.0049]}, {"selected": [0.0051]}, {}),
        ("nothing-selected", True, {"selected": [0.003, 0.003]}, {"selected": [0.003, 0.004]}, {}),
        ("nothing-selected", True, {"selected": [0.0049, 0.003]}, {"selected": [0.0051, 0.003]}, {}),
        ("few-selected", False, {"selected": [0.049]}, {"selected": [0.051]}, {}),
        ("few-selected", False, {"selected": [0.0051]}, {"selected": [0.0049]}, {}),
        ("few-selected", False, {"selected": [0.099]}, {"selected": [0.101]}, {"selection": "fixed"}),
        ("selection-shrinks", False, {"selected": [0.8, 0.479]}, {"selected": [0.8, 0.481]}, {}),
        ("chance", False, {"confidence": [0.144]}, {"confidence": [0.146]}, {}),
        ("chance", True, {"confidence": [0.117] * 3}, {"confidence": [0.117, 0.119, 0.117]}, {}),
        ("chance", True, {"confidence": [0.117] * 3}, {"confidence": [0.117] * 2}, {}),
        ("chance", True, {"confidence": [0.117] * 3}, {"confidence": [0.116, 0.117, 0.117]}, {}),
        ("confidence-falls", False, {"confidence": [0.8, 0.559]}, {"confidence": [0.8, 0.561]}, {}),
        ("confidence-falls", False, {"confidence": [0.8, 0.639]}, {"confidence": [0.8, 0.641]}, {"batch_size": 99}),
        ("confidence-falls", False, {"confidence": [0.8, 0.559]}, {"confidence": [0.8, 0.561]}, {"batch_size": 100}),
        (
            "confidence-falls",
            False,
            {"confidence": [0.8, 0.559]},
            {"confidence": [0.8, 0.561]},
            {"batch_size": 99, "init": "keep"},
        ),
        (
            "confidence-falls",
            False,
            {"confidence": [0.8, 0.719], "selected": [0.3, 0.199]},
            {"confidence": [0.8, 0.719], "selected": [0.3, 0.201]},
            {},
        ),
        (
            "confidence-falls",
            False,
            {"confidence": [0.8, 0.719], "selected": [0.3, 0.199]},
            {"confidence": [0.8, 0.721], "selected": [0.3, 0.199]},
            {},
        ),
        ("one-cluster", False, {"largest": [0.12, 0.326]}, {"largest": [0.12, 0.324]}, {}),
        ("one-cluster", False, {"largest": [0.17, 0.341]}, {"largest": [0.17, 0.339]}, {}),
        ("one-cluster", False, {"largest": [0.641]}, {"largest": [0.639]}, {}),
        ("one-cluster", True, {"largest": [0.981, 0.981]}, {"largest": [0.979, 0.981]}, {}),
        ("one-cluster", True, {"largest": [0.981, 0.981]}, {"largest": [0.981, 0.979]}, {}),
        ("one-cluster", True, {"largest": [0.9, 0.9], "used": [1, 1]}, {"largest": [0.9, 0.9], "used": [1, 2]}, {}),
        ("one-cluster", False, {"largest": [0.89, 0.981], **BOTH}, {"largest": [0.89, 0.979], **BOTH}, TWO),
        ("one-cluster", False, {"largest": [0.89, 0.981], **BOTH}, {"largest": [0.91, 0.981], **BOTH}, TWO),
        ("one-cluster", True, {"largest": [0.99] * 2, "used": [1, 1]}, {"largest": [0.99] * 2, "used": [2, 2]}, TWO),
        ("clusters-die", False, {"used": [7]}, {"used": [8]}, {}),
        ("clusters-die", False, {"used": [6]}, {"used": [7]}, {"clusters": 8}),
        ("over-confident", False, {"confidence": [0.981], "used": [5]}, {"confidence": [0.979], "used": [5]}, {}),
        ("over-confident", False, {"confidence": [0.981], "used": [5]}, {"confidence": [0.981], "used": [6]}, {}),
    ],
)  # fmt: skip
def test_a_finding_begins_beyond_its_threshold(kind, dead, beyond, within, changes):
    for columns, expected in ((beyond, True), (within, False)):
        findings = detect(history(**columns), settings(**changes))
        assert ((kind, dead) in {(finding.kind, finding.dead) for finding in findings}) is expected


@pytest.mark.parametrize(
    ("words", "columns", "changes", "other_columns", "other_changes"),
    [
        ("% in epoch 1", {"largest": [0.3, 0.7]}, {}, {"largest": [0.7]}, {}),
        ("another backbone", {"used": [7], "confidence": [0.279]}, {}, {"used": [7], "confidence": [0.281]}, {}),
        ("another backbone", {"used": [7], "largest": [0.641]}, {}, {"used": [7], "largest": [0.639]}, {}),
        ("Try lr_backbone", {"used": [7]}, {"lr_backbone": 1.01e-3}, {"used": [7]}, {"lr_backbone": 1e-3}),
        ("Try lr_heads", {"used": [7]}, {"lr_heads": 2.01e-3}, {"used": [7]}, {"lr_heads": 2e-3}),
        ("fewer clusters", {"used": [7]}, {"batch_size": 99}, {"used": [7]}, {"batch_size": 100}),
        ("entropy_weight=1", {"used": [7]}, {"entropy_weight": 0.9}, {"used": [7]}, {"entropy_weight": 1.0}),
        ("clusters=2", {"used": [2]}, {}, {"used": [1]}, {}),
        (
            "threshold=0.8",
            {"selected": [0.01]},
            {"selection": "fixed", "threshold": 0.85},
            {"selected": [0.01]},
            {"selection": "fixed", "threshold": 0.8},
        ),
    ],
)
def test_a_remedy_is_named_only_where_it_can_help(words, columns, changes, other_columns, other_changes):
    for rows, config, expected in ((columns, changes, True), (other_columns, other_changes, False)):
        texts = [finding.text for finding in detect(history(**rows), settings(**config))]
        assert any(words in text for text in texts) is expected
