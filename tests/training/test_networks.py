"""Networks beyond the package's own under the sequential engine: normalisation, buffers, frozen and shared weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from jgesr_lightning.client import ClientModule
from jgesr_lightning.training.batches import split, visit_orders
from jgesr_lightning.training.network import check_stacked
from jgesr_lightning.training.sequential import SequentialEngine
from tests.training.test_engines import BATCH, CLASSES, EPOCHS, make_data, make_engine, row_of, run_rounds

LR = 0.1


def flat(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 6), *layers, nn.ReLU(), nn.Linear(6, CLASSES)).double()


def state_row(engine, net):
    return engine.client.layout.flatten(net.state_dict())


def by_hand(net, data, client=0, join=False, seed=7):
    """Return the network after round 1 of plain SGD; `join` a last batch of one sample to the one before."""
    net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for order in visit_orders(data.size, EPOCHS, BATCH, seed, 1, client):
        cuts = list(range(0, data.size, BATCH))
        if join and data.size - cuts[-1] == 1:
            cuts.pop()
        for start, stop in zip(cuts, [*cuts[1:], data.size], strict=True):
            index = order[start:stop]
            optimizer.zero_grad()
            cross_entropy(net(data.train_inputs[index]), data.train_labels[index]).backward()
            optimizer.step()
    return net


def test_a_slice_of_one_joins_the_one_before():
    assert [len(part) for part in split(torch.arange(17), 8, 2)] == [8, 9]
    assert [len(part) for part in split(torch.arange(17), 8)] == [8, 8, 1]
    assert [len(part) for part in split(torch.arange(1), 8, 2)] == [1]
    assert torch.cat(split(torch.arange(17), 8, 2)).tolist() == list(range(17))


@pytest.mark.parametrize(
    ("layer", "join"),
    [(nn.BatchNorm1d(6), True), (nn.GroupNorm(2, 6), False), (nn.LayerNorm(6), False)],
    ids=["batch", "group", "layer"],
)
def test_normalised_networks_train_as_by_hand(layer, join):
    data, net = make_data((17, 24)), flat(layer)
    engine = make_engine(SequentialEngine, copy.deepcopy(net), data)
    models, _ = run_rounds(engine, state_row(engine, net), rounds=1)
    for k, own in enumerate(data):
        torch.testing.assert_close(models[k], state_row(engine, by_hand(net, own, k, join)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [BATCH, "full"])
def test_a_last_batch_of_one_sample_is_no_error(batch):
    net = flat(nn.BatchNorm1d(6))
    engine = make_engine(SequentialEngine, net, make_data((65, 9)), batch=batch)
    models, losses = run_rounds(engine, state_row(engine, net))
    assert models.isfinite().all() and losses.isfinite().all()


def test_a_client_of_one_sample_is_named():
    with pytest.raises(ValueError, match="client 5 has fewer than 2 training samples; the batch normalisation '2'"):
        make_engine(SequentialEngine, flat(nn.BatchNorm1d(6)), make_data((9, 1)), clients=[3, 5])


def test_counters_begin_anew_at_each_visit():
    """Cumulative statistics weigh by the counter: those of one client must not depend on who came before."""
    net, data = flat(nn.BatchNorm1d(6, momentum=None)), make_data((16, 24, 16))
    results = []
    for rows in ([0, 1, 2], [2, 1, 0], [2]):
        engine = make_engine(SequentialEngine, copy.deepcopy(net), data)
        models, _ = run_rounds(engine, state_row(engine, net), rounds=2, rows=rows)
        results.append(models)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0][2], results[2][2])
    statistics = engine.client.layout.restore(results[0])
    expected = by_hand(net, data[1], 1, join=True)
    first, _ = run_rounds(make_engine(SequentialEngine, copy.deepcopy(net), data), state_row(engine, net), rounds=1)
    torch.testing.assert_close(engine.client.layout.restore(first)["2.running_mean"][1], expected[2].running_mean)
    assert statistics["2.running_var"].min() >= 0


class Centred(nn.Module):
    """Takes off a running mean that training moves and no state dict holds, beside a mask as long as the last batch."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(144, CLASSES)
        self.register_buffer("mean", torch.zeros(144), persistent=False)
        self.register_buffer("mask", torch.zeros(0), persistent=False)

    def forward(self, x):
        x = x.flatten(1)
        self.mask = x.new_ones(len(x), 1)
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return self.last((x - self.mean) * self.mask)


