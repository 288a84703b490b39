r"""One step of Algorithm 1 on one chunk of columns, and what is measured of it: once for tensors, once for arrays.

Both compute :math:`\Psi^+ = Y - \mathrm{diag}(p)\, M * (Y - X_r) - S Y` at :math:`Y = \Psi + \theta (\Psi - \Psi_b)`,
:math:`\Psi_b` the iterate before Psi, which the result overwrites. Psi and Y are held less a row that all share.

On a CPU the step is twenty short operations a chunk, two of them matrix products. Numpy's calls cost a third of
torch's, which lets a chunk be so small that all but the products run in a core's own cache: a third of the time in all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jgesr_lightning.graph.gram import (
    combine_arrays,
    row_combinations,
    row_squares,
    row_squares_array,
    self_product,
    self_product_array,
)

Array = npt.NDArray[Any]


class Measured(NamedTuple):
    """Sums over a chunk. Without details, `residual` is that of Y, `step` is from Y, and the last two are None.

    Attributes:
        gram: of Psi+, (K, K).
        residual: squared norms of the rows of M * (Psi+ - Xr), (K,).
        step: the same of Psi+ - Psi.
        step_gram: Gram matrix of Psi+ - Psi, (K, K).
        masked_step: squared norms of the rows of M * (Psi+ - Psi), (K,).
    """

    gram: Any
    residual: Any
    step: Any
    step_gram: Any = None
    masked_step: Any = None


class Chunk(NamedTuple):
    """Columns of everything a step touches, all tensors or all arrays: (K, c), `shared` (c,), `mask` bool or None.

    `before` holds Psi_b and is overwritten by Psi+; base, residual and change are buffers.
    """

    psi: Any
    before: Any
    received: Any
    shared: Any
    mask: Any
    base: Any
    residual: Any
    change: Any


def step_tensors(chunk: Chunk, pull: Tensor, across: Tensor, momentum: float, details: bool) -> Measured:
    """Take the step with p = pull (K, 1), S = -across (K, K)."""
    psi, target, change, base = chunk.psi, chunk.before, chunk.change, chunk.psi
    if momentum:
        base = torch.sub(psi, target, out=chunk.base).mul_(momentum).add_(psi)
    residual = residual_tensors(chunk, base)
    row_combinations(across, base, change)
    change.addcmul_(residual, pull, value=-1)
    torch.add(base, change, out=target)
    gram = self_product(target)
    if not details:
        return Measured(gram, row_squares(residual), row_squares(change))
    squares = row_squares(residual_tensors(chunk, target))
    torch.sub(target, psi, out=change)
    step, step_gram = row_squares(change), self_product(change)
    masked = step if chunk.mask is None else row_squares(change.mul_(chunk.mask))
    return Measured(gram, squares, step, step_gram, masked)


def step_arrays(chunk: Chunk, pull: Tensor, across: Array, momentum: float, details: bool) -> Measured:
    """Take the step with p = pull (K, 1), S = -across (K, K), all of the type of Psi."""
    psi, target, change, base = chunk.psi, chunk.before, chunk.change, chunk.psi
    if momentum:
        base = np.subtract(psi, target, out=chunk.base)
        base *= momentum
        base += psi
    residual = _residual_arrays(chunk, base)
    squares = row_squares_array(residual)
    combine_arrays(across, base, change)
    torch.from_numpy(change).addcmul_(torch.from_numpy(residual), pull, value=-1)  # one pass, where numpy takes two
    np.add(base, change, out=target)
    gram = self_product_array(target)
    if not details:
        return Measured(gram, squares, row_squares_array(change))
    squares = row_squares_array(_residual_arrays(chunk, target))
    np.subtract(target, psi, out=change)
    step, step_gram = row_squares_array(change), self_product_array(change)
    masked = step if chunk.mask is None else row_squares_array(np.multiply(change, chunk.mask, out=change))
    return Measured(gram, squares, step, step_gram, masked)


def residual_tensors(chunk: Chunk, psi: Tensor) -> Tensor:
    """Return M * (psi - Xr) in the chunk's buffer."""
    residual = torch.sub(psi, chunk.received, out=chunk.residual)
    residual += chunk.shared
    return residual if chunk.mask is None else residual.mul_(chunk.mask)


def _residual_arrays(chunk: Chunk, psi: Array) -> Array:
    residual: Array = np.subtract(psi, chunk.received, out=chunk.residual)
    residual += chunk.shared
    # Multiplying by bools is several times faster than to fill or to choose.
    return residual if chunk.mask is None else np.multiply(residual, chunk.mask, out=residual)
