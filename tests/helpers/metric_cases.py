"""Predictions that metrics stumble over, shared by the tests against other libraries."""

import numpy as np


def softmax_table(seed: int, samples: int, clusters: int, classes: int, dtype=np.float64):
    """(N, C) probabilities that mostly favour cluster ``label % clusters``, and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    logits = rng.standard_normal((samples, clusters))
    logits[np.arange(samples), labels % clusters] += 2.5
    table = np.exp(2 * logits)
    return (table / table.sum(axis=1, keepdims=True)).astype(dtype), labels


def one_hot_table(seed: int, samples: int, clusters: int, classes: int):
    """Every confidence is 1, some predictions are wrong."""
    table, labels = softmax_table(seed, samples, clusters, classes)
    return np.eye(clusters)[table.argmax(axis=1)], labels


def sure_table(samples: int, clusters: int):
    """Everything is right, with confidences of many sizes."""
    labels = np.arange(samples) % clusters
    confidence = np.linspace(0.6, 1.0, samples)
    table = np.repeat((1 - confidence)[:, None] / max(1, clusters - 1), clusters, axis=1)
    table[np.arange(samples), labels] = confidence
    return table, labels


TABLES = {
    "as many clusters as classes": softmax_table(0, 600, 10, 10),
    "float32": softmax_table(0, 600, 10, 10, np.float32),
    "more clusters than classes": softmax_table(1, 600, 12, 7),
    "fewer clusters than classes": softmax_table(2, 600, 4, 9),
    "two hundred clusters": softmax_table(3, 1500, 200, 200, np.float32),
    "all right": sure_table(120, 6),
    "one cluster": (np.ones((50, 1)), np.arange(50) % 5),
    "one class": softmax_table(4, 200, 6, 1),
    "one cluster and one class": (np.ones((5, 1)), np.full(5, 3)),
    "ties at 1.0": one_hot_table(5, 400, 8, 8),
    "ties at 1.0 with fewer clusters": one_hot_table(6, 400, 5, 8),
    "nothing known": (np.full((90, 7), 1 / 7), np.arange(90) % 7),
    "nothing known in many clusters": (np.full((90, 50), 1 / 50, np.float32), np.arange(90) % 40),
    "collapsed": (np.eye(4)[np.zeros(40, dtype=int)] * 0.9 + 0.025, np.arange(40) % 4),
    "one sample": (np.array([[0.1, 0.7, 0.2]]), np.array([9])),
}


def graded(seed: int, samples: int, dtype=np.float64, decimals: int = 16):
    """(N,) confidences, few of them distinct with few decimals, and whether each prediction is right."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(3, 1.5, samples)
    correct = rng.random(samples) < confidence**1.5
    return np.round(confidence, decimals).astype(dtype), correct


CONFIDENCES = {
    "random": graded(0, 1500),
    "float32": graded(1, 1500, np.float32),
    "many ties": graded(2, 900, decimals=1),
    "fewer samples than bins": graded(3, 7),
    "all right": (graded(4, 200)[0], np.ones(200, dtype=bool)),
    "all wrong": (graded(5, 200)[0], np.zeros(200, dtype=bool)),
    "ties at 1.0": (np.ones(60), np.arange(60) % 3 > 0),
    "mostly 1.0": (np.r_[np.ones(50), np.linspace(0.3, 0.99, 50)], np.arange(100) % 4 > 0),
    "two values": (np.r_[np.full(30, 0.9), np.full(30, 0.4)], np.arange(60) % 5 > 0),
    "one right": (np.array([0.8]), np.array([True])),
    "one wrong": (np.array([0.8]), np.array([False])),
}