def test_buffers_that_no_state_dict_holds_begin_anew_at_each_visit():
    net, data = Centred().double(), make_data((16, 24))
    start, results = row_of(net), []
    for rows in ([1], [0, 1]):
        engine = make_engine(SequentialEngine, copy.deepcopy(net), data)
        results.append(run_rounds(engine, start, rounds=2, rows=rows)[0])
    assert len(start) == 144 * CLASSES + CLASSES
    assert torch.equal(results[0][1], results[1][1])


def test_evaluation_leaves_no_trace():
    net, data = flat(nn.BatchNorm1d(6)), make_data((16, 24))
    engine = make_engine(SequentialEngine, net, data)
    start = state_row(engine, net).clone()
    trained, _ = run_rounds(engine, start, rounds=1)
    first = engine.evaluate(trained)
    again, _ = run_rounds(engine, start, rounds=1)
    assert torch.equal(trained, again)
    assert all(torch.equal(a, b) for a, b in zip(first, engine.evaluate(trained), strict=True))


def test_frozen_weights_stay_and_are_not_pulled():
    net, data = flat(), make_data((16,))
    net[1].weight.requires_grad_(False)
    before = net[1].weight.clone()
    engine = make_engine(SequentialEngine, net, data, mu=0.5)
    row = state_row(engine, net).clone()
    assert len(row) == sum(p.numel() for p in net.parameters() if p.requires_grad)
    models, _ = run_rounds(engine, row)
    assert torch.equal(net[1].weight, before) and not torch.equal(models[0], row)
    assert engine.client.sent.shape == row.shape


def test_shared_weights_are_one_and_train_together():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(144, 144)
            self.second = nn.Linear(144, 144, bias=False)
            self.second.weight = self.first.weight
            self.last = nn.Linear(144, CLASSES)

        def forward(self, x):
            return self.last(self.second(torch.tanh(self.first(x.flatten(1)))))

    torch.manual_seed(0)
    net = Twice().double()
    engine = make_engine(SequentialEngine, copy.deepcopy(net), make_data((16, 12)))
    row = state_row(engine, net)
    assert len(row) == 144 * 144 + 144 + 144 * CLASSES + CLASSES
    models, _ = run_rounds(engine, row, rounds=1)
    torch.testing.assert_close(
        models[1], state_row(engine, by_hand(net, make_data((16, 12))[1], 1)), rtol=0, atol=1e-12
    )
    engine.client.receive(models[0])
    assert engine.client.net.second.weight is engine.client.net.first.weight


def test_a_copied_client_keeps_its_own_counters():
    client = ClientModule(flat(nn.BatchNorm1d(6)))
    twin = copy.deepcopy(client)
    twin.net.train()(torch.randn(4, 144, dtype=torch.float64))
    assert twin.net[2].num_batches_tracked == 1 and client.net[2].num_batches_tracked == 0
    twin.receive(client.layout.flatten(client.net.state_dict()))
    assert twin.net[2].num_batches_tracked == 0


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(12, 5, batch_first=True)
        self.last = nn.Linear(5, CLASSES)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.cells(x.squeeze(1))[0][:, -1])


@pytest.mark.parametrize(
    "make",
    [
        Recurrent,
        lambda: nn.Sequential(nn.Unflatten(2, (2, 6)), nn.Conv3d(1, 2, 2), nn.Flatten(), nn.LazyLinear(CLASSES)),
        lambda: nn.Sequential(
            nn.Flatten(2), nn.Conv1d(1, 2, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES)
        ),
    ],
    ids=["recurrent, with an unused layer", "in three dimensions", "in one dimension"],
)
def test_networks_of_other_kinds_train_as_by_hand(make):
    data = make_data((17, 24))
    torch.manual_seed(0)
    net = make().double()
    net(data[0].train_inputs)
    engine = make_engine(SequentialEngine, copy.deepcopy(net), data)
    models, _ = run_rounds(engine, state_row(engine, net), rounds=1)
    for k, own in enumerate(data):
        torch.testing.assert_close(models[k], state_row(engine, by_hand(net, own, k)), rtol=0, atol=1e-12)


def test_a_network_of_nan_is_no_network_of_another_kind():
    net = flat()
    check_stacked(net, (1, 12, 12))
    net[1].weight.data.fill_(torch.nan)
    check_stacked(net, (1, 12, 12))
    net[1].weight.data.fill_(0.0)
    net.register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(ValueError, match="by hooks"):
        check_stacked(net, (1, 12, 12))
