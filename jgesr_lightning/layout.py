"""One order of all that a network communicates: state dict <-> a row of the K x d matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterLayout:
    """Names, shapes and order of a network's communicated tensors.

    The rule: all trained parameters in the network's own order come first, then its persistent floating-point buffers
    (batch norm's running statistics), which travel and are aggregated like parameters. What nobody changes, frozen
    parameters, and what counts, integer buffers, does not travel: a client has the initial network's.

    Attributes:
        names: state-dict keys, in order.
        shapes: their shapes.
        num_parameters: columns that are trained; the first ones.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    num_parameters: int

    @classmethod
    def of(cls, net: nn.Module) -> ParameterLayout:
        """Read the layout off a network."""
        persistent = net.state_dict(keep_vars=True)
        parameters = {name: p for name, p in net.named_parameters() if name in persistent and p.requires_grad}
        # a parameter that two layers share stands under its first name alone
        shared = {name for name, _ in net.named_parameters(remove_duplicate=False)}
        buffers = {name: b for name, b in persistent.items() if name not in shared and b.is_floating_point()}
        tensors = {**parameters, **buffers}
        return cls(
            names=tuple(tensors),
            shapes=tuple(t.shape for t in tensors.values()),
            num_parameters=sum(p.numel() for p in parameters.values()),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of columns of each tensor."""
        return tuple(shape.numel() for shape in self.shapes)

    @property
    def size(self) -> int:
        """Number of columns d."""
        return sum(self.sizes)

    @property
    def variances(self) -> Tensor:
        """(d,) bool: columns of running variances, which noise can make negative and nothing else may be."""
        running = [name.rpartition(".")[2] == "running_var" for name in self.names]
        return torch.tensor(running, dtype=torch.bool).repeat_interleave(torch.tensor(self.sizes, dtype=torch.long))

    @property
    def layers(self) -> tuple[int, ...]:
        """Columns of each layer, in order: neighbouring tensors of one module (weight and bias) are one layer.

        Summing to d. Buffers come after all parameters, so a batch-norm module's statistics are a layer of their own.
        """
        layers: list[int] = []
        last = None
        seen = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            owner = (name.rpartition(".")[0], seen >= self.num_parameters)
            if owner == last:
                layers[-1] += size
            else:
                layers.append(size)
            last, seen = owner, seen + size
        return tuple(layers)

    def flatten(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        """Return the row (d,) that holds the tensors of `state_dict`."""
        return torch.cat([state_dict[name].detach().reshape(-1) for name in self.names])

    def restore(self, row: Tensor) -> dict[str, Tensor]:
        """Return views of `row` (..., d) under their state-dict names, shaped (..., *shape)."""
        pieces = row.split(self.sizes, dim=-1)
        lead = row.shape[:-1]
        return {
            name: piece.reshape(*lead, *shape)
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }
