"""One gradient step on a client's whole training set an epoch, computed in parts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from jgesr_lightning.regularisers import CosineDissimilarity
from jgesr_lightning.training.batches import PART, visit_orders
from jgesr_lightning.training.sequential import SequentialEngine
from jgesr_lightning.training.stacked import StackedEngine
from tests.training.test_engines import EPOCHS, compare, make_data, make_engine, make_net, row_of, run_rounds

SIZES = (150, 3, 64, 65)  # three parts, less than one, one, one and a sample
LR = 0.1
ENGINES = pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])


def by_hand(net, data, mu, terms, momentum):
    """Return the parameters after `EPOCHS` steps down the gradient of the whole loss, and the mean loss before them."""
    net = copy.deepcopy(net).double()
    x0 = row_of(net)
    x, velocity, losses = x0.clone(), torch.zeros_like(x0), []
    for _ in range(EPOCHS):
        torch.nn.utils.vector_to_parameters(x, net.parameters())
        flat = torch.nn.utils.parameters_to_vector(net.parameters())
        loss = cross_entropy(net(data.train_inputs), data.train_labels) + mu / 2 * (flat - x0).square().sum()
        loss = loss + sum(term(flat, x0) for term in terms)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        velocity = momentum * velocity + torch.cat([g.reshape(-1) for g in grads])
        x = x - LR * velocity
        losses.append(loss.detach())
    return x, torch.stack(losses).mean()


@ENGINES
@pytest.mark.parametrize(
    ("mu", "terms", "momentum"), [(0.0, (), 0.0), (1.0, (), 0.0), (0.5, (CosineDissimilarity(0.3),), 0.9)]
)
def test_steps_follow_the_gradient_of_the_whole_loss(cls, mu, terms, momentum):
    data, net = make_data(SIZES), make_net().double()
    engine = make_engine(cls, make_net(), data, mu=mu, terms=terms, momentum=momentum, batch="full")
    models, losses = run_rounds(engine, row_of(net), rounds=1)
    for k, own in enumerate(data):
        expected, loss = by_hand(net, own, mu, terms, momentum)
        assert (expected - row_of(net)).abs().max() > 1e-3
        torch.testing.assert_close(models[k], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(losses[k], loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_stacked_equals_sequential(mu):
    compare(make_net, data=make_data(SIZES), batch="full", mu=mu, momentum=0.9)


def test_dropout_masks_follow_the_samples():
    compare(lambda: make_net(nn.Dropout(0.4)), data=make_data(SIZES), batch="full")


def test_bf16_stays_near_the_exact_step():
    data = make_data(SIZES, dtype=torch.float32)
    start = row_of(make_net(), torch.float32)
    exact, autocast, ours = (
        run_rounds(make_engine(cls, make_net(), data, precision, mu=1.0, batch="full"), start)[0]
        for cls, precision in (
            (SequentialEngine, "32-true"),
            (SequentialEngine, "bf16-mixed"),
            (StackedEngine, "bf16-mixed"),
        )
    )
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() < 2 * (autocast - exact).norm() < 0.5 * (exact - start).norm()


@ENGINES
def test_no_more_than_a_part_is_computed_at_once(cls):
    class Watched(nn.Flatten):
        seen: list[int] = []  # noqa: RUF012 - shared on purpose

        def forward(self, x):
            self.seen.append(len(x))
            return super().forward(x)

    net = nn.Sequential(Watched(), nn.Linear(144, 3))
    engine = make_engine(cls, net, make_data((1000,)), batch="full")
    run_rounds(engine, row_of(net), rounds=1)
    if cls is SequentialEngine:
        assert max(Watched.seen) == PART["cpu"] and sum(Watched.seen) == EPOCHS * 1000
    else:
        assert max(step.labels.shape[1] for step in engine._workspace._steps.values()) == PART["cpu"]


@ENGINES
def test_a_client_s_step_depends_on_nobody_else(cls):
    data, start = make_data(SIZES), row_of(make_net())
    together, _ = run_rounds(make_engine(cls, make_net(), data, batch="full"), start)
    alone, _ = run_rounds(make_engine(cls, make_net(), [data[1]], clients=[1], batch="full"), start)
    assert torch.equal(together[1], alone[0])


def test_a_batch_as_large_as_the_set_is_the_full_step():
    data, start = make_data((40,)), row_of(make_net())
    full, batch = (run_rounds(make_engine(SequentialEngine, make_net(), data, batch=b), start)[0] for b in ("full", 40))
    torch.testing.assert_close(full, batch, rtol=0, atol=1e-12)


def test_mini_batches_are_drawn_as_ever():
    orders = visit_orders(5, 2, 2, 0, 1, 3)
    assert orders.tolist() == [[0, 3, 1, 2, 4], [4, 0, 1, 3, 2]]
    assert visit_orders(5, 2, "full", 0, 1, 3).tolist() == [[0, 1, 2, 3, 4]] * 2
