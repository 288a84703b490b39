"""What a method adds to its clients' loss: small functions of a client's parameters and the model it was sent.

Every term takes flat parameters with any leading batch dimensions, so that one client (d,) and all clients of a
process at once (K, d) are the same call.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from jgesr_lightning.checks import number


class Regulariser(Protocol):
    """A differentiable penalty on local parameters."""

    def __call__(self, x: Tensor, sent: Tensor) -> Tensor:
        """Return the penalty (...) of parameters `x` (..., d) given the sent model `sent` (..., d)."""
        ...


class Proximal:
    """Proximal term of FedProx (Li et al., MLSys 2020, eq. 2): ``mu/2 ||x - sent||^2``."""

    def __init__(self, mu: float) -> None:
        number("mu", mu, at_least=0)
        self.mu = mu

    def __call__(self, x: Tensor, sent: Tensor) -> Tensor:
        """Return the penalty (...) of `x` (..., d)."""
        return 0.5 * self.mu * (x - sent).square().sum(-1)

    def __repr__(self) -> str:
        return f"Proximal(mu={self.mu:g})"


class CosineDissimilarity:
    """Local term of pFedGraph (Ye et al., ICML 2023): ``-lam cos(x, sent)``, small when the two point the same way.

    The publication penalises dissimilarity, so the cosine enters the minimised loss with a minus.
    """

    def __init__(self, lam: float) -> None:
        number("lam", lam, at_least=0)
        self.lam = lam

    def __call__(self, x: Tensor, sent: Tensor) -> Tensor:
        """Return the penalty (...) of `x` (..., d)."""
        return -self.lam * torch.nn.functional.cosine_similarity(x, sent, dim=-1)

    def __repr__(self) -> str:
        return f"CosineDissimilarity(lam={self.lam:g})"
