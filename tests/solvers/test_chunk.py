"""One step on a chunk: arrays and tensors agree, and both with the formula."""

import pytest
import torch

from jgesr_lightning.solvers.chunk import Chunk, Measured, step_arrays, step_tensors


def chunk_of(dtype: torch.dtype, with_mask: bool, seed: int = 0) -> Chunk:
    generator = torch.Generator().manual_seed(seed)
    psi, before, received = (torch.randn(5, 300, generator=generator, dtype=dtype) for _ in range(3))
    shared = torch.randn(300, generator=generator, dtype=dtype)
    mask = torch.rand(5, 300, generator=generator) > 0.2 if with_mask else None
    return Chunk(psi, before, received, shared, mask, *(torch.empty_like(psi) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.4])
@pytest.mark.parametrize("details", [True, False])
def test_arrays_and_tensors_take_the_step_of_the_formula(dtype, with_mask, momentum, details) -> None:
    generator = torch.Generator().manual_seed(1)
    pull = torch.rand(5, 1, generator=generator, dtype=dtype)
    smooth = 0.1 * torch.rand(5, 5, generator=generator, dtype=torch.float64)

    given = chunk_of(dtype, with_mask)
    psi, before, received, shared = (part.double() for part in given[:4])
    mask = torch.ones(5, 300, dtype=torch.bool) if given.mask is None else given.mask
    Y = psi + momentum * (psi - before)
    expected = Y - pull.double() * mask * (Y + shared - received) - smooth @ Y
    step, residual = expected - psi, mask * ((expected if details else Y) + shared - received)
    measured = Measured(
        expected @ expected.T,
        residual.square().sum(1),
        # without details there is no momentum, or the length of the step is that from Y
        (step if details else expected - Y).square().sum(1),
        step @ step.T if details else None,
        (mask * step).square().sum(1) if details else None,
    )
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-10}
    for numpy in (True, False):
        chunk = chunk_of(dtype, with_mask)
        if numpy:
            arrays = Chunk(*(None if part is None else part.numpy() for part in chunk))
            done = step_arrays(arrays, pull, (-smooth).to(dtype).numpy(), momentum, details)
        else:
            done = step_tensors(chunk, pull, -smooth, momentum, details)
        torch.testing.assert_close(chunk.before.double(), expected, **tolerance)
        for name, value, right in zip(Measured._fields, done, measured, strict=True):
            assert (value is None) == (right is None), name
            if right is not None:
                torch.testing.assert_close(torch.as_tensor(value).double(), right, **tolerance)
        torch.testing.assert_close(chunk.psi, given.psi, rtol=0, atol=0)
