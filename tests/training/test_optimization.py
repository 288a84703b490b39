"""Optimizers, schedules, clipping and the methods' proximal terms in both engines."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.schedules import Schedule
from jgesr_lightning.training.batches import visit_orders
from jgesr_lightning.training.sequential import SequentialEngine
from jgesr_lightning.training.stacked import StackedEngine
from tests.training.test_engines import BATCH, EPOCHS, compare, make_data, make_engine, make_net, row_of, run_rounds

LR, MU = 0.1, 0.5
SETTINGS = {
    "sgd": {"optimizer": "sgd", "weight_decay": 0.2},
    "adam": {"optimizer": "adam", "weight_decay": 0.2},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.2, "clip_norm": 0.5},
    "clipped": {"clip_norm": 0.05},
    "cosine": {"schedule": Schedule("cosine", 3, 0.1), "optimizer": "adam"},
}
SIZES = (150, 3, 64, 65)


@pytest.mark.parametrize("batch", [BATCH, "full"])
@pytest.mark.parametrize("name", SETTINGS)
def test_stacked_equals_sequential(name, batch):
    data = make_data(SIZES if batch == "full" else (23, 3, 41, 8))
    compare(make_net, tolerance=1e-9, mu=MU, batch=batch, data=data, local=SETTINGS[name])


@pytest.mark.parametrize("batch", [BATCH, "full"])
@pytest.mark.parametrize("method", ["jgesr", "two_step", "graph_filter"])
def test_the_proposed_methods_pull(method, batch):
    """Each with a mu of its own, in both engines; and the pull is there."""
    terms = build_aggregator(method, mu=0.7).client_terms()
    data = make_data(SIZES if batch == "full" else (23, 3, 41, 8))
    compare(make_net, terms=terms, batch=batch, data=data)
    start = row_of(make_net())
    drifts = [
        (run_rounds(make_engine(StackedEngine, make_net(), data, terms=t, batch=batch), start)[0] - start).norm()
        for t in (terms, ())
    ]
    assert drifts[0] < drifts[1]


def by_hand(net, data, rounds, local, client=0, seed=7):
    """Train as one would without this package: PyTorch's optimizer made anew each round, its own clipping."""
    net = copy.deepcopy(net).double()
    rule = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[local.get("optimizer", "sgd")]
    for number in range(1, rounds + 1):
        lr = LR * (local["rates"][number - 1] if "rates" in local else 1)
        optimizer = rule(net.parameters(), lr=lr, weight_decay=local.get("weight_decay", 0))
        sent = [p.detach().clone() for p in net.parameters()]
        for order in visit_orders(data.size, EPOCHS, BATCH, seed, number, client):
            for index in order.split(BATCH):
                optimizer.zero_grad()
                loss = cross_entropy(net(data.train_inputs[index]), data.train_labels[index])
                for p, q in zip(net.parameters(), sent, strict=True):
                    loss = loss + MU / 2 * (p - q).square().sum()
                loss.backward()
                if "clip_norm" in local:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), local["clip_norm"])
                optimizer.step()
    return row_of(net)


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
@pytest.mark.parametrize("name", SETTINGS)
def test_two_rounds_by_hand(cls, name):
    data, net = make_data((23, 9)), make_net()
    engine = make_engine(cls, make_net(), data, mu=MU, local=SETTINGS[name])
    models, _ = run_rounds(engine, row_of(net), rounds=2)
    plain = {**SETTINGS[name], "rates": [1, 0.55]} if name == "cosine" else SETTINGS[name]
    for k, own in enumerate(data):
        torch.testing.assert_close(models[k], by_hand(net, own, 2, plain, k), rtol=0, atol=1e-9)


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
def test_a_visit_depends_on_no_other(cls):
    """No moments cross from one client or round to the next, so that a resumed run is the same run."""
    data, start = make_data((23, 9)), row_of(make_net())
    local = {"optimizer": "adam", "schedule": Schedule("step", 1, 0.5)}
    engine = make_engine(cls, make_net(), data, local=local)
    sent = start.expand(2, -1).clone()
    results = []
    for before in ([], [1, 2]):
        out = sent.clone()
        for number in before:
            engine.train(number, range(2), sent, lambda row, model: None)
        engine.train(3, range(2), sent, lambda row, model, out=out: out[row].copy_(model))
        results.append(out)
    assert torch.equal(*results) and not torch.equal(results[0], sent)


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
def test_penalties_pull_to_the_anchors_where_training_starts_elsewhere(cls):
    data, start = make_data((23, 9)), row_of(make_net())
    anchors = torch.stack([start + 1, start - 2])
    kept = anchors.clone()
    engine = make_engine(cls, make_net(), data, mu=MU, batch="full")
    out, plain = torch.empty_like(anchors), torch.empty_like(anchors)
    sent = start.expand(2, -1)
    engine.train(1, range(2), sent, lambda row, model: out[row].copy_(model), anchors=anchors)
    engine.train(1, range(2), sent, lambda row, model: plain[row].copy_(model))
    assert torch.equal(anchors, kept)
    for k, own in enumerate(data):
        for found, anchor in ((out[k], anchors[k]), (plain[k], start)):  # the anchors of a visit stay out of the next
            net, x = make_net().double(), start.clone()
            for _ in range(EPOCHS):
                torch.nn.utils.vector_to_parameters(x, net.parameters())
                loss = cross_entropy(net(own.train_inputs), own.train_labels)
                grads = torch.autograd.grad(loss, list(net.parameters()))
                x = x - LR * (torch.cat([g.reshape(-1) for g in grads]) + MU * (x - anchor))
            torch.testing.assert_close(found, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [BATCH, "full"])
def test_engines_agree_about_anchors(batch):
    data, start = make_data((23, 9)), row_of(make_net())
    anchors = torch.stack([start + 0.1, start - 0.2])
    results = []
    for cls, more in ((SequentialEngine, {}), (StackedEngine, {"group": 1}), (StackedEngine, {"group": 2})):
        out = torch.empty_like(anchors)
        engine = make_engine(cls, make_net(), data, mu=MU, batch=batch, **more)
        engine.train(
            1, range(2), start.expand(2, -1), lambda row, model, out=out: out[row].copy_(model), anchors=anchors
        )
        results.append(out)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=1e-10)
