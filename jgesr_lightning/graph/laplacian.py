"""Laplacians, and what a tensor must look like."""

from __future__ import annotations

import torch
from torch import Tensor

from jgesr_lightning.graph.arrays import Array, set_diagonal


def laplacian(W: Array) -> Array:
    r"""Return :math:`L = \mathrm{diag}(W 1) - W`: (..., K, K), of the type of `W`, a tensor or an array.

    Its adjoint is `distances_from_gram`: ``<laplacian(W), G> = <w, d>`` over edges, with d the squared distances that
    the Gram matrix G holds. The diagonal of `W` is taken for zero.
    """
    return set_diagonal(-W, W.sum(-1) - W.diagonal(0, -2, -1))


def pairs(numbers: Array) -> Array:
    """Return ``x_m + x_n`` of (..., K): (..., K, K)."""
    return numbers[..., :, None] + numbers[..., None, :]


def check_tensor(name: str, value: object, shape: tuple[int, ...] = ()) -> None:
    """Raise ValueError unless `value` is a tensor whose last dimensions are `shape`."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; got {type(value).__name__}")
    if shape and tuple(value.shape[-len(shape) :]) != shape:
        raise ValueError(f"{name} must have shape (..., {', '.join(map(str, shape))}); got {tuple(value.shape)}")


def check_models(name: str, models: object, **others: object) -> None:
    """Raise ValueError unless `models` is a (..., K, d) floating-point tensor, and tensors beside it fit.

    Those are `W` (..., K, K), `weights` (..., K), `mask` (..., K, d) bool or None, and others (..., K, d).
    """
    check_tensor(name, models)
    assert isinstance(models, Tensor)
    shape = tuple(models.shape)
    if len(shape) < 2 or not models.is_floating_point():
        raise ValueError(f"{name} must be a (..., K, d) floating-point tensor; got {models.dtype} of shape {shape}")
    expected = {"W": (shape[-2], shape[-2]), "weights": shape[-2:-1]}
    for other, value in others.items():
        if value is not None or other in expected:
            check_tensor(other, value, expected.get(other, shape[-2:]))
        if other == "mask" and isinstance(value, Tensor) and value.dtype != torch.bool:
            raise ValueError(f"mask must be of type bool; got {value.dtype}")


def symmetric_part(name: str, matrix: Tensor) -> Tensor:
    """Return that of a (..., K, K) tensor in float64, diagonal zero; ValueError for another."""
    check_tensor(name, matrix)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"{name} must have shape (..., K, K); got {tuple(matrix.shape)}")
    if matrix.shape[-1] < 2:
        raise ValueError(f"{name}: a graph needs at least 2 nodes; got {matrix.shape[-1]}")
    given = matrix.detach().to(torch.float64)
    symmetric: Tensor = set_diagonal((given + given.mT) * 0.5, 0.0)
    if not bool(symmetric.isfinite().all()):
        raise ValueError(f"{name} holds values that are not finite")
    return symmetric
