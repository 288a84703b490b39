"""Layers of many networks at once, each network with its own weights: forward, and backward by the chain rule.

Shapes: K networks, B samples each. Images are (K, B, C, H, W) with any strides, vectors (K, B, F); weights are
(K, *shape) views of one matrix with a row for each network, and so are their gradients. A stage keeps its buffers from
step to step, so that a step allocates next to nothing and calls few, large operations; automatic differentiation is
left out because its fixed cost is that of a dozen samples of a small network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

# operators by their full names: looking up an overload at each call takes longer than a small operation
_threshold_backward = torch.ops.aten.threshold_backward.grad_input
_max_pool = torch.ops.aten.max_pool2d_with_indices.default
_max_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default
_convolution_backward = torch.ops.aten.convolution_backward.default


@dataclass
class Context:
    """What stages need to know of the step at hand.

    Attributes:
        training: whether dropout drops.
        counts: number of real samples of each network; the rest of its batch is padding.
        generators: each network's own source of dropout masks.
    """

    training: bool = True
    counts: Sequence[int] = ()
    generators: Sequence[torch.Generator] = field(default_factory=tuple)


class Weights(NamedTuple):
    """Views of a layer's weights and of their gradients, (K, *shape) each; no bias: None."""

    weight: Tensor
    bias: Tensor | None
    grad_weight: Tensor
    grad_bias: Tensor | None


class Place(NamedTuple):
    """Where in a network a stage stands.

    Attributes:
        shape: (K, B, ...) of its input.
        weights: its own, or None.
        dtype: of the activations.
        device: where everything is.
        first: whether no stage before it has weights, so that nobody asks for the gradient of its input.
    """

    shape: torch.Size
    weights: Weights | None
    dtype: torch.dtype
    device: torch.device
    first: bool


class Stage(ABC):
    """One or several layers, for a fixed number of networks and samples."""

    inbox: Tensor | None = None
    """Where the stage would like its input to be written; None if it takes any tensor."""

    output: torch.Size
    """Shape (K, B, ...) of the output."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the output; it may live in a buffer that the next call overwrites."""

    @abstractmethod
    def backward(self, grad: Tensor) -> Tensor | None:
        """Write the gradients of the weights; return that of the input, or None for the first stage."""


