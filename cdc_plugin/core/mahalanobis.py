"""Measure how far an image is from everything that a model was refined on, by its features and without labels.

Softmax divides its hundred per cent among the clusters whatever the image shows; the distance of the features to the
nearest cluster is not bound in this way. It is the Mahalanobis distance with one covariance for all clusters (Lee et
al. 2018), on features of unit length, since the length of features says little about foreign images.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FALSE_ALARMS = 0.01  # share of the images of the refinement that lie beyond the limit
LEAST_SHRINKAGE = 0.01


@dataclass(frozen=True)
class Prototypes:
    """Centres of the clusters in whitened features of unit length."""

    centers: Tensor  # (C', D) means of the clusters that have images, whitened
    whitening: Tensor  # (D, D), from features to directions in which clusters spread equally
    limit: float  # distance beyond which an image counts as an outlier

    def distance(self, features: Tensor) -> Tensor:
        """Return the distance (N,) of features (N, D) to the nearest centre; about sqrt(D) for images like those."""
        centers, whitening = self.centers.to(features.device), self.whitening.to(features.device)
        parts = [torch.cdist(F.normalize(part, dim=1) @ whitening, centers) for part in features.float().split(8192)]
        return torch.cat(parts).min(dim=1).values


def fit_prototypes(features: Tensor, assignment: Tensor, clusters: int) -> Prototypes:
    """Fit prototypes of features (N, D) that a model has assigned to clusters (N,).

    The limit is taken on images outside the fit: each half of the images is measured by the prototypes of the other
    half. On the images of the fit itself distances are too small.
    """
    features, assignment = features.float(), assignment.to(features.device)
    centers, whitening = _fit(features, assignment, clusters)
    if len(features) < 4:
        return Prototypes(centers, whitening, float("inf"))
    half = torch.arange(len(features), device=features.device) % 2 == 0
    held_out = [
        Prototypes(*_fit(features[fitted], assignment[fitted], clusters), 0.0).distance(features[~fitted])
        for fitted in (half, ~half)
    ]
    # ``quantile`` refuses more than 16 million numbers; a rank does not.
    distances = torch.cat(held_out).sort().values
    limit = distances[min(len(distances) - 1, int((1 - FALSE_ALARMS) * len(distances)))].item()
    return Prototypes(centers, whitening, limit)


def _fit(features: Tensor, assignment: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Return whitened centres (C', D) and the whitening (D, D) of the scatter around them."""
    unit = F.normalize(features, dim=1)
    count = torch.bincount(assignment, minlength=clusters)
    means = unit.new_zeros(clusters, unit.shape[1]).index_add_(0, assignment, unit)
    means /= count.clamp_min(1)[:, None]
    residuals = unit - means[assignment]
    scatter = (residuals.T @ residuals / len(unit)).cpu().double()  # double is not on every device
    # Few images leave most directions of a large D unseen: the fewer, the rounder the covariance.
    shrinkage = min(1.0, max(LEAST_SHRINKAGE, unit.shape[1] / len(unit)))
    scatter.diagonal().add_(shrinkage * scatter.diagonal().mean().clamp_min(1e-12))
    lower = torch.linalg.cholesky(scatter)
    identity = torch.eye(len(lower), dtype=lower.dtype)
    whitening = torch.linalg.solve_triangular(lower, identity, upper=False).T.float().to(features.device)
    return means[count > 0] @ whitening, whitening
