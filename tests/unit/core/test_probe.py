import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from cdc_plugin.core.probe import fit_logistic_regression, principal_components, read_linearly
from cdc_plugin.core.prototypes import standardize_rows


def blobs(apart: float, count: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % 3
    noise = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return noise + apart * torch.eye(3, 8)[labels], labels


def test_components_are_those_of_a_singular_value_decomposition_of_standardised_rows():
    features, _ = blobs(2.0)
    rows = standardize_rows(features).double().numpy()
    left, size, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    expected = (left * size)[:, :4]
    found = principal_components(features, 4).numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(expected / expected.std(ddof=1)), atol=1e-4)


def test_the_regression_is_that_of_scikit_learn():
    features, labels = blobs(2.0)
    weights = fit_logistic_regression(features, labels, 3)
    # Mean loss + penalty here; sum of losses + |w|^2 / (2 C) there.
    reference = LogisticRegression(C=1 / (2 * 1e-3 * len(features)), tol=1e-8, max_iter=1000).fit(features, labels)
    found = torch.softmax(features @ weights[:-1] + weights[-1], dim=1)
    np.testing.assert_allclose(found, reference.predict_proba(features), atol=2e-3)


@pytest.mark.parametrize(("apart", "least", "most"), [(8.0, 0.99, 1.0), (2.0, 0.6, 0.95), (0.0, 0.2, 0.45)])
def test_a_partition_is_read_as_far_as_features_hold_it(apart, least, most):
    features, labels = blobs(apart)
    assert least <= read_linearly(features, labels, torch.Generator().manual_seed(1)) <= most
