"""The K x K numbers: numpy arrays on the host, torch tensors where the models lie on an accelerator; one code for both.

At K = 20 an operation on such numbers is all overhead, of which numpy has a third of torch's; on an accelerator a trip
to the host and back costs more than either. So what is K x K is written in what both libraries have in common
(operators, `sum(-1)`, `sqrt`, `where`, ...), and asks `of` for the module that is meant. What looks at a value to
decide something does so on the host only: `blind` numbers are computed with and never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.linalg import get_lapack_funcs
from torch import Tensor

Array = Any
"""A float64 numpy array, or a float64 tensor on an accelerator."""

_potrf, _potrs = get_lapack_funcs(("potrf", "potrs"))
tensors_everywhere = False
"""Whether the CPU counts as an accelerator: K x K numbers are tensors, and nothing is looked at; set by tests."""


def blind(numbers: Array) -> bool:
    """Whether numbers lie on an accelerator, so that to look at them would be to wait."""
    return isinstance(numbers, Tensor) and (numbers.device.type != "cpu" or tensors_everywhere)


def enter(tensor: Tensor) -> Array:
    """Return the numbers of a float64 tensor as they are computed with where it lies."""
    return tensor.detach() if blind(tensor) else tensor.detach().numpy()


def leave(array: Array) -> Tensor:
    """Return the tensor of such numbers, on the same memory."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def host(array: Array) -> Any:
    """Return these numbers as a numpy array, which waits for an accelerator; what is neither as it is."""
    return array.cpu().numpy() if isinstance(array, Tensor) else array


def of(array: Array) -> Any:
    """Return the module whose functions take these numbers: torch or numpy."""
    return torch if isinstance(array, Tensor) else np


def like(values: Any, array: Array) -> Array:
    """Return float64 numbers, given as such, beside others."""
    if isinstance(array, Tensor):
        return torch.as_tensor(values, dtype=torch.float64, device=array.device)
    return np.asarray(values, dtype=np.float64)


def positive_part(array: Array) -> Array:
    """Return max(0, array)."""
    return array.clamp_min(0) if isinstance(array, Tensor) else np.maximum(array, 0)


def set_diagonal(array: Array, values: Array | float) -> Array:
    """Write the diagonals of (..., K, K), in place, and return it."""
    diagonal = array.diagonal(0, -2, -1) if isinstance(array, Tensor) else np.einsum("...ii->...i", array)
    diagonal[...] = values
    return array


def solver(matrix: Array) -> Callable[[Array], Array]:
    """Return x -> ``matrix^-1 x`` of (..., K, K) positive definite, x (..., K, 1); not a number where it is not."""
    if isinstance(matrix, Tensor):
        factor = torch.linalg.cholesky_ex(matrix)[0]
        return lambda right: torch.cholesky_solve(right, factor)
    # LAPACK called one by one: numpy's checks take longer than a small system itself.
    factors = [f * math.nan if failed else f for f, failed in map(_potrf, matrix.reshape(-1, *matrix.shape[-2:]))]
    flat, shape = (len(factors), -1), (*matrix.shape[:-1], 1)
    if len(factors) == 1:
        return lambda right: _potrs(factors[0], right.reshape(-1))[0].reshape(shape)
    return lambda right: np.stack(list(map(lambda f, r: _potrs(f, r)[0], factors, right.reshape(flat)))).reshape(shape)
