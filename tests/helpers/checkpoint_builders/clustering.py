"""Files of SCAN, SeCu, SPICE, CC, TCL, ProPos and of the code that CDC's authors released."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.checkpoint_builders import CIFAR10, CIFAR20, IMAGENET, Case
from tests.helpers.checkpoint_builders.networks import (
    CIFAR_STEM,
    LARGE_STEM,
    STL_STEM,
    WIDTHS,
    WideResNet,
    computed,
    images,
    mlp,
    named,
    resnet,
    with_statistics,
)

MLP = ("linear", "norm", "relu", "linear")
OPEN = {"mean", "std", "input_size"}


def written(folder, payload, name="model.pth.tar"):
    torch.save(payload, folder / name)
    return folder / name


def scan_state(network, heads=0, clusters=10, prefix=""):
    """Return state dict and heads; without heads there is the contrastive one of the pretext task."""
    made = [nn.Linear(WIDTHS[3], clusters) for _ in range(heads)]
    state = named(f"{prefix}backbone.", network, shortcut=True)
    for number, head in enumerate(made):
        state |= named(f"{prefix}cluster_head.{number}.", head)
    if not heads:
        state |= named(f"{prefix}contrastive_head.", mlp("linear", "relu", "linear"))
    return state, made


def scan_pretext(folder):
    network = resnet(CIFAR_STEM, 32)
    path = written(folder, {"optimizer": {}, "model": scan_state(network)[0], "epoch": 7})
    return Case(path, "scan", network, statistics=CIFAR10, inferred=OPEN | {"stem.pool"})


def scan_second_stage(folder):
    network = resnet(CIFAR_STEM, 32)
    state, heads = scan_state(network, heads=3, clusters=20)
    path = written(folder, {"model": state, "head": np.int64(2)})
    return Case(path, "scan", network, (heads[2],), CIFAR20)


def scan_interrupted(folder):
    network = resnet(CIFAR_STEM, 32)
    state, heads = scan_state(network, heads=3, prefix="module.")
    path = written(folder, {"model": state, "epoch": 4, "best_loss_head": np.int64(1)})
    return Case(path, "scan", network, (heads[1],), CIFAR10)


def scan_self_labelled_stl(folder):
    network = resnet(STL_STEM, 96)
    state, heads = scan_state(network, heads=1)
    return Case(written(folder, state), "scan", network, tuple(heads), IMAGENET, size=96, side=96)


class CosineLogits(nn.Module):
    def __init__(self, projection, centers):
        super().__init__()
        self.projection, self.centers = projection, centers  # centres (dim, clusters)

    def forward(self, features):
        return F.normalize(self.projection(features), dim=1) @ F.normalize(self.centers, dim=0) / 0.05


def secu_payload(network, sizes, image_count, imagenet=False):
    """Return the payload and one head per number of clusters."""
    projection = mlp(*((*MLP[:3], *MLP) if imagenet else MLP), clusters=12)
    if imagenet:
        projection.append(nn.BatchNorm1d(12).eval())
    state = named("encoder.", network, shortcut=not imagenet) | named("encoder.fc.", projection)
    heads = []
    for number, size in enumerate(sizes):
        state |= {f"center_{number}": torch.randn(12, size), f"counter_{number}": torch.zeros(size)}
        labels = torch.ones(image_count, dtype=torch.long)
        state |= {f"assign_labels_{number}": labels, f"ldual_{number}": torch.zeros(size)}
        heads.append(CosineLogits(projection, state[f"center_{number}"]))
    if imagenet:
        state |= named("predictor.", mlp(*MLP, inputs=12, clusters=12))
    return {"epoch": 201, "state_dict": named("module.", state), "optimizer": {}}, heads


def secu_cifar(folder):
    network = resnet(CIFAR_STEM, 32)
    payload, heads = secu_payload(network, [10, 20, 30], 50_000)
    return Case(written(folder, payload), "secu", network, (heads[1],), CIFAR10, wanted={"clusters": 20})


def secu_imagenet(folder):
    network = resnet(LARGE_STEM, 64)
    payload, heads = secu_payload(network, [10, 20, 30], 500, imagenet=True)
    return Case(written(folder, payload), "secu", network, (heads[2],), size=224, side=64, wanted={"head": 2})


def cc(folder):
    network, head = resnet(LARGE_STEM, 64), mlp("linear", "relu", "linear")
    state = named("resnet.", network) | named("instance_projector.", mlp("linear", "relu", "linear"))
    path = written(folder, {"net": state | named("cluster_projector.", head), "epoch": 3})
    return Case(path, "cc", network, (head,), ([0] * 3, [1] * 3), 64, 64, {"input_size"})


def tcl(folder):
    network = resnet(LARGE_STEM, 64)
    network.fc = nn.Linear(WIDTHS[3], WIDTHS[3])
    head = mlp("norm", "relu", "linear", "norm", "relu", "linear")
    state = named("resnet.", network) | named("instance_projector.", head) | named("cluster_projector.", head)
    payload = {"model": state, "epoch": 9, "args": argparse.Namespace(dataset="CIFAR-100", nb_cluster=20)}
    return Case(written(folder, payload, "checkpoint-9.pth"), "tcl", network, (head,), CIFAR20, 224, 64, set())


def propos(folder, stem=CIFAR_STEM, first=3, size=32):
    """Write both encoders as lists of layers, in which the first stage has this position."""
    online, average = resnet(stem, size), resnet(stem, size, seed=1)
    places = {"conv1": 0, "bn1": 1} | {f"layer{stage + 1}": first + stage for stage in range(4)}
    state = {}
    for branch, network in (("q", online), ("k", average)):
        for key, value in network.state_dict().items():
            name, _, rest = key.partition(".")
            state[f"encoder_{branch}.{places[name]}.{rest}"] = value
        state |= named(f"projector_{branch}.", mlp(*MLP))
    state |= named("predictor.", mlp(*MLP))
    state |= {key.replace("encoder_k.", "encoder.0."): v for key, v in state.items() if key.startswith("encoder_k.")}
    small = stem is CIFAR_STEM
    statistics, stated = (CIFAR10, 32) if small else (IMAGENET, 96)
    path = written(folder, state, "byol-1000")
    return Case(path, "propos", online, (), statistics, stated, size, average=average, wanted={"branch": "online"})


def propos_large(folder):
    return propos(folder, LARGE_STEM, 4, 96)


def cdc_payload(network, clusters=10, calibrated=10):
    clustering, calibration = mlp(*MLP, clusters=clusters), mlp(*MLP, clusters=calibrated)
    for weight in calibration.parameters():
        weight.data += 0.1
    model = named("module.backbone.", network) | named("module.cluster_head.0.", clustering)
    saved = {"model": model, "cali_mlp": named("module.calibration_head.", calibration), "epoch": 5}
    return saved, clustering, calibration


def cdc(folder):
    network = resnet(CIFAR_STEM, 32)
    payload, *heads = cdc_payload(network)
    return Case(written(folder, payload), "cdc", network, tuple(heads), CIFAR10)


def cdc_without_calibration(folder):
    network = resnet(CIFAR_STEM, 32)
    payload, clustering, _ = cdc_payload(network)
    return Case(written(folder, payload["model"]), "cdc", network, (clustering,), CIFAR10)


def spice_self_state(network, heads, clusters=10, shortcut=True):
    made = [mlp("linear", "relu", "linear", clusters=clusters) for _ in range(heads)]
    state = named("module.feature_module.", network, shortcut)
    for number, head in enumerate(made):
        layers = {"0": "lin1", "2": "lin2"}
        inner = {f"{layers[key[0]]}{key[1:]}": value for key, value in head.state_dict().items()}
        state |= named(f"module.head.head_{number}.classifier.", inner)
    return state, made


def spice_self(folder):
    network = resnet(CIFAR_STEM, 32)
    state, heads = spice_self_state(network, heads=1)
    return Case(written(folder, state), "spice-self", network, tuple(heads), inferred={"input_size", "stem.pool"})


def spice_self_training(folder):
    network = resnet(STL_STEM, 96, depths=(3, 4, 6, 3))
    state, heads = spice_self_state(network, heads=3, shortcut=False)
    path = written(folder, {"epoch": 2, "state_dict": state, "optimizer": {}})
    return Case(path, "spice-self", network, (heads[2],), size=96, side=96, wanted={"head": 2})


def spice_moco(folder):
    online, average = resnet(STL_STEM, 32), resnet(STL_STEM, 32, seed=1)
    state = named("module.encoder_q.", online, shortcut=True) | named("module.encoder_k.", average, shortcut=True)
    state |= named("module.encoder_q.fc.", mlp("linear", "relu", "linear"))
    state |= {"module.queue": torch.randn(8, 16), "module.queue_ptr": torch.zeros(1)}
    path = written(folder, {"epoch": 1000, "arch": "resnet18", "state_dict": state, "optimizer": {}})
    return Case(path, "moco", online, size=96, average=average)


def moco_published(folder):
    network = resnet(LARGE_STEM, 64)
    path = written(folder, {"arch": "resnet50", "state_dict": named("module.encoder_q.", network)})
    return Case(path, "moco", network, size=224, side=64)


def spice_semi_payload(online, average, clusters=10):
    """Return the payload and the classifier of the moving average."""
    states = []
    for network in (online, average):
        head = nn.Linear(computed(network, given=images(32)).shape[1], clusters)
        states.append((named("", network, shortcut=True) | named("fc.", head), head))
    (train, _), (evaluated, head) = states
    return {"train_model": train, "eval_model": evaluated, "optimizer": {}, "scheduler": {}, "it": 5}, head


def wide_resnet(widths=(4, 8, 12, 16), strides=(1, 2, 2), size=32, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_statistics(WideResNet(2, list(widths), strides), images(size))


def spice_semi(folder):
    online, average = wide_resnet(), wide_resnet(seed=1)
    payload, head = spice_semi_payload(online, average, clusters=20)
    statistics = [129.3 / 255, 124.1 / 255, 112.4 / 255], [68.2 / 255, 65.4 / 255, 70.4 / 255]
    return Case(written(folder, payload), "spice-semi", average, (head,), statistics, average=average)


def spice_semi_stl(folder):
    network = wide_resnet((4, 8, 12, 16, 20), (2, 2, 2, 2), 96)
    payload, head = spice_semi_payload(network, network)
    return Case(written(folder, payload), "spice-semi", network, (head,), size=96, side=96)


def spice_semi_resnet(folder):
    network = resnet(CIFAR_STEM, 32)
    payload, head = spice_semi_payload(network, network)
    statistics = [125.3 / 255, 123.0 / 255, 113.9 / 255], [63.0 / 255, 62.1 / 255, 66.7 / 255]
    return Case(written(folder, payload), "spice-semi", network, (head,), statistics)


BUILDERS = (
    *(scan_pretext, scan_second_stage, scan_interrupted, scan_self_labelled_stl, secu_cifar, secu_imagenet, cc, tcl),
    *(propos, propos_large, cdc, cdc_without_calibration, spice_self, spice_self_training, spice_moco),
    *(moco_published, spice_semi, spice_semi_stl, spice_semi_resnet),
)
