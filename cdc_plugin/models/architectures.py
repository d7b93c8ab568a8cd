"""Build networks from plain records: a spec fits in JSON, so that a result folder can rebuild its backbone."""

import contextlib
import difflib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cdc_plugin.config.schema import LARGEST_SIDE
from cdc_plugin.errors import CheckpointError, shorten
from cdc_plugin.models.networks.features import build_features
from cdc_plugin.models.networks.poolformer import build_poolformer
from cdc_plugin.models.networks.wide_resnet import build_fixmatch_wrn, build_wide_resnet

STEM = {"kernel": 7, "stride": 2, "padding": 3, "pool": True}
# What a file may ask of a network, with the numbers or words it may ask for: never a path, a class or an absurd size.
SIDE, COUNT, WIDTH, SMALL = (1, LARGEST_SIDE), (1, 200), (1, 65_536), (1, 64)
FLAGS = (
    *("class_token", "no_embed_class", "dynamic_img_size", "strict_img_size", "qkv_bias", "qk_norm", "pre_norm"),
    *("fc_norm", "use_fc_norm", "bias"),
)
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("img_size", "image_size"), SIDE),
    **dict.fromkeys(("depth", "depths", "num_heads", "num_layers", "layers"), COUNT),
    **dict.fromkeys(("embed_dim", "hidden_dim", "mlp_dim", "widths", "width", "dims", "spaces"), WIDTH),
    **dict.fromkeys(
        ("patch_size", "window_size", "kernel", "pool_kernel", "stride", "strides", "first_stride", "widen"), SMALL
    ),
    **dict.fromkeys(("padding", "reg_tokens", "output_stride", "pool_size"), (0, 64)),
    **dict.fromkeys(("groups", "width_per_group"), (1, 4096)),
    **dict.fromkeys(("drop_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate", "drop_path_rate"), (0.0, 1.0)),
    **dict.fromkeys(("mlp_ratio", "init_values", "layer_scale_init_value", "ls_init_value"), (0.0, 64.0)),
    **dict.fromkeys((*FLAGS, "head_norm_first", "relu", "use_grn", "conv_mlp", "ape", "patch_norm"), (False, True)),
    "pool": (0, 64),  # whether a stem has one, or the side of poolformer's
    "in_chans": (3, 3),
    "num_reg_tokens": (0, 64),
    "pretrained_window_sizes": (0, 64),
    **dict.fromkeys(("projection", "hidden"), WIDTH),
    "head": ("linear", "mlp", "own"),  # what projects the features of a tower
    "rope_temperature": (1.0, 1e6),
    **dict.fromkeys(("eps", "final_eps"), (0.0, 0.1)),
    "block": ("basic", "bottleneck"),
    "global_pool": ("", "token", "avg", "avgmax", "max", "map", "fast", "catavgmax"),
    "act_layer": ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "swish", "hard_swish", "mish"),
    "norm_layer": ("layernorm", "layernorm2d", "rmsnorm", "batchnorm", "batchnorm2d", "groupnorm1"),
    "stem_type": ("", "deep", "deep_tiered"),
}


