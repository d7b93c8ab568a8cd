"""Export the whole model as one ONNX graph: from images in [0, 1] to calibrated probabilities and features."""

import copy
import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.errors import CheckpointError, ConfigError, OutputError, option
from cdc_plugin.integrations.export.base import Export, Source, check_file, random_images
from cdc_plugin.models.backbone import Backbone

OPSET = 18
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4
LIMIT = 2_000_000_000  # one file of the format holds 2 GB


class ImageModel(nn.Module):
    """A module from images (N, 3, S, S) in [0, 1] to probabilities (N, C) and features (N, D), with normalisation."""

    def __init__(self, backbone: Backbone, head: nn.Module | None) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        mean, std = self.backbone.mean.view(1, 3, 1, 1), self.backbone.std.view(1, 3, 1, 1)
        features = self.backbone(images if self.backbone.takes_features else (images - mean) / std)
        if self.head is None:
            return (features,)
        return F.softmax(self.head(features), dim=1), features


def export_onnx(source: Source, out: Path, overwrite: bool) -> Export:
    """Write an ``.onnx`` file after onnxruntime reproduced its outputs."""
    check_file(out, (".onnx",), "model.onnx", overwrite)
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f'an ONNX export needs {package}; type: pip install "cdc-plugin[onnx]"') from error
    model = copy.deepcopy(ImageModel(source.backbone, source.head)).cpu().eval()  # the user's may be on a GPU
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if size > LIMIT:
        raise OutputError(
            f"{source.name} has {size / 1e9:.1f} GB of weights, an ONNX file holds 2 GB; try {option('to', 'timm')}"
        )
    names = ("features",) if source.head is None else ("probabilities", "features")
    program = _trace(model, names, source)
    given, described = _describe_input(source.backbone)
    facts = {
        "producer": "cdc_plugin",
        "input": f"{described}; mean and std are inside the graph",
        **source.input_facts(),
        "network": source.network,
        "feature_dim": source.backbone.feature_dim,
        **({} if source.head is None else {"clusters": source.head.clusters}),
    }
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    program.model.metadata_props.update(metadata)

    def write(path: Path) -> None:
        program.save(path, external_data=False)
        _check(path, model, source)

    write_atomically(out, write)
    load = (
        "import onnxruntime",
        f'session = onnxruntime.InferenceSession("{out}")',
        f'{", ".join(names)}{"," * (len(names) == 1)} = session.run(None, {{"{given}": {given}}})  # {described}',
    )
    notes = () if source.head is not None else (f"{source.name} has no clustering head: the graph returns features",)
    return Export((out,), f"ONNX graph, opset {OPSET}", load, (*notes, *source.note_assumptions()))


def _describe_input(backbone: Backbone) -> tuple[str, str]:
    """Return the name of the graph's input, and what it is."""
    side = backbone.input_size
    if backbone.takes_features:
        return "vectors", f"float32 (N, {backbone.feature_dim}), the spaces side by side"
    return "images", f"RGB images in [0, 1], float32 (N, 3, {side}, {side})"


def _trace(model: ImageModel, names: tuple[str, ...], source: Source) -> Any:
    given, _ = _describe_input(source.backbone)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter's own, about its internals
            return torch.onnx.export(
                model,
                (random_images(source.backbone, 2),),
                input_names=[given],
                output_names=list(names),
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises its own errors, which vary with its version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"torch cannot export {source.name} ({source.network}) to ONNX: {reason}") from error


def _check(path: Path, model: ImageModel, source: Source) -> None:
    """Refuse a file that onnxruntime computes differently, at other batch sizes than it was traced with."""
    import onnxruntime

    # A quiet session: warnings of the graph's optimiser are of no use to the user.
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        images = random_images(source.backbone, batch)
        with torch.no_grad():
            expected = model(images)
        outputs = session.run(None, {_describe_input(source.backbone)[0]: images.numpy()})
        for tensor, values in zip(expected, outputs, strict=True):
            distance = (torch.from_numpy(values) - tensor).abs().max().item()
            if not distance <= TOLERANCE * max(1.0, tensor.abs().max().item()):
                raise OutputError(
                    f"onnxruntime computes other numbers than torch for {source.name} (difference {distance:.1e}): "
                    "nothing was written; try another version of torch or onnxruntime"
                )
