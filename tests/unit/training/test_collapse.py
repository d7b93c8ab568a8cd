"""The collapse guard on histories that are made up, or copied down from runs that were made to collapse."""

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


RISING = [0.6, 0.68, 0.72, 0.75, 0.74, 0.76]
# Real runs: ten clusters on digits of which one kind is 57 % of the images, and two clusters at ten to one.
UNEQUAL = {
    "selected": [0.57, 0.51, 0.45, 0.45, 0.49, 0.5],
    "confidence": [0.597, 0.526, 0.466, 0.456, 0.509, 0.517],
    "largest": [0.176, 0.176, 0.247, 0.189, 0.27, 0.253],
}
TEN_TO_ONE = {
    "selected": [0.9, 0.82, 0.78, 0.74, 0.75, 0.71],
    "confidence": [0.917, 0.84, 0.791, 0.753, 0.772, 0.725],
    "largest": [0.845, 0.829, 0.861, 0.866, 0.936, 0.973],
    "used": [2] * 6,
}
MANY = {"selected": [0.15], "confidence": [0.2], "used": [200], "largest": [0.02]}


@pytest.mark.parametrize(
    ("columns", "changes"),
    [
        ({"selected": RISING, "confidence": RISING}, {}),
        ({"selected": [0.4, 0.45, 0.5], "confidence": [0.39, 0.45, 0.5]}, {}),  # CIFAR-10, weak features
        ({"selected": [0.99, 0.95, 0.87, 0.8, 0.74, 0.7]}, {"selection": "freematch"}),
        ({"selected": [0.26, 0.34, 0.5], "confidence": [0.6, 0.65, 0.7]}, {"selection": "fixed", "threshold": 0.8}),
        ({"used": [10, 10, 9, 9], "largest": [0.12, 0.13, 0.15, 0.19]}, {}),  # loses one cluster
        ({"confidence": [0.93, 0.97, 0.99, 0.995]}, {}),  # sure, with all clusters in use
        (MANY, {"clusters": 200, "batch_size": 5000}),
        ({"confidence": [0.9, 0.8, 0.71], "selected": [0.88, 0.78, 0.7]}, {"init": "keep", "batch_size": 64}),
        (UNEQUAL, {"batch_size": 250}),
        (TEN_TO_ONE, {"clusters": 2, "batch_size": 64}),
        ({"largest": [0.55, 0.6, 0.65, 0.7], "used": [3] * 4}, {"clusters": 3}),
        ({"selected": [0.07]}, {}),
        ({"confidence": [0.77, 0.67], "selected": [0.7, 0.65]}, {}),
        ({"confidence": [0.47, 0.36], "selected": [0.44, 0.36]}, {}),
    ],
)
def test_a_sound_run_is_left_in_peace(columns, changes):
    assert detect(history(**columns), settings(**changes)) == []


TWO, FIXED, BLAMED = (
    {"clusters": 2},
    {"selection": "fixed", "threshold": 0.8},
    "Try another backbone (cdc-inspect BACKBONE",
)
# A run at lr_backbone=0.05, one epoch longer than it was run.
COLLAPSE = {
    "selected": [0.32, 0.21, 0.24, 0.24, 0.24],
    "confidence": [0.32, 0.29, 0.34, 0.35, 0.36],
    "largest": [0.24, 0.76, 0.95, 0.99, 1.0],
    "used": [10, 8, 3, 2, 1],
}
UNTRAINED = {"confidence": [0.2, 0.21], "selected": [0.2, 0.17], "largest": [0.27, 0.55], "used": [10, 8]}


