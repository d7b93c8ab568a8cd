"""What several tests share: small real images, a tiny network, and threads that do not fight over cores."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

TINY_SPEC = {
    "family": "resnet",
    "block": "basic",
    "depths": [1, 1, 1, 1],
    "widths": [8, 8, 8, 8],
    "stem": {"kernel": 3, "stride": 1, "padding": 1, "pool": True},
}


KINDS = ("unit", "e2e", "ddp", "faults", "interop")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with the folder it lies in: ``pytest -m interop``."""
    for item in items:
        kind = item.path.relative_to(Path(__file__).parent).parts[0]
        if kind in KINDS:
            item.add_marker(kind)


@pytest.fixture
def randomness() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads, and as many as before in the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """The first 200 embedded digits, uint8 (200, 32, 32, 3), and what they show."""
    from cdc_plugin.data.images import open_images

    found = open_images("digits", 32)
    assert found.labels is not None
    return np.asarray(found.images[:200]), found.labels[:200]


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory, digits) -> Path:
    """The digits and what they show as an .npz file."""
    path = tmp_path_factory.mktemp("archive") / "digits.npz"
    np.savez(path, x=digits[0], y=digits[1])
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict with torchvision's names of a ResNet with 8 features; random weights."""
    from cdc_plugin.models.architectures import build

    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, _ = build(TINY_SPEC)
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.pt"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture
def tiny_backbone(tiny_checkpoint: Path):
    """The same network as a `Backbone` that can be built again from its spec."""
    from cdc_plugin.models.architectures import build
    from cdc_plugin.models.backbone import Backbone

    network, feature_dim = build(TINY_SPEC)
    network.load_state_dict(torch.load(tiny_checkpoint, weights_only=True))
    return Backbone(network, feature_dim, [0.3] * 3, [0.35] * 3, 32, spec=TINY_SPEC)


@pytest.fixture
def tiny_clusterer(tiny_backbone):
    """The same network with two different heads of 5 clusters, in evaluation mode."""
    from cdc_plugin.models.clusterer import Clusterer
    from cdc_plugin.models.heads import ClusterHead

    with torch.random.fork_rng():
        torch.manual_seed(3)
        heads = [ClusterHead(8, 12, 5) for _ in range(2)]
        for head in heads:  # statistics that differ from those of a fresh layer
            head(torch.randn(40, 8) * 3 + 1)
    return Clusterer(tiny_backbone, *heads).eval()


@pytest.fixture(scope="session")
def scan_checkpoint(tmp_path_factory: pytest.TempPathFactory, digits) -> Path:
    """What the second stage of SCAN saves, of a small network: two heads that sort digits into 4 clusters by chance."""
    from cdc_plugin.models.architectures import build

    with torch.random.fork_rng():
        torch.manual_seed(0)
        stem = {"kernel": 3, "stride": 1, "padding": 1, "pool": False}
        network, size = build({**TINY_SPEC, "depths": [2, 2, 2, 2], "stem": stem})
        heads = torch.randn(2, 4, size)
    # Fitted to digits as SCAN would feed them; otherwise all of them would be in one cluster.
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.201]))
    with torch.no_grad():
        features = network.eval()((torch.from_numpy(digits[0]).permute(0, 3, 1, 2) / 255 - mean) / std)
    heads /= features.std(dim=0) + 1e-6
    biases = -heads @ features.mean(dim=0)
    state = {f"backbone.{key.replace('downsample', 'shortcut')}": value for key, value in network.state_dict().items()}
    for number, (weight, bias) in enumerate(zip(heads, biases, strict=True)):
        state |= {f"cluster_head.{number}.weight": weight.clone(), f"cluster_head.{number}.bias": bias.clone()}
    path = tmp_path_factory.mktemp("scan") / "model.pth.tar"
    torch.save({"model": {f"module.{key}": value for key, value in state.items()}, "head": np.int64(1)}, path)
    return path


@pytest.fixture
def refuse(capsys):
    """refuse("refine", *words): the one line of a command that must end with code 2, run in this process."""
    from cdc_plugin.__main__ import main

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        printed = capsys.readouterr()
        assert (end.value.code, printed.out) == (2, ""), printed.err
        (line,) = printed.err.splitlines()
        assert "error: " in line
        return line

    return run


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Undo what a command does to the log, here or in a fixture: its handler writes to a stream that pytest closes."""
    log = logging.getLogger("cdc_plugin")
    log.handlers.clear()
    yield
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def write_images():
    """write_images(folder, pixels, labels=None): PNG files, in class sub-folders where labels are given."""

    def write(folder: Path, pixels: np.ndarray, labels: np.ndarray | None = None) -> Path:
        for index, image in enumerate(pixels):
            parent = folder if labels is None else folder / f"class {labels[index]}"
            parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(parent / f"image {index:03d}.png")
        return folder

    return write
