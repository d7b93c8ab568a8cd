"""Pure numbers about predictions; the only layer that may see ground truth."""

from cdc_plugin.metrics.clustering import (
    accuracy,
    adjusted_rand_index,
    contingency,
    correct_samples,
    match_clusters,
    normalized_mutual_information,
    true_columns,
)
from cdc_plugin.metrics.confidence import (
    RiskCoverage,
    adaptive_calibration_error,
    area_under_risk_coverage,
    brier_score,
    class_wise_calibration_error,
    confidence_histogram,
    expected_calibration_error,
    failure_auroc,
    failure_fpr95,
    mean_confidence,
    negative_log_likelihood,
    reliability_table,
    risk_coverage_curve,
)
from cdc_plugin.metrics.ood import outlier_aupr, outlier_auroc, outlier_fpr95
from cdc_plugin.metrics.summary import summary, summary_hard, summary_outliers, summary_unlabelled

__all__ = [
    "RiskCoverage",
    "accuracy",
    "adaptive_calibration_error",
    "adjusted_rand_index",
    "area_under_risk_coverage",
    "brier_score",
    "class_wise_calibration_error",
    "confidence_histogram",
    "contingency",
    "correct_samples",
    "expected_calibration_error",
    "failure_auroc",
    "failure_fpr95",
    "match_clusters",
    "mean_confidence",
    "negative_log_likelihood",
    "normalized_mutual_information",
    "outlier_aupr",
    "outlier_auroc",
    "outlier_fpr95",
    "reliability_table",
    "risk_coverage_curve",
    "summary",
    "summary_hard",
    "summary_outliers",
    "summary_unlabelled",
    "true_columns",
]