@pytest.mark.parametrize(
    ("columns", "changes", "expected", "text"),
    [
        (
            {"selected": [0.0, 0.0, 0.0]},
            {"selection": "fixed", "threshold": 0.999},
            ["1 nothing-selected", "2 nothing-selected dead"],
            "Try selection=confident, or threshold=0.8, below the mean confidence of 80%.",
        ),
        # A selection that begins to grow is not dead.
        ({"selected": [0.001, 0.004, 0.03, 0.2]}, {}, ["1 nothing-selected", "3 few-selected"], "0.1% of the images"),
        ({"selected": [0.07]}, FIXED, ["1 few-selected"], "Only 7.0% of the images"),
        ({"selected": [0.26, 0.34, 0.25, 0.19]}, FIXED, ["4 selection-shrinks"], "19% of the images are sel"),
        # A confidence that falls while few images teach, and settings out of the usual, are seen early.
        ({"confidence": [0.77, 0.67], "selected": [0.13, 0.14]}, FIXED, ["2 confidence-falls"], "from 77% to"),
        (
            {"confidence": [0.47, 0.36], "selected": [0.44, 0.36]},
            {"lr_backbone": 0.05},
            ["2 confidence-falls"],
            "Try lr_backbone=0.005, or freeze_backbone=True.",
        ),
        (
            {"confidence": [0.47, 0.35], "used": [200, 199]},
            {"clusters": 200, "batch_size": 1797},
            ["2 confidence-falls"],
            "Try fewer clusters: a batch has 1797 images for 200, or batch_size=5000",
        ),
        ({"confidence": [0.509, 0.505, 0.504], "used": [2] * 3}, TWO, ["1 chance", "3 chance dead"], "as if clusters"),
        ({"confidence": [0.502, 0.505, 0.509], "used": [2] * 3}, TWO, ["1 chance"], "assigned at random."),
        (
            COLLAPSE,
            {"lr_backbone": 0.05},
            ["2 one-cluster", "5 one-cluster dead"],
            "One cluster holds 76% of the images, 24% in epoch 1. Try lr_backbone=0.005, or freeze_backbone=True.",
        ),
        ({"largest": [0.8, 0.8], "used": [8, 8]}, {}, ["1 one-cluster"], BLAMED),
        (UNTRAINED, {}, ["2 one-cluster"], BLAMED),
        ({"largest": [0.8, 1.0, 1.0], "used": [2, 1, 1]}, TWO, ["2 one-cluster", "3 one-cluster dead"], "holds 100%"),
        (
            {"used": [9, 8, 7, 6], "largest": [0.25] * 4},
            {"init": "random"},
            ["3 clusters-die"],
            "No image comes into 3 of 10 clusters. Try init='prototypes', or clusters=7.",
        ),
        (
            {"confidence": [0.8, 0.99], "used": [8, 4], "largest": [0.25, 0.3]},
            {"entropy_weight": 0.1},
            ["2 clusters-die", "2 over-confident"],
            "entropy_weight=1",
        ),
        (  # a frozen backbone is not to be frozen or slowed down
            {"used": [6], "largest": [0.3]},
            {"freeze_backbone": True, "lr_backbone": 0.05},
            ["1 clusters-die"],
            "Try clusters=6, or another backbone",
        ),
    ],
)
def test_a_collapse_is_warned_of_then_dead_and_comes_with_advice(columns, changes, expected, text):
    findings = detect(history(**columns), settings(**changes))
    assert [f"{finding.epoch} {finding.kind}{' dead' * finding.dead}" for finding in findings] == expected
    assert text in findings[0].text


def test_each_kind_is_told_once_by_the_epoch_that_brings_it():
    whole = history(selected=[0.03, 0.02, 0.0, 0.0, 0.0], used=[10, 9, 7, 6, 5])
    config = settings(selection="fixed")
    told = [finding for end in range(1, 6) for finding in detect_new(whole[:end], config)]
    assert told == detect(whole, config)
    assert len({(finding.kind, finding.dead) for finding in told}) == len(told) == 4
    [warning] = as_warnings([Finding(2, "few-selected", "Only 3% are selected.")])  # of the report
    text = "After epoch 2: Only 3% are selected."
    assert warning == {"kind": "few-selected", "text": text, "epoch": 2, "dead": False}


