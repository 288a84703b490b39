"""How a client moves against its gradient: PyTorch's rules, and the same on the rows of a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

BETAS, EPS = (0.9, 0.999), 1e-8
"""Of Adam and AdamW, PyTorch's defaults (Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR 2019)."""


def torch_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> Optimizer:
    """Return PyTorch's optimizer of that name, at rest."""
    if name == "sgd":
        return SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    rule = Adam if name == "adam" else AdamW
    return rule(parameters, lr=lr, betas=BETAS, eps=EPS, weight_decay=weight_decay)


def clip(grads: Tensor, largest: float) -> None:
    """Scale each row of `grads` (rows, d) in place to a Euclidean norm of at most `largest`, as PyTorch does."""
    norms = torch.linalg.vector_norm(grads, dim=-1, keepdim=True)
    grads.mul_((largest / (norms + 1e-6)).clamp_(max=1))


class RowRule(Protocol):
    """An optimizer of many clients at once, each a row of the matrices.

    Attributes:
        moments: number of matrices of the shape of the weights that it keeps.
    """

    moments: int

    def __call__(
        self, weights: Tensor, grads: Tensor, moments: Sequence[Tensor], steps: Sequence[int], lr: float
    ) -> None:
        """Move `weights` (rows, d) in place.

        Args:
            weights: changed.
            grads: (rows, d); may be overwritten.
            moments: its matrices (rows, d), zero at first; changed.
            steps: number of this step of each row, from 1.
            lr: learning rate.
        """
        ...


class RowSGD:
    """``v <- momentum v + g + decay x; x <- x - lr v``."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.moments = 1 if momentum else 0

    def __call__(
        self, weights: Tensor, grads: Tensor, moments: Sequence[Tensor], steps: Sequence[int], lr: float
    ) -> None:
        """See `RowRule`."""
        if self.weight_decay:
            grads.add_(weights, alpha=self.weight_decay)
        if self.momentum:
            grads = moments[0].mul_(self.momentum).add_(grads)
        weights.add_(grads, alpha=-lr)


class RowAdam:
    """Adam; with `decoupled` AdamW, whose decay ``x <- (1 - lr decay) x`` stays out of the moments."""

    def __init__(self, weight_decay: float, decoupled: bool) -> None:
        self.weight_decay, self.decoupled = weight_decay, decoupled
        self.moments = 2

    def __call__(
        self, weights: Tensor, grads: Tensor, moments: Sequence[Tensor], steps: Sequence[int], lr: float
    ) -> None:
        """See `RowRule`."""
        first, second = moments
        if self.weight_decay and self.decoupled:
            weights.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            grads.add_(weights, alpha=self.weight_decay)
        first.lerp_(grads, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(grads, grads, value=1 - BETAS[1])
        scale, length = (
            torch.tensor([values], dtype=weights.dtype, device=weights.device).T
            for values in ([math.sqrt(1 - BETAS[1] ** t) for t in steps], [lr / (1 - BETAS[0] ** t) for t in steps])
        )
        spread = torch.sqrt(second, out=grads).div_(scale).add_(EPS)
        weights.sub_(torch.div(first, spread, out=spread).mul_(length))


def row_rule(name: str, momentum: float = 0.0, weight_decay: float = 0.0) -> RowRule:
    """Return the rule that moves each row as `torch_optimizer` of the same settings moves one client."""
    return RowSGD(momentum, weight_decay) if name == "sgd" else RowAdam(weight_decay, decoupled=name == "adamw")
