"""Load a clustering model: a result of ``cdc-refine``, or a checkpoint of another method with its head."""

import copy
from pathlib import Path

from torch import nn

from cdc_plugin.checkpoints.formats import native
from cdc_plugin.checkpoints.load import Loaded, Wanted, load_checkpoint
from cdc_plugin.checkpoints.read import find_run
from cdc_plugin.checkpoints.weights import load_strictly, strip_prefix
from cdc_plugin.core.hierarchy import read_hierarchy
from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.data.side import read_side
from cdc_plugin.errors import CheckpointError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer


@torch_defaults()
def load_model(
    path: str | Path,
    module: nn.Module | None = None,
    *,
    format: str | None = None,
    arch: str | None = None,
    head: int | None = None,
    clusters: int | None = None,
) -> Clusterer:
    """Return a clustering model in evaluation mode: a result of ``cdc-refine``, or a checkpoint of SCAN, SeCu, ...

    Args:
        module: the network it was refined from, where that was one of your own class; its weights are neither
            used nor changed.
        format, arch, head, clusters: for checkpoints of other methods, where the file does not state them.
    """
    path = find_run(path)
    if module is None and Path(path).exists() and not is_result(Path(path)):
        return build_clusterer(load_checkpoint(path, format, Wanted(arch, head=head, clusters=clusters)), path)
    description, tensors = native.read_native(path)
    if module is None:
        backbone = native.rebuild_backbone(description, tensors, str(path))
    else:
        network = copy.deepcopy(module.module if isinstance(module, Backbone) else module)
        load_strictly(network, strip_prefix(tensors, "backbone."), str(path))
        backbone = Backbone(network, **read_side(description["backbone"]))
    heads = native.rebuild_heads(description, tensors, backbone.feature_dim, str(path))
    prototypes = native.rebuild_prototypes(tensors, backbone.feature_dim, str(path))
    hierarchy = read_hierarchy(description.get("hierarchy"), int(heads[1].clusters), str(path))  # type: ignore[arg-type]
    return Clusterer(backbone, *heads, prototypes, hierarchy).eval()


def is_result(path: Path) -> bool:
    """Return whether a path is a result folder of ``cdc-refine``, or the weights inside one."""
    folder = path if path.is_dir() else path.parent
    described = native.description_file(folder).is_file()
    if not path.is_dir():
        return path.name == native.WEIGHTS and described
    # Half a result is one too, so that the error names what is missing; a folder with neither may be another run.
    return described or (folder / native.WEIGHTS).is_file()


def build_clusterer(loaded: Loaded, path: str | Path) -> Clusterer:
    """Return the model in another method's checkpoint; a single head serves as clustering and calibration head."""
    if loaded.heads:
        return Clusterer(loaded.backbone, loaded.heads[0], loaded.heads[-1]).eval()
    source = f"{path} ({loaded.origin.writer})"
    if "head" in loaded.origin.why:
        raise CheckpointError(f"{source} has {loaded.origin.why['head']}")
    raise CheckpointError(f"{source} has no clustering head; refine it first: cdc-refine --backbone {path}")
