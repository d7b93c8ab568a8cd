"""Pretrains the backbone of the embedded demo: MoCo-v2 on the handwritten digits, without labels.

``pip install cdc-plugin[pretrain]`` and then ``python -m cdc_plugin.training.pretrain_demo FOLDER`` make it again; it
takes about 10 minutes. The labels of the digits are dropped where they are opened.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.formats.native import DESCRIPTION, VERSION, WEIGHTS
from cdc_plugin.data.images import open_images
from cdc_plugin.data.views import ViewSettings, strong_view
from cdc_plugin.models.architectures import build

SPEC = {
    "family": "resnet",
    "block": "basic",
    "depths": [2, 2, 2, 2],
    "widths": [16, 32, 64, 128],
    "stem": {"kernel": 3, "stride": 1, "padding": 1, "pool": True},
}
SIZE, BATCH = 32, 256


def pretrain(epochs: int, seed: int, report: bool = True) -> tuple[nn.Module, dict[str, object]]:
    """A backbone trained by MoCo-v2 (momentum encoder, queue of negatives, InfoNCE), and its model.json."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    torch.manual_seed(seed)  # a script of its own: network and queue take their start from here
    images = open_images("digits", SIZE, labels=False)
    pixels = images.batch(range(len(images)))
    shares = pixels.double() / 255
    mean, std = round(shares.mean().item(), 4), round(shares.std().item(), 4)
    # Mirrored digits are other signs, and inverted ones are not in the data.
    settings = ViewSettings(
        SIZE,
        (mean,) * 3,
        (std,) * 3,
        flip=False,
        crop_scale=0.4,
        operations=2,
        cutout=8,
        excluded=("solarize",),
    )

    backbone, feature_dim = build(SPEC)
    network = nn.Sequential(backbone, MoCoProjectionHead(feature_dim, 256, 64))
    network.to(memory_format=torch.channels_last)
    momentum_network = copy.deepcopy(network)
    deactivate_requires_grad(momentum_network)
    loss_function = NTXentLoss(temperature=0.2, memory_bank_size=(1024, 64))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.12, momentum=0.9, weight_decay=1e-4)
    batches = len(images) // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, epochs * batches))
    randomness = torch.Generator().manual_seed(seed)

    def view(chosen: Tensor) -> Tensor:
        made = strong_view(pixels[chosen], settings, randomness)
        return made.contiguous(memory_format=torch.channels_last)

    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(images), generator=randomness).split(BATCH)[:batches]:
            update_momentum(network, momentum_network, cosine_schedule(epoch, epochs, 0.99, 1.0))
            query = network(view(chosen))
            with torch.no_grad():
                # The keys take another order, so that BatchNorm does not give pairs away.
                order = torch.randperm(len(chosen), generator=randomness)
                key = momentum_network(view(chosen[order]))[order.argsort()]
            loss = loss_function(query, key)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        if report:
            print(f"epoch {epoch + 1}/{epochs}: loss {total / batches:.4f}", flush=True)
    description: dict[str, object] = {
        "format": "cdc_plugin",
        "version": VERSION,
        "backbone": {
            "spec": SPEC,
            "feature_dim": feature_dim,
            "mean": [mean] * 3,
            "std": [std] * 3,
            "input_size": SIZE,
        },
        "provenance": {
            "tool": "cdc_plugin.training.pretrain_demo",
            "method": "MoCo-v2 (lightly)",
            "data": "digits, labels dropped",
            "epochs": epochs,
            "seed": seed,
        },
    }
    return backbone, description


def _rate(step: int, steps: int) -> float:
    warmup = steps // 20 + 1
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main() -> None:
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(prog="python -m cdc_plugin.training.pretrain_demo", description=__doc__)
    parser.add_argument("folder", type=Path, help="where model.safetensors and model.json go")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    backbone, description = pretrain(options.epochs, options.seed)
    tensors = {f"backbone.{name}": t.contiguous() for name, t in backbone.state_dict().items()}
    save_file(tensors, options.folder / WEIGHTS)
    (options.folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
