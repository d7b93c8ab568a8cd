"""Define clustering heads: the one of Sec. 3.3 and those that other methods trained."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.core.prototypes import BATCHNORM_EPSILON, HeadWeights
from cdc_plugin.errors import CheckpointError


class Normalize(nn.Module):
    """Scale rows to unit length."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=1)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": nn.Linear,
    "batchnorm": partial(nn.BatchNorm1d, eps=BATCHNORM_EPSILON),
    "relu": partial(nn.ReLU, inplace=True),
    "gelu": nn.GELU,
    "normalize": Normalize,
}


class LayeredHead(nn.Sequential):
    """A head as a list of layers, as other methods have them: features (N, D) to logits (N, C).

    ``spec`` is a record for JSON, from which `build_head` builds it again.

    Args:
        layers: ``["linear", inputs, outputs]``, ``["linear", inputs, outputs, False]`` (no bias),
            ``["batchnorm", size]``, ``["relu"]``, ``["gelu"]`` or ``["normalize"]`` (to unit length).
    """

    def __init__(self, layers: Sequence[Sequence[Any]]) -> None:
        super().__init__(*(LAYERS[kind](*sizes) for kind, *sizes in layers))
        self.layers = [list(entry) for entry in layers]
        self.clusters = next((int(entry[2]) for entry in reversed(self.layers) if entry[0] == "linear"), 0)
        self.spec: dict[str, Any] = {"kind": "layers", "layers": self.layers, "clusters": self.clusters}

    def hidden(self, features: Tensor) -> Tensor:
        """Return the input of the last layer."""
        for layer in list(self)[:-1]:
            features = layer(features)
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the last layer; ``logits(hidden(features))`` is the whole head."""
        return self[-1](hidden)

    @torch.no_grad()
    def divide_logits(self, temperature: float) -> None:
        """Divide all logits from now on: by the weights of the last layer, which is linear."""
        for parameter in self[-1].parameters():
            parameter.div_(temperature)


class ClusterHead(LayeredHead):
    """The three-layer head of Sec. 3.3: D features, H hidden units with BatchNorm and ReLU, C logits."""

    def __init__(self, feature_dim: int, hidden: int, clusters: int) -> None:
        super().__init__(
            [["linear", feature_dim, hidden], ["batchnorm", hidden], ["relu"], ["linear", hidden, clusters]]
        )
        self.spec = {"kind": "mlp", "hidden": hidden, "clusters": clusters}

    @torch.no_grad()
    def initialize(self, weights: HeadWeights) -> None:
        """Take prototype weights; the statistics of the BatchNorm layer are those of the data."""
        self.load_state_dict(
            {
                "0.weight": weights.first,
                "0.bias": torch.zeros(len(weights.first)),
                "1.weight": torch.ones_like(weights.mean),
                "1.bias": torch.zeros_like(weights.mean),
                "1.running_mean": weights.mean,
                "1.running_var": weights.variance,
                "1.num_batches_tracked": torch.tensor(0),
                "3.weight": weights.second,
                "3.bias": torch.zeros(len(weights.second)),
            }
        )


class CosineHead(nn.Module):
    """Cosine between a projection of the features, to ``dim``, and C centres, divided by a temperature (SeCu)."""

    def __init__(self, layers: Sequence[Sequence[Any]], dim: int, clusters: int, temperature: float) -> None:
        super().__init__()
        self.projection = LayeredHead(layers)
        self.centers = nn.Parameter(F.normalize(torch.randn(clusters, dim), dim=1))  # (C, dim), any length
        self.clusters, self.temperature = clusters, temperature
        sizes = {"dim": dim, "clusters": clusters, "temperature": temperature}
        self.spec = {"kind": "cosine", "layers": self.projection.layers, **sizes}

    def hidden(self, features: Tensor) -> Tensor:
        """Return the projection at unit length, which is compared with the centres."""
        return F.normalize(self.projection(features), dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ F.normalize(self.centers, dim=1).T / self.temperature

    def divide_logits(self, temperature: float) -> None:
        """Divide all logits from now on."""
        self.temperature *= temperature
        self.spec["temperature"] = self.temperature

    def forward(self, features: Tensor) -> Tensor:
        return self.logits(self.hidden(features))


class MixtureHead(nn.Module):
    """Mean of the probabilities that linear layers give, one for each of several spaces side by side (TURTLE)."""

    def __init__(self, spaces: Sequence[int], clusters: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(size, clusters) for size in spaces)
        self.spaces, self.clusters, self.temperature = list(spaces), clusters, temperature
        self.spec = {"kind": "mixture", "spaces": self.spaces, "clusters": clusters, "temperature": temperature}

    def hidden(self, features: Tensor) -> Tensor:
        """Return the features, which are all that the layers see."""
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        spaces = hidden.split(self.spaces, dim=1)
        each = [F.log_softmax(part(space), dim=1) for part, space in zip(self.parts, spaces, strict=True)]
        return torch.stack(each).logsumexp(dim=0) / self.temperature

    def divide_logits(self, temperature: float) -> None:
        """Divide all logits from now on."""
        self.temperature *= temperature
        self.spec["temperature"] = self.temperature

    def forward(self, features: Tensor) -> Tensor:
        return self.logits(self.hidden(features))


def build_head(spec: Any, feature_dim: int, source: str) -> LayeredHead | CosineHead | MixtureHead:
    """Build a head with random weights from its ``spec``.

    >>> build_head({"kind": "mlp", "hidden": 4, "clusters": 3}, feature_dim=2, source="here").clusters
    3
    """
    try:
        kind = spec["kind"]
        if kind == "mlp":
            return ClusterHead(feature_dim, int(spec["hidden"]), int(spec["clusters"]))
        if kind == "layers":
            return LayeredHead(spec["layers"])
        if kind == "cosine":
            return CosineHead(spec["layers"], int(spec["dim"]), int(spec["clusters"]), float(spec["temperature"]))
        if kind == "mixture":
            return MixtureHead(spec["spaces"], int(spec["clusters"]), float(spec["temperature"]))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{source} does not state its heads in a known way; was it edited by hand?")
