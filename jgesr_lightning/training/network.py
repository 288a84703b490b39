"""From an `nn.Sequential` to stages that run many copies of it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.training.stages import (
    Context,
    ConvGeometry,
    Dropout,
    Flatten,
    LibraryConv,
    Linear,
    PatchConv,
    Place,
    Stage,
    Stateless,
    Weights,
)

STATELESS = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.ELU,
    nn.GELU,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.MaxPool2d,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.Tanh,
)
"""Layers without weights that treat every sample alike and apart."""

PATCH_CHANNELS = 512
"""Up to this product of channels in and out, convolutions go by patches on a CPU. Forward and backward with pooling at
batches of 64, against the library on one core: 4 times as fast at a product of 6, 3.4 at 32, 1.4 at 96, 0.7 at 2048."""


Build = Callable[[Place], Stage]


@dataclass(frozen=True)
class Layer:
    """A stage to be: how to build it where it stands, and the names of its weights in the state dict."""

    build: Build
    weight: str | None = None
    bias: str | None = None


def refuse(what: str) -> ValueError:
    """Return the error for what cannot be trained stacked."""
    return ValueError(f"engine=stacked cannot train {what}; use engine=sequential")


def layers_of(net: nn.Module) -> list[Layer]:
    """Return the layers of `net`, what can be fused already fused.

    Raises:
        ValueError: a layer that is not supported, by name and type.
    """
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    if frozen:
        raise refuse(f"the frozen parameter {frozen[0]!r}")
    modules = [(name, m) for name, m in _flatten(net, "") if not isinstance(m, nn.Identity)]
    names = {id(p): name for name, p in net.named_parameters()}
    layers = []
    seen: set[int] = set()
    while modules:
        name, module = modules.pop(0)
        if any(id(p) in seen for p in module.parameters()):
            raise refuse(f"{name!r} ({type(module).__name__}), which shares its weights with another layer")
        seen |= {id(p) for p in module.parameters()}
        layers.append(_layer(name, module, modules, names))
    layout = ParameterLayout.of(net)
    if layout.num_parameters != layout.size:  # rows of weights hold them too, and an optimizer moves whole rows
        raise refuse(f"the buffer {layout.names[-1]!r}")
    return layers


@torch.no_grad()
def check_stacked(net: nn.Module, input_shape: Sequence[int] | None = None) -> None:
    """Raise ValueError unless stages can stand for `net`; with the shape of a sample, they are tried on two."""
    layers = layers_of(net)
    if input_shape is None:
        return
    layout = ParameterLayout.of(net)
    weights = layout.flatten(net.state_dict()).unsqueeze(0)
    inputs = torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0)).to(weights)
    try:
        trial = StackedNetwork(layers, layout, weights, torch.zeros_like(weights), inputs.shape, weights.dtype)
        trial.inputs.copy_(inputs.unsqueeze(0))
        trial.context.training = False
        scores = trial.forward()[0]
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise refuse(f"this network on inputs of shape {tuple(input_shape)} ({reason})") from error
    training = net.training
    expected = net.eval()(inputs)
    net.train(training)
    if scores.shape != expected.shape or not torch.allclose(scores, expected, 1e-3, 1e-4, equal_nan=True):
        raise refuse("a network whose forward is more than its layers one after another, by hooks for example")


def _flatten(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for name, child in module._modules.items():  # `named_children` passes over a layer's second use
            assert child is not None
            yield from _flatten(child, f"{prefix}{name}.")
    else:
        yield prefix.rstrip("."), module


def _square(value: Any) -> int | None:
    """Return the one number of a setting that is the same in both directions, else None."""
    pair = value if isinstance(value, tuple | list) else (value, value)  # pooling keeps lists as they were given
    return pair[0] if len(set(pair)) == 1 else None


def _layer(name: str, module: nn.Module, rest: list[tuple[str, nn.Module]], names: dict[int, str]) -> Layer:
    """Return the layer that begins with `module`, taking what it fuses with from `rest`."""
    kind = type(module)
    weight = names.get(id(getattr(module, "weight", None)))
    bias = names.get(id(getattr(module, "bias", None)))
    if kind is nn.Conv2d:
        return Layer(_conv(name, module, *_pool_and_relu(rest)), weight, bias)
    if kind is nn.Linear:
        relu = _take_relu(rest)
        return Layer(lambda place: Linear(place, relu), weight, bias)
    if isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1:
        return Layer(Flatten)
    if kind in (nn.Dropout, nn.Dropout2d):
        p, channels = float(module.p), kind is nn.Dropout2d  # type: ignore[arg-type]
        return Layer(lambda place: Dropout(place, p, channels))
    if kind in STATELESS and not getattr(module, "return_indices", False):
        return Layer(lambda place: Stateless(place, _out_of_place(module)))
    raise refuse(f"{name!r} ({kind.__name__})" if name else f"a {kind.__name__}, which is no nn.Sequential")


def _out_of_place(module: nn.Module) -> nn.Module:
    module = copy(module)
    if hasattr(module, "inplace"):
        module.inplace = False  # type: ignore[assignment]
    return module


def _take_relu(rest: list[tuple[str, nn.Module]]) -> bool:
    if rest and type(rest[0][1]) is nn.ReLU:
        rest.pop(0)
        return True
    return False


def _pool_and_relu(rest: list[tuple[str, nn.Module]]) -> tuple[int, bool]:
    """Take max-pooling and ReLU, in either order, off the front of `rest`."""
    relu = _take_relu(rest)
    pool = 1
    if rest and type(rest[0][1]) is nn.MaxPool2d:
        m = rest[0][1]
        size = _square(m.kernel_size)
        plain = (_square(m.stride), _square(m.padding), _square(m.dilation)) == (size, 0, 1)
        if size and plain and not m.ceil_mode and not m.return_indices:
            rest.pop(0)
            pool = size
            relu = _take_relu(rest) or relu
    return pool, relu


def _conv(name: str, module: nn.Module, pool: int, relu: bool) -> Build:
    assert isinstance(module, nn.Conv2d)
    kernel, stride, dilation = _square(module.kernel_size), _square(module.stride), _square(module.dilation)
    padding = (
        0 if module.padding == "valid" else module.padding if module.padding == "same" else _square(module.padding)
    )
    if padding == "same" and kernel and dilation:
        padding = dilation * (kernel - 1) // 2 if dilation * (kernel - 1) % 2 == 0 else None
    if not kernel or not stride or not dilation or not isinstance(padding, int) or module.padding_mode != "zeros":
        raise refuse(f"{name!r} (Conv2d that differs in its two directions, or pads unevenly or not with zeros)")
    geometry = ConvGeometry(kernel, stride, padding, pool, relu)
    groups = module.groups
    few = module.in_channels * module.out_channels <= PATCH_CHANNELS
    plain = groups == 1 and dilation == 1

    def build(place: Place) -> Stage:
        # several networks by the library are one convolution in groups, which is slow everywhere: products instead
        if plain and (few or place.shape[0] > 1):
            return PatchConv(place, geometry)
        return LibraryConv(place, geometry, dilation, groups)

    return build


class StackedNetwork:
    """K copies of a network on B samples each, with their weights in the rows of a matrix.

    Args:
        layers: from `layers_of`.
        layout: where each weight stands in a row.
        weights: (K, d), read at every step.
        grads: (K, d), where `backward` writes.
        samples: shape (B, C, H, W) of a batch.
        dtype: precision of the activations.

    Attributes:
        inputs: (K, B, C, H, W): write the batch here.
        classes: number of class scores.
    """

    def __init__(
        self,
        layers: list[Layer],
        layout: ParameterLayout,
        weights: Tensor,
        grads: Tensor,
        samples: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        views, grad_views = layout.restore(weights), layout.restore(grads)
        shape = torch.Size((len(weights), *samples))
        first = True
        self.stages: list[Stage] = []
        for layer in layers:
            own = None
            if layer.weight is not None:
                own = Weights(
                    views[layer.weight],
                    None if layer.bias is None else views[layer.bias],
                    grad_views[layer.weight],
                    None if layer.bias is None else grad_views[layer.bias],
                )
            stage = layer.build(Place(shape, own, dtype, weights.device, first))
            first = first and own is None
            shape = stage.output
            self.stages.append(stage)
        inbox = self.stages[0].inbox
        shape = torch.Size((len(weights), *samples))
        self.inputs = inbox if inbox is not None else torch.empty(shape, dtype=dtype, device=weights.device)
        self.context = Context()

    def forward(self) -> Tensor:
        """Return the class scores (K, B, classes) of `inputs`."""
        x = self.inputs
        for stage in self.stages:
            x = stage.forward(x, self.context)
        return x

    def backward(self, grad: Tensor) -> None:
        """Write the gradients of the weights, given that of the class scores."""
        step: Tensor | None = grad
        for stage in reversed(self.stages):
            assert step is not None
            step = stage.backward(step)
            if step is None:
                break
