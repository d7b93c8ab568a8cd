"""The metrics against numbers that the authors' released code computed on the same predictions."""

import numpy as np
import pytest

from cdc_plugin.metrics import match_clusters, summary
from tests.helpers import SHARED

GOLDEN = SHARED / "golden" / "f_metrics.npz"
CASES = ["good", "overconf", "random", "c20", "c5", "collapsed"]


@pytest.mark.skipif(not GOLDEN.exists(), reason="numbers of the released code are not beside this checkout")
@pytest.mark.parametrize("case", CASES)
def test_metrics_equal_those_of_the_released_code(case):
    golden = np.load(GOLDEN)
    probs, labels = golden[f"{case}/probs"], golden[f"{case}/targets"]
    scores = summary(probs, labels)
    for name in ("ACC", "NMI", "ARI", "ECE", "CONF"):
        assert 100 * scores[name] == pytest.approx(float(golden[f"{case}/{name}"]), abs=1e-4), name
    if case != "collapsed":  # empty clusters may be matched in any order
        expected = dict(golden[f"{case}/match"].tolist())
        matched = match_clusters(probs.argmax(axis=1), labels, probs.shape[1])
        assert dict(enumerate(matched.tolist())) == expected
