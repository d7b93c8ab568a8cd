import math

import pytest
import torch

from cdc_plugin.core.sizes import FLOOR, estimate_shares, follow_shares
from tests.helpers import random_probs


def test_shares_follow_the_mean_predictions_and_never_fall_below_the_floor():
    shares = None
    for _ in range(50):
        shares = follow_shares(shares, torch.tensor([[0.7, 0.3, 0.0], [0.5, 0.5, 0.0]]), momentum=0.5)
    assert FLOOR / 3 / (1 + FLOOR / 3) <= shares[2].item() <= FLOOR / 3
    assert shares.sum().item() == pytest.approx(1)
    assert (shares[0] / shares[1]).item() == pytest.approx(0.6 / 0.4, rel=1e-3)


def test_a_share_in_its_interval_is_no_surer_than_chance_allows():
    probs = random_probs(400, 5)
    share, error = estimate_shares(probs, doubt=0.0)
    drawn = torch.stack(
        [
            torch.bincount(
                torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed))[:, 0], minlength=5
            )
            for seed in range(2000)
        ]
    )
    torch.testing.assert_close(drawn.float().mean(dim=0) / 400, share, atol=2e-3, rtol=0)
    torch.testing.assert_close(drawn.float().std(dim=0) / 400, error, atol=0, rtol=0.08)


def test_doubt_about_the_level_widens_shares_as_a_shifted_logit_moves_them():
    probs, shift = random_probs(400, 5).double(), 1e-4
    _, certain = estimate_shares(probs, doubt=0.0)
    share, error = estimate_shares(probs, doubt=shift)
    for cluster in range(5):
        odds = probs[:, cluster] / (1 - probs[:, cluster]) * math.exp(shift)
        moved = (odds / (1 + odds)).mean() - share[cluster]
        both = (certain[cluster].square() + moved.square()).sqrt()
        assert error[cluster].item() == pytest.approx(both.item(), rel=1e-6)