class Weighted(Stage):
    """A stage with weights of its own."""

    def __init__(self, place: Place) -> None:
        assert place.weights is not None
        self.weight, self.bias, self.grad_weight, self.grad_bias = place.weights
        self.dtype, self.first = place.dtype, place.first


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the batched matrix product of `a` and `b` into `out`, which may have another precision."""
    if out.dtype == a.dtype:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


@dataclass(frozen=True)
class ConvGeometry:
    """A convolution with what follows it: max-pooling (over pool x pool, 1: none), then ReLU or not."""

    kernel: int
    stride: int
    padding: int
    pool: int
    relu: bool

    def output(self, side: int) -> int:
        """Return the number of rows (columns) of the output for inputs of `side` rows (columns)."""
        return ((side + 2 * self.padding - self.kernel) // self.stride + 1) // self.pool


class PatchConv(Weighted):
    """``relu(max_pool(conv(x)))`` as one matrix product a network.

    All pool x pool places that one output looks at are computed from one patch of the input, by as many shifted copies
    of the filters (zeros elsewhere). With few channels the product is cheap and moving data is dear: patches are copied
    once, not pool^2 times, pooling is a maximum of contiguous blocks, and ReLU runs on what pooling left (the two
    commute, derivatives included: of equal places the first takes the gradient, as in PyTorch).
    """

    def __init__(self, place: Place, geometry: ConvGeometry) -> None:
        super().__init__(place)
        weight = self.weight
        networks, samples, channels, height, width = place.shape
        outs, kernel, stride, pool = weight.shape[1], geometry.kernel, geometry.stride, geometry.pool
        padding, hop = geometry.padding, geometry.stride * geometry.pool
        rows, columns = geometry.output(height), geometry.output(width)
        patch, n, places = kernel + stride * (pool - 1), samples * rows * columns, pool * pool
        self.geometry = geometry
        self.output = torch.Size((networks, samples, outs, rows, columns))
        depth = patch * patch * channels

        def empty(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=place.dtype, device=place.device)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=place.dtype, device=place.device)

        # the input with channels innermost, zeros around it
        framed = zeros(networks, samples, height + 2 * padding, width + 2 * padding, channels)
        inside = (slice(padding, padding + height), slice(padding, padding + width))
        self.inbox = framed[:, :, inside[0], inside[1]].permute(0, 1, 4, 2, 3)
        k, b, h, w, c = framed.stride()
        if patch * channels < columns:  # whichever way has the longer runs is copied faster
            self.cols = empty(networks, depth, n)
            self._cols = self.cols.view(networks, patch, patch, channels, samples, rows, columns)
            self._patches = framed.as_strided(self._cols.shape, (k, h, w, c, b, hop * h, hop * w))
        else:
            flat = empty(networks, n, depth)
            self.cols = flat.transpose(1, 2)
            self._cols = flat.view(networks, samples, rows, columns, patch, patch * channels)
            self._patches = framed.as_strided(self._cols.shape, (k, b, hop * h, hop * w, h, c))

        # filters, one shifted copy for each place; only the copies are rewritten, the zeros stay
        def shifted(bank: Tensor) -> Tensor:
            per_place, per_row = outs * depth, patch * channels
            return bank.as_strided(
                (networks, pool, pool, outs, kernel, kernel, channels),
                (
                    places * per_place,
                    pool * per_place + stride * per_row,
                    per_place + stride * channels,
                    depth,
                    per_row,
                    channels,
                    1,
                ),
            )

        self.bank = zeros(networks, places * outs, depth)
        self._bank = shifted(self.bank)
        self._filters = weight.permute(0, 1, 3, 4, 2)[:, None, None].expand(self._bank.shape)

        self.scores = empty(networks, places * outs, n)
        self._places = self.scores.view(networks, places, outs, n).unbind(1)
        self._best = [empty(networks, outs, n), empty(networks, outs, n)]
        self.best = self._best[places % 2] if pool > 1 else self._places[0]
        self._out = self.best.view(networks, outs, samples, rows, columns).transpose(1, 2)

        # the way back
        self.rest = empty(networks, outs, n)
        self._rest = self.rest.view(networks, outs, samples, rows, columns).transpose(1, 2)
        self.routed = empty(networks, places * outs, n) if pool > 1 else self.rest
        self._routed = self.routed.view(networks, places, outs, n).unbind(1)
        self.grad_bank = empty(networks, places * outs, depth)
        self._grad_bank = [copy for line in shifted(self.grad_bank).unbind(1) for copy in line.unbind(1)]
        self._grad_copies = empty(*self._bank.shape[:1], *self._bank.shape[3:])
        self._grad_filters = self.grad_weight.permute(0, 1, 3, 4, 2)
        if self.first:
            return
        self.grad_cols = empty(networks, n, depth)
        self.grad_framed = empty(*framed.shape)
        self._grad_x = self.grad_framed[:, :, inside[0], inside[1]].permute(0, 1, 4, 2, 3)
        self._folds: list[tuple[Tensor, Tensor]] = []
        pieces = self.grad_cols.view(networks, samples, rows, columns, patch, patch * channels)
        for i in range(0, patch, hop):  # patches are one hop apart: pieces of a hop x hop never overlap
            for j in range(0, patch, hop):
                high, wide = min(hop, patch - i), min(hop, patch - j) * channels
                piece = pieces[..., i : i + high, j * channels : j * channels + wide]
                target = self.grad_framed.as_strided(piece.shape, (k, b, hop * h, hop * w, h, c), i * h + j * w)
                self._folds.append((target, piece))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Stage.forward`."""
        assert self.inbox is not None
        if x is not self.inbox:
            self.inbox.copy_(x)
        self._cols.copy_(self._patches)
        self._bank.copy_(self._filters)
        torch.bmm(self.bank, self.cols, out=self.scores)
        best = self._places[0]
        for i, place in enumerate(self._places[1:]):
            previous, best = best, self._best[i % 2]
            torch.maximum(previous, place, out=best)
            if context.training:
                place.sub_(previous)  # positive where this place beats all before it: the way back goes by that
        if self.bias is not None:
            best.add_(self.bias.unsqueeze(-1))
        if self.geometry.relu:
            torch.relu_(best)
        return self._out

    def backward(self, grad: Tensor) -> Tensor | None:
        """See `Stage.backward`."""
        self._rest.copy_(grad)
        rest = self.rest
        if self.geometry.relu:
            _threshold_backward(rest, self.best, 0, grad_input=rest)
        if self.grad_bias is not None:
            torch.sum(rest, -1, dtype=self.grad_bias.dtype, out=self.grad_bias)
        for place, lead in zip(self._routed[:0:-1], self._places[:0:-1], strict=True):
            _threshold_backward(rest, lead, 0, grad_input=place)
            rest = torch.sub(rest, place, out=self._routed[0])
        torch.bmm(self.routed, self.cols.transpose(1, 2), out=self.grad_bank)
        total = self._grad_bank[0]
        for copy in self._grad_bank[1:]:
            total = torch.add(total, copy, out=self._grad_copies)
        self._grad_filters.copy_(total)
        if self.first:
            return None
        torch.bmm(self.routed.transpose(1, 2), self.bank, out=self.grad_cols)
        self.grad_framed.zero_()
        for target, piece in self._folds:
            target.add_(piece)
        return self._grad_x


