"""Which images to label by hand: spread evenly over the confidences, and every image as likely as any other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def draw_rows(
    confidence: NDArray[np.floating], selected: NDArray[np.bool_] | None, count: int, seed: int
) -> NDArray[np.int64]:
    """Draw ``count`` of N images (all, if there are no more), one from each of ``count`` strata, in random order.

    The images are sorted (selected ones first, then by confidence; equal ones stay in their order, which does no
    harm) and cut into ``count`` strata of the same size N / count. Where that is no whole number, a border runs
    through an image; ordered pivotal sampling (Deville and Tillé 1998) lets such an image stand for its two
    strata in turn. So exactly ``count`` different images are drawn, each with the chance count / N: no weights.

    What that is good for: pivotal sampling has the strong Rayleigh property (Brändén and Jonasson 2012). The
    number of right images in the sample is therefore distributed as a sum of ``count`` independent yes/no
    variables whose mean chance is the accuracy p of all N images, and by Hoeffding (1956, theorem 4) such a sum
    strays from its mean no more often than the binomial one of a simple random sample:
    P(sum >= x) <= P(binomial >= x) for x >= count p + 1, and likewise below. The Clopper-Pearson bounds at error
    rate a ask for tails in that range, so they hold as stated if p and 1 - p are at least 1 - (1 - a)^(1 / count),
    or 0. Beyond that, fewer than 0.053 / count of the images right (or wrong) at a = 0.05, the chance of a miss is
    at most -ln(1 - a) = 0.0513 instead of 0.05.

    Args:
        confidence: (N,) calibrated confidence of every image.
        selected: (N,) whether an image is among those that the user keeps, where such a choice was made.
    """
    randomness = np.random.default_rng(seed)
    groups = np.zeros(len(confidence), dtype=bool) if selected is None else ~np.asarray(selected, dtype=bool)
    order = np.lexsort((-np.asarray(confidence, dtype=np.float64), groups))
    return randomness.permutation(order[pivotal_sample(len(order), min(count, len(order)), randomness)])


def pivotal_sample(images: int, count: int, randomness: np.random.Generator) -> NDArray[np.int64]:
    """Places 0 ... images - 1 that are drawn, ``count`` of them; neighbours are seldom drawn together.

    Shares are whole numbers of 1 / images, so that nothing is lost by rounding. Each place comes with the share
    ``count`` and meets the one that is still in play. If both shares make less than a whole, one of them takes
    all of it; else one of them is drawn and the other goes on with what is over.
    """
    drawn = []
    playing, share = 0, 0
    for place, chance in enumerate(randomness.random(images).tolist()):
        together = share + count
        if together < images:
            if chance * together < count:
                playing = place
            share = together
        else:
            if chance * (2 * images - together) < images - count:
                drawn.append(playing)
                playing = place
            else:
                drawn.append(place)
            share = together - images
    return np.array(drawn, dtype=np.int64)
