"""Take the statistics of BatchNorm over the images of all processes.

On CUDA the layers become torch's own `SyncBatchNorm`, which takes CUDA tensors only. Elsewhere the function that all
BatchNorm layers call is replaced while the network runs, so that the network itself stays as it is.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cdc_plugin.training.runtime import Distributed


def convert_on_cuda(network: nn.Module, device: torch.device) -> nn.Module:
    """Return the network with `SyncBatchNorm` in place of its BatchNorm layers, timm's variants included, on CUDA."""
    if device.type != "cuda":
        return network
    from timm.layers import convert_sync_batchnorm

    return convert_sync_batchnorm(network)


def share_statistics(distributed: Distributed, device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which BatchNorm in train mode sees all processes' images; they call the same layers."""
    shared = distributed.size > 1 and device.type != "cuda"
    return _SharedStatistics(distributed) if shared else contextlib.nullcontext()


class _SharedStatistics(TorchFunctionMode):
    def __init__(self, distributed: Distributed) -> None:
        super().__init__()
        self.distributed = distributed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        if function is F.batch_norm and training:
            return _batch_norm(self.distributed, *args, **kwargs)
        return function(*args, **kwargs)


def _batch_norm(
    distributed: Distributed,
    rows: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `torch.nn.functional.batch_norm` in training; the parameters are torch's."""
    axes = [axis for axis in range(rows.ndim) if axis != 1]
    across = (1, -1, *[1] * (rows.ndim - 2))
    values = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    count = distributed.all_reduce(values.new_tensor(float(rows.numel() // max(1, rows.shape[1]))))
    mean = _AllReduce.apply(values.sum(dim=axes), distributed) / count
    centred = values - mean.view(across)
    # In two passes: the mean of squares minus the square of the mean loses digits.
    variance = _AllReduce.apply(centred.square().sum(dim=axes), distributed) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.detach().to(running_mean), momentum)
            running_var.lerp_((variance * count / (count - 1).clamp(min=1)).detach().to(running_var), momentum)
    normalised = centred * (variance + eps).rsqrt().view(across)
    if weight is not None:
        normalised = normalised * weight.to(values).view(across)
    if bias is not None:
        normalised = normalised + bias.to(values).view(across)
    return normalised.to(rows.dtype)


class _AllReduce(torch.autograd.Function):
    """Sum over all processes, forwards and backwards."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, distributed: Distributed) -> Tensor:
        context.distributed = distributed
        return distributed.all_reduce(tensor.clone())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.distributed.all_reduce(gradient.clone()), None
