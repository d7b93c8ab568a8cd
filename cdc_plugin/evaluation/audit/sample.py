"""Draw the images to label by hand: spread evenly over the confidences, each with the same chance."""

import numpy as np
from numpy.typing import NDArray


def draw_rows(
    confidence: NDArray[np.floating], selected: NDArray[np.bool_] | None, count: int, seed: int
) -> NDArray[np.int64]:
    """Draw ``count`` of N images (at most all), one from each of ``count`` strata, and return them in random order.

    The images are sorted (selected ones first, then by confidence, equal ones in their order) and cut into ``count``
    strata of equal size N / count. Where that is not an integer, a border falls inside an image; ordered pivotal
    sampling (Deville and Tillé 1998) lets such an image stand for its two strata in turn. So exactly ``count``
    different images are drawn, each with the probability count / N, and no weights are needed.

    Why the bounds hold: pivotal sampling has the strong Rayleigh property (Brändén and Jonasson 2012). The number of
    right images in the sample is therefore distributed as a sum of ``count`` independent yes/no variables whose mean
    probability is the accuracy p of all N images, and by Hoeffding (1956, theorem 4) such a sum deviates from its mean
    no more often than the binomial one of a simple random sample: P(sum >= x) <= P(binomial >= x) for
    x >= count p + 1, and likewise below. The Clopper-Pearson bounds at error rate a use tails in that range, so they
    hold as stated if p and 1 - p are at least 1 - (1 - a)^(1 / count), or 0. Beyond that (fewer than 0.053 / count of
    the images right, or wrong, at a = 0.05) the probability of a miss is at most -ln(1 - a) = 0.0513 instead of 0.05.
    """
    randomness = np.random.default_rng(seed)
    groups = np.zeros(len(confidence), dtype=bool) if selected is None else ~np.asarray(selected, dtype=bool)
    order = np.lexsort((-np.asarray(confidence, dtype=np.float64), groups))
    return randomness.permutation(order[draw_pivotal(len(order), min(count, len(order)), randomness)])


def draw_pivotal(image_count: int, count: int, randomness: np.random.Generator) -> NDArray[np.int64]:
    """Draw ``count`` of the indices 0 ... image_count - 1; neighbours are seldom drawn together.

    Shares are multiples of 1 / image_count, so that nothing is lost by rounding. Each index comes with the share
    ``count`` and meets the one that is still undecided. If their shares add up to less than one, one of them takes
    both; otherwise one of them is drawn and the other continues with the remainder.
    """
    drawn = []
    undecided, share = 0, 0
    for index, chance in enumerate(randomness.random(image_count).tolist()):
        total = share + count
        if total < image_count:
            if chance * total < count:
                undecided = index
            share = total
        else:
            if chance * (2 * image_count - total) < image_count - count:
                drawn.append(undecided)
                undecided = index
            else:
                drawn.append(index)
            share = total - image_count
    return np.array(drawn, dtype=np.int64)
