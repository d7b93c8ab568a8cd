import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from cdc_plugin.comparison.baselines.classic import cut_graph, find_dense, fit_mixture
from cdc_plugin.errors import ConfigError
from tests.helpers.blob_tasks import CLUSTERS, blob_task, purity


@pytest.mark.parametrize("cluster", [lambda task: fit_mixture(task).argmax(dim=1), cut_graph, find_dense])
def test_three_blobs_are_found(cluster):
    task, truth = blob_task(nn.Identity())
    found = cluster(task)
    assert purity(found.clamp(max=CLUSTERS - 1), truth) > 0.9
    assert torch.equal(cluster(task), found)


def test_a_mixture_gives_probabilities():
    task, _ = blob_task(nn.Identity())
    torch.testing.assert_close(fit_mixture(task).sum(dim=1), torch.ones(120).double())


def test_noise_of_hdbscan_is_one_more_cluster_and_the_number_found_is_said(caplog):
    task, _ = blob_task(nn.Identity())
    outlying = 100 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    features = torch.cat([task.features, outlying])
    task = replace(task, features=features, image_count=124, settings=replace(task.settings, clusters=2))
    with caplog.at_level("WARNING"):
        found = find_dense(task)
    assert found.max() == CLUSTERS  # the noise
    assert "found 3 clusters where 2 were asked for" in caplog.text
    assert (found[120:] == CLUSTERS).any()


@pytest.mark.parametrize("cluster", [fit_mixture, cut_graph, find_dense])
def test_without_scikit_learn_the_error_says_what_to_install(cluster, monkeypatch):
    for part in ("mixture", "cluster"):
        monkeypatch.setitem(sys.modules, f"sklearn.{part}", None)
    with pytest.raises(ConfigError, match=r"pip install 'cdc-plugin\[classic\]'"):
        cluster(blob_task(nn.Identity())[0])
