"""The quality card in words: what each label-free number says, and what it can not say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdc_plugin.report.words import DASH, SPACE, known, percent


@dataclass(frozen=True)
class Statement:
    """One number of the card."""

    name: str
    value: str
    says: str
    silent: str  # what it does not say


# Key in the card, name, what it says, what it can not say.
STATEMENTS = [
    (
        "expected_accuracy",
        "expected accuracy",
        "Mean confidence of the answers: the share of images that the model itself expects to be right.",
        "It is an estimate, not a measurement; on images of another kind it may be far off.",
    ),
    (
        "clustering_confidence",
        "confidence before calibration",
        "Mean confidence of the clustering head. Far from the expected accuracy, the heads differ on how hard this is.",
        "Neither of the two need be true.",
    ),
    (
        "heads_agree",
        "agreement of the heads",
        "Images that the clustering head and the calibration head put into the same cluster.",
        "Both share one backbone and can be wrong together.",
    ),
    (
        "augmentation_agreement",
        "agreement under augmentation",
        "Images that stay in their cluster when they are changed a little, as in training.",
        "The network was trained to overlook these changes; stable is not the same as right.",
    ),
    (
        "neighbour_consistency",
        "agreement with neighbours",
        "How many of an image's nearest images in feature space are in the same cluster.",
        "Low values show clusters cut through dense regions; high ones do not show that the regions mean anything.",
    ),
    (
        "kmeans_agreement",
        "agreement with k-means",
        "Images that k-means on the features puts into the matching cluster.",
        "Two methods that agree have seen the same structure; it need not be the one you look for.",
    ),
    (
        "start_agreement",
        "agreement with the start",
        "Images that k-means on the features before training puts into the matching cluster.",
        "Training is meant to move images; much movement may be progress or drift.",
    ),
    (
        "stability",
        "stability",
        "Images whose cluster did not change over the last epochs.",
        "Training that has settled may have settled on something wrong.",
    ),
    (
        "trusted_share",
        "trusted images",
        "Images that the model would take as pseudo-labels.",
        "It follows from the confidence and is no second opinion.",
    ),
    (
        "balance",
        "balance of the sizes",
        "100 % if all clusters are equally large, towards 0 if one holds everything.",
        "Your data may be unbalanced by nature; then less than 100 % is right.",
    ),
    (
        "largest_cluster_share",
        "largest cluster",
        "Share of the images in the largest cluster.",
        "A large cluster may be a large class, or several classes in one.",
    ),
    (
        "empty_clusters",
        "empty clusters",
        "Clusters without any image.",
        "None empty does not mean that the number of clusters is right.",
    ),
]


def statements(card: dict[str, Any]) -> list[Statement]:
    """The numbers that were measured, in the order of their weight."""
    return [
        Statement(name, f"{card[key]:,}" if key == "empty_clusters" else percent(card[key]), says, silent)
        for key, name, says, silent in STATEMENTS
        if known(card.get(key))
    ]


def warnings(card: dict[str, Any]) -> list[str]:
    """The warnings about the model as sentences in which no number is parted from its per cent."""
    found = [_sentence(warning) for warning in card.get("warnings") or [] if "epoch" not in warning]
    during = len(training_warnings(card))
    if during:
        found.append(f"Training gave {f'{during} warnings' if during > 1 else 'a warning'}: see there.")
    return found


def training_warnings(card: dict[str, Any]) -> list[str]:
    """What was noticed while a run trained, epoch by epoch."""
    return [_sentence(warning) for warning in card.get("warnings") or [] if "epoch" in warning]


def _sentence(warning: dict[str, Any]) -> str:
    return str(warning["text"]).replace(" %", f"{SPACE}%")


def side_by_side(cards: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Name and the values of all models, for every number that at least one of them has."""
    named = [{statement.name: statement.value for statement in statements(card)} for card in cards]
    order = [name for _, name, _, _ in STATEMENTS if any(name in values for values in named)]
    return [(name, [values.get(name, DASH) for values in named]) for name in order]
