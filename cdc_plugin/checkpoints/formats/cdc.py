"""Files of the code that CDC's authors released: clustering network in ``model``, calibration head in ``cali_mlp``."""

from torch import nn

from cdc_plugin.checkpoints.formats import _clustering as clustering
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, check_finite, find_state_dict, payload_fields
from cdc_plugin.checkpoints.weights import strip_prefix
from cdc_plugin.errors import CheckpointError

MLP = ("linear", "batchnorm", "relu", "linear")
# Its settings give these two data sets other statistics than SCAN's.
CIFAR20 = clustering.Convention(
    ("CIFAR-20", "CIFAR-100"), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 32, clustering.CIFAR_STEM
)
STL10 = clustering.Convention(("STL-10",), (0.4914, 0.4823, 0.4466), (0.247, 0.243, 0.261), 96)
IMAGENET, TINY_IMAGENET = clustering.IMAGENET, clustering.TINY_IMAGENET
LARGE = {10: (STL10, IMAGENET), 15: (IMAGENET,), 200: (TINY_IMAGENET,)}


def load_cdc(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return backbone, clustering head and, where it was saved, calibration head."""
    clustering.refuse_branch(wanted, checkpoint)
    count = len({key.split(".")[1] for key in checkpoint.state if key.startswith("cluster_head.")})
    # The released code trains and evaluates its first head, whatever their number.
    number, reason = clustering.choose_head(checkpoint, count, wanted, 0)
    state, source = checkpoint.below(f"cluster_head.{number}.").state, str(checkpoint.path)
    clusters = clustering.count_rows(state, "3.weight")
    small = clustering.find_cifar(clusters, (clustering.CIFAR10, CIFAR20))
    large = LARGE.get(clusters or 0, (IMAGENET, STL10, TINY_IMAGENET))
    backbone, matched, why = clustering.load_resnet(checkpoint, wanted, "CDC", "backbone.", small, large)
    features = backbone.feature_dim
    heads: list[nn.Module] = [clustering.load_layered_head(state, MLP, features, f"{source} (clustering head)")]
    saved = payload_fields(checkpoint.payload).get("cali_mlp")
    if saved is not None:
        state = strip_prefix(find_state_dict(saved, source), "calibration_head.")
        check_finite(state, source)
        calibration = clustering.load_layered_head(state, MLP, features, f"{source} (calibration head)")
        if calibration.clusters != clusters:
            raise CheckpointError(
                f"{source} has heads of {clusters} and {calibration.clusters} clusters; copy it again"
            )
        heads.append(calibration)
        reason = "clustering and calibration head"
    origin = Origin("CDC (released code)", clustering.read_epoch(checkpoint), why | {"head": reason})
    return Loaded(backbone, origin, tuple(heads), matched)


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether this is a backbone with clustering heads of several layers."""
    first = any(key.startswith("cluster_head.0.0.") for key in checkpoint.state)
    return first and clustering.top_names(checkpoint.state) == {"backbone", "cluster_head"}
