"""Add-ons that admit moderately confident samples to a selection (Tang & Jia, CVPR 2022).

CDC tries them in its appendix ("Moderately Confident Samples"). Their authors fit them to FixMatch; here the trusted
samples of the batch replace the labelled and highly confident ones, and there are no averages over batches.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.kmeans import count_members
from cdc_plugin.core.selection.base import Selection, SelectionInput, Selector

AddOn = Callable[[Selection, SelectionInput], Selection]

# The authors' settings for CIFAR-10. They require 0.95 of (1 + cosine) / 2, which is a cosine of 0.9.
MODERATE = 0.75
SYNCHRONOUS = 0.9


def prototype_proximity(selection: Selection, batch: SelectionInput) -> Selection:
    """Admit what is as near to its cluster's prototype as the farthest trusted sample (prototype proximity filter).

    The authors compare distances with the farthest sample of all classes, labelled ones included. Here cosines
    are compared within the cluster: without labels a single stray sample would admit everything.
    """
    similarity = prototype_similarity(selection, batch.features)
    labels, trusted = selection.labels, torch.where(selection.mask, similarity, torch.inf)
    farthest = similarity.new_full((len(selection.quota),), torch.inf).scatter_reduce(0, labels, trusted, "amin")
    return _admit_moderate(selection, batch, (similarity > 0) & (similarity >= farthest[labels]))


def gradient_synchronisation(selection: Selection, batch: SelectionInput) -> Selection:
    """Admit what pulls the last layer as its cluster's trusted samples do (gradient synchronisation filter).

    The authors compare gradients of the features, for which the weights of the last layer would be needed. The
    gradients of these weights, compared here, are alike only where the inputs of the layer are alike as well.
    """
    return _admit_moderate(selection, batch, gradient_similarity(selection, batch.probs, batch.hidden) >= SYNCHRONOUS)


def prototype_similarity(selection: Selection, features: Tensor) -> Tensor:
    """Return the cosine (B,) of features to the mean unit feature of trusted samples of the label; 0 without any."""
    directions = F.normalize(features, dim=1)  # (B, D)
    prototypes = F.normalize(_membership(selection, features).T @ directions, dim=1)  # (C, D)
    return (directions * prototypes[selection.labels]).sum(dim=1)


def gradient_similarity(selection: Selection, probs: Tensor, hidden: Tensor) -> Tensor:
    """Return the cosine (B,) between a sample's gradient and the mean unit gradient of its label's trusted samples.

    The gradient of the cross-entropy for the last layer's weights is the outer product of p - onehot(label) and
    the layer's input h (``hidden``). Inner products of such matrices are products of inner products, so that
    (B, C, H) numbers are never needed. It is 0 where no sample with the label is trusted.
    """
    residuals = F.normalize(_residual_directions(probs, selection.labels), dim=1)  # (B, C)
    inputs = F.normalize(hidden, dim=1)  # (B, H)
    likeness = (residuals @ residuals.T) * (inputs @ inputs.T)  # (B, B)
    membership = _membership(selection, probs)  # (B, C)
    along = (likeness @ membership).gather(1, selection.labels.unsqueeze(1)).squeeze(1)
    length = (membership.T @ along).clamp(min=0).sqrt()  # (C,) of the summed gradients
    return along / length[selection.labels].clamp(min=1e-3)  # gradients that cancel have no direction


class Extended(Selector):
    """A selection and what add-ons admit; each add-on gets what the base trusts, so their order does not matter."""

    def __init__(self, base: Selector, added: Sequence[AddOn]) -> None:
        super().__init__(base.image_count, base.clusters, base.threshold, base.momentum, base.device, base.state)
        self.base, self.added = base, added

    def __call__(self, batch: SelectionInput) -> Selection:
        selection = self.base(batch)
        return _add(selection, torch.stack([add(selection, batch).mask for add in self.added]).any(dim=0))


def _admit_moderate(selection: Selection, batch: SelectionInput, alike: Tensor) -> Selection:
    return _add(selection, alike & (batch.probs.max(dim=1).values > MODERATE))


def _add(selection: Selection, more: Tensor) -> Selection:
    admitted = count_members(selection.labels, len(selection.quota), more & ~selection.mask)
    return Selection(selection.labels, selection.mask | more, selection.quota + admitted)


def _membership(selection: Selection, like: Tensor) -> Tensor:
    """Return (B, C): 1 where a trusted sample has the label, else 0."""
    return F.one_hot(selection.labels, len(selection.quota)).to(like) * selection.mask.unsqueeze(1)


def _residual_directions(probs: Tensor, labels: Tensor) -> Tensor:
    """Return (B, C): p - onehot(label), scaled to -1 at the label; exact also where p rounds to 1."""
    others = probs.scatter(1, labels.unsqueeze(1), 0.0)
    shares = others / others.sum(dim=1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    return shares.scatter(1, labels.unsqueeze(1), -1.0)