def test_what_an_epoch_does_not_say_alarms_nobody():
    old = [{"epoch": epoch, "clustering_loss": 0.5, "selected": 0.8, "confidence": 0.8} for epoch in (1, 2)]
    resumed = [*old, {**old[0], "epoch": 3, "largest_cluster": 0.3, "used_clusters": 10}]
    assert detect(old, settings()) == detect(resumed, settings()) == []
    assert detect([{"epoch": 1, "loss": 1.0}, {"epoch": 2}], settings()) == []
    collapsed = [*old, {**old[0], "epoch": 3, "largest_cluster": 0.8, "used_clusters": 10}]
    assert detect(collapsed, settings())[0].text.startswith("One cluster holds 80% of the images. Try ")
    unknown = detect([{"epoch": 1, "selected": 0.0, "confidence": math.nan}], settings(selection="fixed"))
    assert "nan" not in unknown[0].text


DEAD = history(selected=[0.03, 0.0, 0.0])


def test_a_dead_run_is_refused_in_one_line_that_says_what_to_change_also_when_it_is_resumed():
    config = settings(selection="fixed")
    refuse_dead(DEAD[:2], config)
    with pytest.raises(UserError) as error:
        refuse_dead(DEAD, config)
    said = str(error.value)
    assert said.startswith("stopped after epoch 3: 0.0% of the images are selected")
    assert "\n" not in said
    for word in ("selection=confident", "kept", "resume=True", "on_collapse=warn"):
        assert word in said
    longer = [*DEAD, {**DEAD[-1], "epoch": 4}]
    assert detect_new(longer, settings()) == []
    with pytest.raises(UserError, match="stopped after epoch 4"):
        refuse_dead(longer, settings())
    # Nothing is refused after the last epoch, nor where the user wants to go on.
    refuse_dead(DEAD, settings(epochs=3))
    refuse_dead(DEAD, settings(on_collapse="warn"))
    refuse_dead([], settings())


BOTH = {"used": [2, 2]}
KEPT_HEADS, UNTAUGHT = {"batch_size": 99, "init": "keep"}, {"confidence": [0.8, 0.719], "selected": [0.3, 0.199]}


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
        ("confidence-falls", False, {"confidence": [0.8, 0.559]}, {"confidence": [0.8, 0.561]}, KEPT_HEADS),
        ("confidence-falls", False, UNTAUGHT, {**UNTAUGHT, "selected": [0.3, 0.201]}, {}),
        ("confidence-falls", False, UNTAUGHT, {**UNTAUGHT, "confidence": [0.8, 0.721]}, {}),
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
        ("another backbone", {"confidence": [0.279]}, {}, {"confidence": [0.281]}, {}),
        ("another backbone", {"largest": [0.641]}, {}, {"largest": [0.639]}, {}),
        ("Try lr_backbone", {}, {"lr_backbone": 1.01e-3}, {}, {"lr_backbone": 1e-3}),
        ("Try lr_heads", {}, {"lr_heads": 2.01e-3}, {}, {"lr_heads": 2e-3}),
        ("fewer clusters", {}, {"batch_size": 99}, {}, {"batch_size": 100}),
        ("entropy_weight=1", {}, {"entropy_weight": 0.9}, {}, {"entropy_weight": 1.0}),
        ("clusters=2", {"used": [2]}, {}, {"used": [1]}, {}),
        ("threshold=0.8", {"selected": [0.01]}, {**FIXED, "threshold": 0.85}, {"selected": [0.01]}, FIXED),
    ],
)
def test_a_remedy_is_named_only_where_it_can_help(words, columns, changes, other_columns, other_changes):
    for rows, config, expected in ((columns, changes, True), (other_columns, other_changes, False)):
        epochs = len(next(iter(rows.values()), [0]))
        texts = [finding.text for finding in detect(history(**{"used": [7] * epochs, **rows}), settings(**config))]
        assert any(words in text for text in texts) is expected