def build(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return the network of a spec, without classifier and with random weights, and its number of features.

    Among others ``{"family": "resnet", "block": "basic" | "bottleneck", "depths", "widths", "stem",
    "groups", "width_per_group"}``, and ``{"family": "timm" | "torchvision", "name", "kwargs"}``.

    >>> build({"family": "resnet", "block": "basic", "depths": [1, 1, 1, 1], "widths": [8, 8, 8, 16]})[1]
    16
    """
    family = spec.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise CheckpointError(f"a backbone spec needs a family, one of {', '.join(FAMILIES)}; found {shorten(family)}")
    check_arguments(spec)
    try:
        return FAMILIES[family](spec)
    except KeyError as error:
        missing = shorten(error.args[0])
        raise CheckpointError(f"a backbone spec of family {family!r} needs {missing}: {shorten(dict(spec))}") from error
    except NotImplementedError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"cannot build a network from {shorten(dict(spec))}: {shorten(str(error))}") from error


def check_arguments(arguments: Any) -> None:
    """Refuse what `ARGUMENTS` does not list, and values out of its range; a list is checked number by number."""
    if not isinstance(arguments, Mapping):
        raise CheckpointError(f"expected the arguments of a network by name, found {shorten(arguments)}")
    for name, value in arguments.items():
        if name in ("kwargs", "stem", "resnet"):
            check_arguments(value)
        elif name not in ("family", "name"):
            allowed = ARGUMENTS.get(name, ())
            values = value if isinstance(value, list | tuple) and 0 < len(value) <= 8 else [value]
            if not allowed or not all(_is_allowed(item, allowed) for item in values):
                raise CheckpointError(f"{_describe_argument(name, allowed)}; found {shorten(value)}")


def _describe_argument(name: Any, allowed: tuple[Any, ...]) -> str:
    if not allowed:
        return f"a network takes no argument {shorten(name)} here"
    if isinstance(allowed[0], bool | str):
        return f"the network argument {shorten(name)} is one of {', '.join(map(repr, allowed))}"
    return f"the network argument {shorten(name)} lies between {allowed[0]} and {allowed[1]}"


def _is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    if value is None or isinstance(allowed[0], bool | str):
        return value is None or (type(value) is type(allowed[0]) and value in allowed)
    numbers = int | float if isinstance(allowed[0], float) else int
    return isinstance(value, numbers) and allowed[0] <= value <= allowed[1]


def describe(spec: Mapping[str, Any] | None) -> str:
    """Return a spec in words.

    >>> describe({"family": "timm", "name": "resnet18", "kwargs": {"in_chans": 3}})
    'timm resnet18 (in_chans=3)'
    """
    if spec is None:
        return "a network of the user's own class"
    if spec["family"] == "features":
        return f"features of {' + '.join(map(str, spec['spaces']))} numbers"
    if spec["family"] != "resnet":
        extra = ", ".join(f"{key}={value}" for key, value in (spec.get("kwargs") or {}).items())
        return f"{spec['family']} {spec.get('name', '')}".strip() + (f" ({extra})" if extra else "")
    stem = STEM | dict(spec.get("stem", {}))
    named = {("basic", 2, 2, 2, 2): "ResNet-18", ("basic", 3, 4, 6, 3): "ResNet-34"}
    named |= {("bottleneck", 3, 4, 6, 3): "ResNet-50", ("bottleneck", 3, 4, 23, 3): "ResNet-101"}
    name = named.get((spec["block"], *spec["depths"]), f"ResNet of {spec['depths']} {spec['block']} blocks")
    return (
        f"{name}, widths {'/'.join(map(str, spec['widths']))}, stem {stem['kernel']}x{stem['kernel']} stride "
        f"{stem['stride']} padding {stem['padding']}, {'max-pool' if stem['pool'] else 'no max-pool'}"
        + ("" if stem.get("relu", True) else ", no ReLU")
    )


def build_resnet(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a ResNet with torchvision's parameter names, of any widths and stem."""
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    depths, widths = list(spec["depths"]), list(spec["widths"])
    if len(depths) != 4 or len(widths) != 4:
        raise CheckpointError(f"a resnet spec takes 4 depths and 4 widths; found {depths} and {widths}")
    blocks: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}
    block = blocks[spec["block"]]
    stem = STEM | dict(spec.get("stem", {}))
    stem_width = int(stem.get("width", widths[0]))

    class ShapedResNet(ResNet):
        """A ResNet whose stages take their own widths, which torchvision fixes in its constructor."""

        def _make_layer(self, block: Any, planes: int, blocks: int, *args: Any, **kwargs: Any) -> nn.Sequential:
            stage = {64: 0, 128: 1, 256: 2, 512: 3}[planes]
            if stage == 0:
                self.inplanes = stem_width
            return super()._make_layer(block, widths[stage], blocks, *args, **kwargs)

    groups, group_width = int(spec.get("groups", 1)), int(spec.get("width_per_group", 64))
    network = ShapedResNet(block, depths, num_classes=1, groups=groups, width_per_group=group_width)
    network.conv1 = nn.Conv2d(3, stem_width, stem["kernel"], stem["stride"], stem["padding"], bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.bn1 = nn.BatchNorm2d(stem_width)
    network.maxpool = nn.MaxPool2d(int(stem.get("pool_kernel", 3)), 2, 1) if stem["pool"] else nn.Identity()
    if not stem.get("relu", True):  # lost where layers were put in a list and their ReLU was a function call
        network.relu = nn.Identity()
    network.fc = nn.Identity()
    return network, widths[3] * block.expansion


def build_timm(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a timm model by name, without its classifier, perhaps with other epsilons or a projection."""
    import timm

    name, kwargs = spec["name"], dict(spec.get("kwargs", {}))
    if not timm.is_model(name):
        near = _name_similar(name, timm.list_models())
        raise CheckpointError(f"timm has no model {name!r}{near}; timm.list_models() lists them all")
    with _explain_failure(f"timm could not build {name!r} with {kwargs}"):
        network = timm.create_model(name, pretrained=False, num_classes=0, **kwargs)
    norms = [layer for layer in network.modules() if isinstance(layer, nn.LayerNorm)]
    for layer in norms if "eps" in spec else norms[-1:] if "final_eps" in spec else ():
        layer.eps = spec.get("eps", spec.get("final_eps"))
    features = timm_features(network)
    if "projection" not in spec:
        return network, features
    if hasattr(network.head, "proj"):  # of an attention pool
        network.head.proj = nn.Linear(features, spec["projection"])
    else:
        network.head = nn.Linear(features, spec["projection"], bias=False)
    return network, spec["projection"]


def build_timm_tower(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a timm network and what projects its features: its own classifier, or a linear layer or two after it."""
    import timm

    outputs = spec["projection"]
    network, features = build_timm({name: spec[name] for name in ("name", "kwargs")})
    if spec["head"] == "own":
        network = timm.create_model(spec["name"], pretrained=False, num_classes=outputs, **spec["kwargs"])
        return network, outputs
    last = nn.Linear(features, outputs, bias=spec["bias"])
    if spec["head"] == "mlp":
        last = nn.Linear(spec["hidden"], outputs, bias=spec["bias"])
        layers = {"fc1": nn.Linear(features, spec["hidden"]), "act": nn.GELU(), "fc2": last}
        head: dict[str, nn.Module] = {"mlp": nn.Sequential(OrderedDict(layers))}
    else:
        head = {"proj": last}
    return nn.Sequential(OrderedDict({"trunk": network, "head": nn.Sequential(OrderedDict(head))})), outputs


class MapMean(nn.Module):
    """A timm network that gives the mean of its last feature map, or of its patch tokens, instead of its head."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        network.prune_intermediate_layers(1, prune_norm=False, prune_head=True)
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps: list[torch.Tensor] = self.network.forward_intermediates(images, 1, norm=True, intermediates_only=True)
        return maps[-1].mean(dim=(2, 3))


def build_map(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a network of timm, or torchvision's ConvNeXt, that gives the mean of its last feature map, headless."""
    if spec["family"] == "timm_map":
        network: Any = build_timm(spec)[0]
        return MapMean(network), int(network.feature_info[-1]["num_chs"])
    network, features = build_torchvision(spec)
    network.classifier = nn.Flatten(1)
    return network, features


def build_torchvision(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a torchvision classifier by name, its last linear layer replaced by the identity."""
    from torchvision import models

    name = spec["name"]
    known = models.list_models(module=models)
    if name not in known:
        raise CheckpointError(f"torchvision has no image classifier {name!r}{_name_similar(name, known)}")
    # GoogLeNet and Inception would initialise for minutes and add auxiliary classifiers otherwise.
    extra = {"init_weights": False, "aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    kwargs = spec.get("kwargs", {})
    with _explain_failure(f"torchvision could not build {name!r} with {kwargs}"):
        network = models.get_model(name, weights=None, **extra, **kwargs)
    linears = [(path, layer) for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    path, layer = linears[-1] if linears else ("", nn.Linear(1, 1))
    if not path.startswith(("fc", "head", "classifier")):
        raise CheckpointError(f"torchvision's {name!r} has no linear classifier to take off; use its timm twin")
    parent_path, _, leaf = path.rpartition(".")
    setattr(network.get_submodule(parent_path), leaf, nn.Identity())
    return network, layer.in_features


def build_resnet_linear(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a ResNet, ``spec["resnet"]``, whose features pass one more linear layer of the same size (TCL)."""
    network, features = build_resnet(spec["resnet"])
    network.fc = nn.Linear(features, features)
    return network, features


def build_torchvision_vit(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return torchvision's vision transformer of any size, without its classifier."""
    from torchvision.models import VisionTransformer

    sizes = {name: int(spec[name]) for name in ("image_size", "patch_size", "num_layers", "num_heads")}
    width = int(spec["hidden_dim"])
    with _explain_failure(f"torchvision could not build a vision transformer of {dict(spec)}"):
        network = VisionTransformer(**sizes, hidden_dim=width, mlp_dim=int(spec["mlp_dim"]))
    network.heads = nn.Sequential()
    return network, width


def build_twice_normed_vit(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a timm ViT that normalises its tokens and again their mean: solo-learn's mae with global_pool=avg."""
    network, features = build_timm(spec)
    network.norm = nn.LayerNorm(features, eps=1e-6)
    return network, features


def build_conv_stem_vit(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return a timm ViT whose patches are embedded by four convolutions of stride 2 and a linear one: MoCo v3's."""
    network, features = build_timm(spec)
    widths = [3, *(features // 8 * 2**stage for stage in range(4))]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    embedding: Any = network.patch_embed
    embedding.proj = nn.Sequential(*layers, nn.Conv2d(widths[-1], features, 1))
    return network, features


FAMILIES: dict[str, Callable[[Mapping[str, Any]], tuple[nn.Module, int]]] = {
    "resnet": build_resnet,
    "resnet_linear": build_resnet_linear,
    "timm": build_timm,
    "torchvision": build_torchvision,
    **dict.fromkeys(("timm_map", "torchvision_map"), build_map),
    "timm_tower": build_timm_tower,
    "torchvision_vit": build_torchvision_vit,
    "twice_normed_vit": build_twice_normed_vit,
    "conv_stem_vit": build_conv_stem_vit,
    "features": build_features,
    "fixmatch_wrn": build_fixmatch_wrn,
    "poolformer": build_poolformer,
    "wide_resnet": build_wide_resnet,
}


def skeleton(spec: Mapping[str, Any]) -> nn.Module:
    """Return the network of a spec without memory for its weights, to compare names and shapes."""
    try:
        with torch.device("meta"):
            return build(spec)[0]
    except NotImplementedError:  # a constructor that computes with tensors, as torchvision's RegNet
        return build(spec)[0]


def timm_features(network: Any) -> int:
    """Return the number of features of a timm network without classifier."""
    # Networks with a convolutional head, as mobilenetv3, give head_hidden_size numbers, not num_features.
    return int(getattr(network, "head_hidden_size", None) or network.num_features)


def image_size_default(spec: Mapping[str, Any]) -> int:
    """Return the side of the images that a network of this spec is usually trained on."""
    if spec["family"] == "resnet":
        return 32 if spec.get("stem", STEM).get("kernel", 7) < 7 else 224
    return 224


def timm_input(name: str) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Return mean, std and image side that timm documents for a model."""
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None:
        return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224
    return tuple(config.mean), tuple(config.std), int(config.input_size[-1])


def _name_similar(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f" (close: {', '.join(near)})" if near else ""


@contextlib.contextmanager
def _explain_failure(failure: str) -> Iterator[None]:
    try:
        yield
    except NotImplementedError:  # on the meta device, which `skeleton` handles
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{failure}: {reason}") from error
