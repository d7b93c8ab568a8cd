"""Clustering by scikit-learn on the frozen features: Gaussian mixture, spectral clustering and HDBSCAN.

All get the rows that k-means gets: z-scored, then of unit length.
"""

import importlib
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdc_plugin.comparison.baselines.loop import WEIGHTS, BaselineTask
from cdc_plugin.core.prototypes import standardize_rows
from cdc_plugin.core.random_streams import generator
from cdc_plugin.errors import ConfigError
from cdc_plugin.training.progress import log

STARTS = 10  # of a mixture, as of k-means
LEAST_SHARE = 0.25  # smallest cluster of HDBSCAN over the mean size of C clusters


def fit_mixture(task: BaselineTask) -> Tensor:
    """Return the posteriors (N, C) of a mixture of C Gaussians.

    Covariances are diagonal: full ones have more entries than there are numbers in a small set of images.
    """
    mixture = _import("mixture").GaussianMixture(
        task.settings.clusters, covariance_type="diag", n_init=STARTS, random_state=_draw_seed(task)
    )
    rows = _rows(task)
    return torch.from_numpy(mixture.fit(rows).predict_proba(rows))


def cut_graph(task: BaselineTask) -> Tensor:
    """Return the clusters (N,) of spectral clustering, on the graph of the ten nearest neighbours."""
    neighbours = min(10, task.image_count)
    return _fit_predict(
        "SpectralClustering",
        task,
        n_clusters=task.settings.clusters,
        affinity="nearest_neighbors",
        n_neighbors=neighbours,
        random_state=_draw_seed(task),
    )


def find_dense(task: BaselineTask) -> Tensor:
    """Return the clusters (N,) of HDBSCAN, which finds their number itself; what it calls noise is one more cluster."""
    least = max(5, round(LEAST_SHARE * task.image_count / task.settings.clusters))
    found = _fit_predict("HDBSCAN", task, min_cluster_size=least, copy=True)
    noise, clusters = found < 0, int(found.max()) + 1
    if noise.any() or clusters != task.settings.clusters:
        words = "HDBSCAN found %d clusters where %d were asked for; %d of %d images are noise, counted as one cluster"
        log.warning(words, clusters, task.settings.clusters, int(noise.sum()), len(found))
    return found.where(~noise, clusters)


def _fit_predict(name: str, task: BaselineTask, **settings: Any) -> Tensor:
    model = getattr(_import("cluster"), name)(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a graph in several pieces is what separate clusters make
        return torch.from_numpy(model.fit_predict(_rows(task))).long()


def _rows(task: BaselineTask) -> np.ndarray[Any, Any]:
    return standardize_rows(task.features).cpu().numpy().astype(np.float64)


def _draw_seed(task: BaselineTask) -> int:
    return int(torch.randint(2**31, (), generator=generator(task.settings.seed, WEIGHTS)))


def _import(part: str) -> Any:
    try:
        return importlib.import_module(f"sklearn.{part}")
    except ImportError as error:
        raise ConfigError("gmm, spectral and hdbscan need scikit-learn: pip install 'cdc-plugin[classic]'") from error
