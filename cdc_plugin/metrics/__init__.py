"""Pure numbers about predictions; the only layer that may see ground truth."""

from cdc_plugin.metrics.clustering import (
    accuracy,
    adjusted_rand_index,
    contingency,
    correct_samples,
    match_clusters,
    normalized_mutual_information,
)
from cdc_plugin.metrics.confidence import expected_calibration_error, mean_confidence
from cdc_plugin.metrics.scores import summary, summary_hard

__all__ = [
    "accuracy",
    "adjusted_rand_index",
    "contingency",
    "correct_samples",
    "expected_calibration_error",
    "match_clusters",
    "mean_confidence",
    "normalized_mutual_information",
    "summary",
    "summary_hard",
]
