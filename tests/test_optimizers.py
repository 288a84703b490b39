"""Optimizers of many rows against PyTorch's of one, and learning rates over rounds."""

import pytest
import torch
from torch import nn

from jgesr_lightning.client import ClientModule
from jgesr_lightning.optimizers import clip, row_rule, torch_optimizer
from jgesr_lightning.schedules import Schedule


@pytest.mark.parametrize(
    ("name", "momentum", "decay"),
    [("sgd", 0, 0), ("sgd", 0.9, 0), ("sgd", 0.9, 0.1), ("adam", 0, 0), ("adam", 0, 0.1), ("adamw", 0, 0.1)],
)
def test_rows_move_as_pytorch_moves_one_client(name, momentum, decay):
    """Three clients, the second joining after two steps, so that their step numbers differ."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(3, 7, generator=draw, dtype=torch.float64)
    weights, rule = start.clone(), row_rule(name, momentum, decay)
    moments = [torch.zeros_like(weights) for _ in range(rule.moments)]
    alone = [nn.Parameter(row.clone()) for row in start]
    optimizers = [torch_optimizer(name, [p], 0.05, momentum, decay) for p in alone]
    taken = [0, 0, 0]
    for t in range(6):
        rows = [0, 2] if t < 2 else [0, 1, 2]
        grads = torch.randn(len(rows), 7, generator=draw, dtype=torch.float64)
        for k, grad in zip(rows, grads, strict=True):
            alone[k].grad = grad.clone()
            optimizers[k].step()
            taken[k] += 1
        part, parts = weights[rows], [moment[rows] for moment in moments]
        rule(part, grads, parts, [taken[k] for k in rows], 0.05)
        weights[rows] = part
        for moment, changed in zip(moments, parts, strict=True):
            moment[rows] = changed
    torch.testing.assert_close(weights, torch.stack([p.detach() for p in alone]), rtol=0, atol=1e-14)
    assert (weights - start).abs().min() > 1e-4


def test_clipping_is_pytorch_s_a_row():
    grads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    expected = grads.clone()
    for row in expected:
        p = nn.Parameter(row.clone())
        p.grad = row  # clipped in place
        nn.utils.clip_grad_norm_([p], 1.0)
    clip(grads, 1.0)
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-15)
    assert grads[0].norm() == pytest.approx(1, abs=1e-6) and grads[1].tolist() == [0.3, 0.4]


def test_schedules():
    assert [Schedule()(r) for r in (1, 100)] == [1.0, 1.0]
    assert [Schedule("step", 10, 0.5)(r) for r in (1, 10, 11, 20, 21)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = Schedule("cosine", 5, 0.2)
    assert [cosine(r) for r in (1, 3, 5, 9)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert cosine(2) == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2)
    assert [Schedule("cosine", 2, 0.0)(r) for r in (1, 2)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear",), r"local\.schedule is 'linear'.*constant, cosine, step"),
        (("cosine",), r"local\.schedule is 'cosine'; it needs local\.schedule_rounds"),
        (("step", 0), r"local\.schedule_rounds is 0"),
        (("constant", 5), r"local\.schedule_rounds is 5, which a constant"),
        (("constant", None, 0.5), r"local\.schedule_factor is 0\.5, which a constant"),
        (("cosine", 1), r"local\.schedule_rounds is 1; it must be .*2"),
        (("step", 5, 1.5), r"local\.schedule_factor is 1\.5"),
    ],
)
def test_schedules_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adamm"}, r"local\.optimizer is 'adamm' \(did you mean 'adam'\?\)"),
        ({"optimizer": "adam", "momentum": 0.9}, r"local\.momentum is 0\.9; adam has moments of its own"),
        ({"weight_decay": -1.0}, r"local\.weight_decay is -1\.0"),
        ({"clip_norm": 0.0}, r"local\.clip_norm is 0\.0"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        ClientModule(nn.Linear(2, 2), **settings)
