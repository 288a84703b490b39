"""How a client moves against its gradient: PyTorch's rules, the same on the rows of a matrix, and rates over rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from jgesr_lightning.checks import number, one_of, whole

OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "cosine", "step"]
BETAS, EPS = (0.9, 0.999), 1e-8
"""Of Adam and AdamW, PyTorch's defaults (Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR 2019)."""


class Schedule:
    """The part of the learning rate that is in force in a round: a function of the round's number and nothing else.

    - constant: all of it;
    - cosine: from all of it in round 1 down to `factor` of it in round `rounds`, half a cosine; it stays there;
    - step: times `factor` after every `rounds` rounds.

    It does not depend on how many rounds a run has, so that a run that is resumed with more of them is the same run.

    Args:
        name: one of the above.
        rounds: see above; needed by cosine and step.
        factor: see above, from 0 to 1.

    Raises:
        ValueError: a setting out of range, with its name.
    """

    def __init__(self, name: str = "constant", rounds: int | None = None, factor: float = 0.1) -> None:
        one_of("local.schedule", name, ("constant", "cosine", "step"))
        number("local.schedule_factor", factor, at_least=0, at_most=1)
        if rounds is not None:
            whole("local.schedule_rounds", rounds, at_least=1)
        elif name != "constant":
            raise ValueError(f"local.schedule is {name!r}; it needs local.schedule_rounds, such as the run's rounds")
        if rounds is not None and name == "constant":
            raise ValueError(f"local.schedule_rounds is {rounds}, which a constant schedule has no use for")
        self.name, self.rounds, self.factor = name, rounds, factor

    def __call__(self, round_number: int) -> float:
        """Return the part (0 to 1) in round `round_number`, which counts from 1."""
        if self.rounds is None or self.name == "constant":
            return 1.0
        if self.name == "step":
            return float(self.factor ** ((round_number - 1) // self.rounds))
        passed = min(1.0, (round_number - 1) / (self.rounds - 1)) if self.rounds > 1 else 1.0
        return self.factor + (1 - self.factor) * (1 + math.cos(math.pi * passed)) / 2


def check_optimizer(name: str, momentum: float, weight_decay: float, clip_norm: float | None) -> None:
    """Raise ValueError, with its name, for a setting out of range or one that the optimizer `name` does not have."""
    one_of("local.optimizer", name, ("sgd", "adam", "adamw"))
    number("local.momentum", momentum, at_least=0)
    number("local.weight_decay", weight_decay, at_least=0)
    if clip_norm is not None:
        number("local.clip_norm", clip_norm, above=0)
    if momentum and name != "sgd":
        raise ValueError(f"local.momentum is {momentum:g}; {name} has moments of its own: leave it at 0")


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
