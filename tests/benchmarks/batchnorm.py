"""Choose when images contradict a network: ``python tests/benchmarks/batchnorm.py ../shared``; takes ten minutes.

Each of six networks sees the images it was trained on (or of their kind), the same under wrong normalisations, and
other sets. Two limits are chosen, on all and with each network left out in turn: the mismatch above which images are
unlike, and the ratio by which another normalisation must come nearer. Printed is how they do on the network left out.
"""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch

from cdc_plugin.checkpoints import Wanted, load_checkpoint
from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS, batchnorm_mismatch, input_of, normalise, with_stem
from cdc_plugin.checkpoints.infer.resolve import check_input
from cdc_plugin.data.images import open_images
from cdc_plugin.models.backbone import Backbone

SHARED = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
STATED = {"digits": (0.3092, 0.3488), "fashion5k": (0.2851, 0.3375)}
WRONG = {name: NORMALISATIONS[name] for name in ("none", "imagenet", "half", "cifar10")}
EFFICIENTNET = "weights/tf_efficientnet_lite0_imagenet_timm.pth", "tf_efficientnet_lite0"
TRAINED = (*STATED, "mnist5k", "usps5k", "gtsrb10", "imagenette_1000")
SETS = (*TRAINED, "scenes_900", "cifar10_5k", "textures_600")
ALIKE = ({"digits", "mnist5k", "usps5k"}, {"imagenette_1000", "scenes_900"})  # neither the same nor clearly other


def backbone_of(name):
    if name in STATED:
        found = load_checkpoint(SHARED / f"backbones/{name}_resnet18w16.pt").backbone
        network = with_stem(found, {"padding": 1, "stride": 1, "pool": True})
        return Backbone(network, found.feature_dim, *([number] * 3 for number in STATED[name]), 32, found.spec)
    file, arch = EFFICIENTNET if "_" in name else (f"backbones/{name}", None)
    return load_checkpoint(SHARED / file, wanted=Wanted(arch=arch)).backbone


def read(name, size):
    path = SHARED / "data" / name
    images = open_images(str(path if path.is_dir() else path.with_suffix(".npz")), size, labels=False)
    return images.batch(torch.from_numpy(np.random.default_rng(0).permutation(len(images))[: 256 if size < 64 else 64]))


def mismatch(backbone, pixels):
    return batchnorm_mismatch(backbone, normalise(pixels / 255, input_of(backbone)))


def ratio(backbone, pixels, pair):
    variant = Backbone(backbone.module, backbone.feature_dim, *pair, backbone.input_size, backbone.spec)
    mismatches = {bool(v.changed): v.mismatch for v in check_input(variant, pixels).variants[::-1]}
    return mismatches[False] / min(mismatches.values())


def choose(fitting, wrong):
    """Return the middle of the limits with the fewest errors, a share of false alarms and one of misses."""
    values = sorted({*fitting, *wrong})
    limits = [math.sqrt(low * high) for low, high in itertools.pairwise(values)]
    errors = [np.mean(np.array(fitting) > limit) + np.mean(np.array(wrong) <= limit) for limit in limits]
    best = [limit for limit, error in zip(limits, errors, strict=True) if error == min(errors)]
    return best[len(best) // 2]


def main():
    figures = {"mismatch": ({}, {}), "ratio": ({}, {})}  # of images that fit and of others, by network
    for name in TRAINED:
        backbone = backbone_of(name).eval()
        own, given = read(name, backbone.input_size), input_of(backbone)
        few = {n: max(mismatch(backbone, part) for part in own[: 8 * n].split(n)) for n in (1, 4, 16, 64)}
        print(name, "largest mismatch by number of images:", {n: round(value, 2) for n, value in few.items()})
        unlike = [n for n in SETS if n != name and not any({n, name} <= kind for kind in ALIKE)]
        figures["mismatch"][0][name] = [mismatch(backbone, own), few[64]]
        figures["mismatch"][1][name] = [mismatch(backbone, read(other, backbone.input_size)) for other in unlike]
        pairs = [pair for pair in WRONG.values() if np.abs(np.subtract(pair, given)).max() > 0.02]
        pairs.append(tuple(tuple(v / 255 for v in part) for part in given))  # pixels in 0..255
        figures["ratio"][0][name] = [ratio(backbone, own, given), ratio(backbone, own[:16], given)]
        figures["ratio"][1][name] = [ratio(backbone, own, pair) for pair in pairs]
        for kind, parts in figures.items():
            print(f"  {kind}:", *(np.round(part[name], 2) for part in parts), flush=True)
    for kind, parts in figures.items():
        print(kind, "of all:", round(choose(*(list(itertools.chain(*part.values())) for part in parts)), 2))
        for left_out in TRAINED:
            limit = choose(*([v for name in part if name != left_out for v in part[name]] for part in parts))
            alarms, noticed = (sum(value > limit for value in part[left_out]) for part in parts)
            counts = [len(part[left_out]) for part in parts]
            print(f"{kind} without {left_out}: {limit:.2f}; alarms {alarms}/{counts[0]}, noticed {noticed}/{counts[1]}")


if __name__ == "__main__":
    main()
