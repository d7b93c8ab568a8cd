"""Probe how well a partition can be read from features that did not take part in making it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.prototypes import standardize_rows

COMPONENTS, PENALTY, ITERATIONS = 64, 1e-3, 60


def principal_components(features: Tensor, count: int = COMPONENTS) -> Tensor:
    """Return the first principal components (N, count) of standardised rows (N, D), at a standard deviation of 1.

    >>> principal_components(torch.eye(3), count=2).shape
    torch.Size([3, 2])
    """
    rows = standardize_rows(features.float())
    # In double precision on the CPU: the matrix (D, D) is small, and not every device has either.
    centred = (rows - rows.mean(dim=0)).cpu().double()
    _, directions = torch.linalg.eigh(centred.T @ centred)
    components = centred @ directions.flip(1)[:, :count]
    return (components / components.std().clamp_min(1e-12)).float()


def read_linearly(components: Tensor, assignment: Tensor, generator: torch.Generator) -> float:
    """Return the share of rows (N, D) whose cluster (N,) a logistic regression on the other half of the rows names.

    >>> components = torch.cat([torch.zeros(20, 1), torch.ones(20, 1)])
    >>> read_linearly(components, components[:, 0].long(), torch.Generator().manual_seed(0))
    1.0
    """
    clusters = int(assignment.max()) + 1
    halves = torch.randperm(len(components), generator=generator).tensor_split(2)
    right = 0
    for learnt, asked in (halves, halves[::-1]):
        weights = fit_logistic_regression(components[learnt], assignment[learnt], clusters)
        right += int((_append_one(components[asked]) @ weights).argmax(dim=1).eq(assignment[asked]).sum())
    return right / len(components)


def fit_logistic_regression(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the weights (D + 1, C) of a regression of labels (N,) on rows (N, D), the last being the intercepts."""
    extended = _append_one(rows)
    weights = torch.zeros(extended.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(extended @ weights, labels) + PENALTY * weights[:-1].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weights.detach()


def _append_one(rows: Tensor) -> Tensor:
    return torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
