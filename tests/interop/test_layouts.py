"""Checkpoints in the layouts of all supported frameworks, against networks written independently of the package."""

import json

import pytest
import torch

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.evaluation.inspect import inspect
from cdc_plugin.models.architectures import build
from tests.helpers.checkpoint_builders import clustering, libraries, self_supervised
from tests.helpers.checkpoint_builders.networks import computed, images

BUILDERS = {build.__name__: build for part in (clustering, self_supervised, libraries) for build in part.BUILDERS}


@pytest.fixture(scope="module", params=BUILDERS)
def case(request, tmp_path_factory):
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


def assert_same_features(backbone, network, side):
    pixels = images(side, count=4)
    expected = computed(network, given=pixels).flatten(1)
    torch.testing.assert_close(computed(backbone, given=pixels), expected, rtol=1e-5, atol=1e-5)


def test_checkpoint_gives_features_logits_and_input_of_its_framework(case):
    loaded = load_checkpoint(case.path, wanted=Wanted(**case.wanted))
    backbone = loaded.backbone
    assert (loaded.format, loaded.matched) == (case.format, 1.0)
    assert_same_features(backbone, case.network, case.side)
    assert len(loaded.heads) == len(case.heads)
    features = torch.rand(4, backbone.feature_dim, generator=torch.Generator().manual_seed(0))
    for head, expected in zip(loaded.heads, case.heads, strict=True):
        logits = computed(expected, given=features)
        torch.testing.assert_close(computed(head, given=features), logits, rtol=1e-4, atol=1e-5)
    mean, std = case.statistics
    assert backbone.mean.tolist() == pytest.approx(list(mean))
    assert backbone.std.tolist() == pytest.approx(list(std))
    assert backbone.input_size == case.size
    assert case.inferred is None or set(backbone.inferred) == case.inferred
    again, _ = build(json.loads(json.dumps(backbone.spec)))
    again.load_state_dict(backbone.module.state_dict())
    assert_same_features(again, case.network, case.side)


def test_moving_average_is_loaded_on_request(case):
    if case.average is not None:
        loaded = load_checkpoint(case.path, wanted=Wanted(branch="momentum"))
        assert_same_features(loaded.backbone, case.average, case.side)


def test_inspection_states_the_same_facts(case):
    report = inspect(case.path, **case.wanted)
    assert (report["loadable"], report["error"], report["format"]) == (True, None, case.format)
    assert report["input"]["size"] == case.size
    assert report["input"]["mean"] == pytest.approx(list(case.statistics[0]), abs=1e-3)
    assert len(report["heads_used"]) == len(case.heads)
    assert ("momentum" in report["branches"]) == (case.average is not None)