class LibraryConv(Weighted):
    """``relu(max_pool(conv(x)))`` by the library's convolution; several networks are groups of one call.

    The faster way where there are many channels, and the only one for groups and dilation.
    """

    def __init__(self, place: Place, geometry: ConvGeometry, dilation: int, groups: int) -> None:
        super().__init__(place)
        self.networks, self.samples = place.shape[:2]
        self.geometry, self.dilation, self.groups = geometry, dilation, groups * self.networks
        reach = dilation * (geometry.kernel - 1) + 1
        rows, columns = (
            ((side + 2 * geometry.padding - reach) // geometry.stride + 1) // geometry.pool for side in place.shape[3:]
        )
        self.output = torch.Size((self.networks, self.samples, self.weight.shape[1], rows, columns))

    def _merge(self, x: Tensor) -> Tensor:
        """Return (B, K C, H, W) with channels innermost, the layout in which the library is fastest."""
        merged = x.transpose(0, 1).flatten(1, 2)
        return merged.to(self.dtype).contiguous(memory_format=torch.channels_last)

    def _split(self, x: Tensor) -> Tensor:
        parts: Tensor = x.unflatten(1, (self.networks, -1))
        return parts.transpose(0, 1)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Stage.forward`."""
        geometry = self.geometry
        self.x = self._merge(x)
        self.filters = self.weight.flatten(0, 1).to(self.dtype)
        if self.networks == 1:
            self.filters = self.filters.contiguous(memory_format=torch.channels_last)
        bias = None if self.bias is None else self.bias.flatten().to(self.dtype)
        side = [geometry.stride] * 2, [geometry.padding] * 2, [self.dilation] * 2
        out = torch.convolution(self.x, self.filters, bias, *side, False, [0, 0], self.groups)
        if geometry.pool > 1:
            self.scores = out
            out, self.winners = _max_pool(out, [geometry.pool] * 2, [geometry.pool] * 2)
        if geometry.relu:
            torch.relu_(out)
        self.out = out
        return self._split(out)

    def backward(self, grad: Tensor) -> Tensor | None:
        """See `Stage.backward`."""
        geometry = self.geometry
        grad = self._merge(grad)
        if geometry.relu:
            grad = torch.ops.aten.threshold_backward.default(grad, self.out, 0)
        if geometry.pool > 1:
            grad = _max_pool_backward(
                grad, self.scores, [geometry.pool] * 2, [geometry.pool] * 2, [0, 0], [1, 1], False, self.winners
            )
        by_product = grad.device.type == "cpu" and self.networks == self.groups == self.dilation == 1
        grad_x, grad_filters, grad_bias = _convolution_backward(
            grad,
            self.x,
            self.filters,
            None if self.bias is None else [self.bias.numel()],
            [geometry.stride] * 2,
            [geometry.padding] * 2,
            [self.dilation] * 2,
            False,
            [0, 0],
            self.groups,
            [not self.first, not by_product, self.bias is not None and not by_product],
        )
        if by_product:
            grad_filters, grad_bias = self._filters_by_product(grad)
        self.grad_weight.copy_(grad_filters.reshape(self.grad_weight.shape))
        if self.grad_bias is not None:
            self.grad_bias.copy_(grad_bias.view(self.grad_bias.shape))
        return None if self.first else self._split(grad_x)

    def _filters_by_product(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of filters and bias by one matrix product, on a CPU a fifth faster than the library."""
        geometry = self.geometry
        outs, channels, kernel, _ = self.filters.shape
        x = self.x.permute(0, 2, 3, 1)
        if geometry.padding:
            x = pad(x, (0, 0, *[geometry.padding] * 4))
        x = x.contiguous()
        b, h, w, c = x.stride()
        shape = (len(x), *grad.shape[2:], kernel, kernel * channels)
        cols = x.as_strided(shape, (b, geometry.stride * h, geometry.stride * w, h, c))
        rows = grad.permute(0, 2, 3, 1).reshape(-1, outs)
        product = rows.t() @ cols.reshape(len(rows), -1)
        return product.view(outs, kernel, kernel, channels).permute(0, 3, 1, 2), rows.sum(0)


class Linear(Weighted):
    """``relu(x W' + b)``, or without the ReLU."""

    def __init__(self, place: Place, relu: bool) -> None:
        super().__init__(place)
        self.relu = relu
        self.output = torch.Size((*place.shape[:2], self.weight.shape[1]))
        self.y = torch.empty(self.output, dtype=place.dtype, device=place.device)
        self.rest = torch.empty_like(self.y)
        self.grad_x = torch.empty((0,) if place.first else place.shape, dtype=place.dtype, device=place.device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Stage.forward`."""
        self.x = x.to(self.dtype)
        self.w = self.weight.to(self.dtype)
        if self.bias is None:
            torch.bmm(self.x, self.w.transpose(1, 2), out=self.y)
        else:
            bias = self.bias.unsqueeze(1).to(self.dtype)
            torch.baddbmm(bias, self.x, self.w.transpose(1, 2), out=self.y)
        return torch.relu_(self.y) if self.relu else self.y

    def backward(self, grad: Tensor) -> Tensor | None:
        """See `Stage.backward`."""
        if self.relu:
            grad = _threshold_backward(grad.to(self.dtype), self.y, 0, grad_input=self.rest)
        else:
            grad = grad.to(self.dtype)
        product_into(self.grad_weight, grad.transpose(1, 2), self.x)
        if self.grad_bias is not None:
            torch.sum(grad, 1, dtype=self.grad_bias.dtype, out=self.grad_bias)
        return None if self.first else torch.bmm(grad, self.w, out=self.grad_x)


class Flatten(Stage):
    """(K, B, C, H, W) -> (K, B, C H W)."""

    def __init__(self, place: Place) -> None:
        self.shape = place.shape
        self.output = torch.Size((*self.shape[:2], self.shape[2:].numel()))
        self.y = torch.empty(self.shape, dtype=place.dtype, device=place.device)
        self._flat = self.y.view(self.output)
        self.inbox = self.y

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Stage.forward`."""
        if x is not self.y:
            self.y.copy_(x)
        return self._flat

    def backward(self, grad: Tensor) -> Tensor:
        """See `Stage.backward`."""
        return grad.view(self.shape)


class Dropout(Stage):
    """Dropout of single values (or, with `channels`, of whole channels), each network by its own generator.

    A network draws for its real samples alone and in their order, so that its masks depend on nobody else; the CPU
    draws the very masks that `nn.Dropout` draws from the same seed. Masks are drawn in the order of memory: images that
    come from a convolution have channels innermost in the sequential engine on a CPU.
    """

    def __init__(self, place: Place, p: float, channels: bool) -> None:
        self.output = place.shape
        self.keep = 1.0 - p
        drawn = (*place.shape[:3], *(1 for _ in place.shape[3:])) if channels else place.shape
        self.mask = torch.zeros(drawn, dtype=place.dtype, device=place.device)
        if not place.first and len(drawn) == 5 and place.device.type == "cpu":
            self.mask = self.mask.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Stage.forward`."""
        self.active = context.training and self.keep < 1
        if not self.active:
            return x
        if self.keep == 0:
            return x * self.mask
        for mask, count, generator in zip(self.mask, context.counts, context.generators, strict=True):
            mask[:count].bernoulli_(self.keep, generator=generator).div_(self.keep)
        return x * self.mask

    def backward(self, grad: Tensor) -> Tensor:
        """See `Stage.backward`."""
        return grad * self.mask if self.active else grad


class Stateless(Stage):
    """Any layer without weights that treats samples alike and apart, differentiated by autograd."""

    def __init__(self, place: Place, module: nn.Module) -> None:
        self.module = module
        self.lead = place.shape[:2]
        probe = module(torch.empty((1, *place.shape[2:]), dtype=place.dtype, device=place.device))
        self.output = torch.Size((*self.lead, *probe.shape[1:]))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """See `Stage.forward`."""
        if not context.training:
            return torch.reshape(self.module(x.flatten(0, 1)), self.output)
        with torch.enable_grad():
            self.x = x.detach().flatten(0, 1).requires_grad_()
            self.y: Tensor = self.module(self.x)
        return torch.reshape(self.y.detach(), self.output)

    def backward(self, grad: Tensor) -> Tensor:
        """See `Stage.backward`."""
        (grad_x,) = torch.autograd.grad(self.y, self.x, grad.reshape(self.y.shape))
        return torch.reshape(grad_x, (*self.lead, *grad_x.shape[1:]))
