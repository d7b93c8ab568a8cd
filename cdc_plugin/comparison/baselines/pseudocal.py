"""PseudoCal (Hu et al., ICML 2024): fit a temperature without labels, on mixtures of images of two clusters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import WEIGHTS, BaselineTask, compute_features, split_batch
from cdc_plugin.comparison.temperature import fit_temperature
from cdc_plugin.core.random_streams import generator

SHARE = 0.65  # of the image whose cluster is the label of the mixture


@torch.no_grad()
def calibrate_by_mixing(task: BaselineTask, head: nn.Module) -> Tensor:
    """Return (N, C) probabilities of a head, by the temperature that suits mixtures of N random pairs of images.

    A mixture is SHARE of one image and the rest of another that the head puts into another cluster; right is the
    cluster of the first. Some mixtures are predicted wrongly, as some images are: the head is as confident as it is
    right on these. Images and views are plain, and no image changes its cluster.
    """
    task.backbone.eval()
    logits: Tensor = head(task.features)
    labels = logits.argmax(dim=1).cpu()
    partners = torch.randperm(len(labels), generator=generator(task.settings.seed, WEIGHTS))
    rows = (labels != labels[partners]).nonzero().flatten()
    if not len(rows):
        return F.softmax(logits, dim=1)
    mixed = torch.cat(
        [_predict_mixtures(task, head, part, partners[part]) for part in split_batch(rows, task.settings)]
    )
    return F.softmax(logits / fit_temperature(mixed, labels[rows]), dim=1)


def _predict_mixtures(task: BaselineTask, head: nn.Module, rows: Tensor, others: Tensor) -> Tensor:
    first, second = (task.plain(each, torch.Generator()) for each in (rows, others))
    logits: Tensor = head(compute_features(task, SHARE * first + (1 - SHARE) * second))
    return logits
