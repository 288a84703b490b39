import dataclasses
import gc
import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jgesr_lightning.aggregators import aggregator_names
from jgesr_lightning.callbacks.checkpoint import Checkpoint
from jgesr_lightning.callbacks.files import ResultFiles
from jgesr_lightning.channel import Downlink
from jgesr_lightning.federation import Federation, NonFiniteError
from jgesr_lightning.measures import summarise
from jgesr_lightning.records import remarks
from jgesr_lightning.reporting.sources import Folder
from jgesr_lightning.runtime import checkpoint
from tests.federations import SIZES, small_federation


class Recorder:
    """Notes the hooks, and what the clients were sent and returned."""

    def __init__(self):
        self.hooks = []
        self.sent = {}

    def on_federation_start(self, plan, state):
        self.hooks.append("start")

    def on_round_start(self, round_number, sent):
        self.hooks.append(f"round {round_number}")
        self.sent[round_number] = sent.clone()

    def on_client_delivered(self, row, client, model):
        self.hooks.append(f"client {client}")

    def on_round_end(self, plan, state, record, watch):
        self.hooks.append(f"end {record.round}")

    def on_federation_end(self, plan, state, status):
        self.hooks.append(status)


def run(federation):
    state = federation.fresh_state()
    return federation.run(state), state


def watched(federation, *, seen):
    """Let what the method is given and makes be noted in `seen`, round by round."""
    whole = federation.plan.aggregator.forward

    def forward(received, *arguments, previous, **keywords):
        out = whole(received, *arguments, previous=previous, **keywords)
        seen.append((out, previous.clone(), federation.plan.collector.trained.clone()))
        return out

    federation.plan.aggregator.forward = forward


def gone_on(folder, **common):
    """Run on from the newest checkpoint in `folder`, to the end."""
    federation = small_federation(**common)
    newest = checkpoint.newest(folder)
    shared = checkpoint.read_shared(newest)
    state = checkpoint.load(newest, shared, federation.plan.sharding, torch.device("cpu"))
    federation.plan.aggregator.load_state(shared["aggregator"])
    assert federation.run(state) == "finished"
    return state


def test_hooks_in_order_and_one_record_a_round():
    recorder = Recorder()
    status, state = run(small_federation([recorder], rounds=2))
    clients = [f"client {k}" for k in range(4)]
    assert recorder.hooks == [
        *["start", "end 0"], *["round 1", *clients, "end 1"], *["round 2", *clients, "end 2"], "finished",
    ]  # fmt: skip
    assert status == "finished"
    assert [record.round for record in state.records] == [0, 1, 2]
    assert recorder.sent[1].unique(dim=0).shape[0] == 1  # everybody starts from the same model


def test_a_callback_that_asks_for_state_dicts_is_given_what_was_collected():
    class Asker:
        def __init__(self):
            self.rows = {}

        def on_client_trained(self, row, client, state_dict):
            self.rows[client] = {name: value.clone() for name, value in state_dict.items()}
            state_dict["weight"].zero_()  # whatever an observer does to its copy

    asker = Asker()
    federation = small_federation([asker], rounds=1)
    run(federation)
    assert list(asker.rows) == [0, 1, 2, 3]
    trained = federation.plan.collector.trained
    assert [tuple(value.shape) for value in asker.rows[2].values()] == [(2, 3), (2,)]
    assert torch.equal(asker.rows[2]["weight"].flatten(), trained[2, :6])
    assert torch.equal(asker.rows[2]["bias"], trained[2, 6:])


def test_fedavg_without_noise_sends_the_weighted_mean_of_what_was_trained():
    federation = small_federation(noise=0.0, rounds=1)
    _, state = run(federation)
    shares = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    expected = (shares[:, None] * federation.plan.collector.trained.double()).sum(0)
    torch.testing.assert_close(state.models.double(), expected.expand(4, -1), rtol=1e-6, atol=1e-7)


def test_two_equal_runs_are_bit_equal_and_the_channel_seed_matters():
    _, first = run(small_federation(noise=0.1))
    _, second = run(small_federation(noise=0.1))
    assert torch.equal(first.models, second.models)
    other = small_federation(noise=0.1)
    other.plan.uplink.seed = 1
    _, third = run(other)
    assert not torch.equal(first.models, third.models)


def test_those_who_sit_out_keep_their_model_and_enter_no_sum():
    recorder = Recorder()
    federation = small_federation([recorder], noise=0.0, rounds=4, participation=0.5)
    _, state = run(federation)
    for number in range(1, 4):
        chosen = federation.plan.participants(number)
        assert len(chosen) == 2
        assert recorder.hooks.count(f"round {number}") == 1
        absent = [k for k in range(4) if k not in chosen]
        assert torch.equal(recorder.sent[number + 1][absent], recorder.sent[number][absent])
        assert recorder.sent[number + 1][chosen].unique(dim=0).shape[0] == 1
        record = state.records[number]
        assert record.metrics["participants"] == 2
        assert [k for k in range(4) if record.clients["participated"][k]] == chosen
        assert len(record.clients["accuracy/received"]) == 4  # all are evaluated
    assert len({tuple(federation.plan.participants(r)) for r in range(1, 40)}) > 1


def test_evaluation_and_graphs_every_so_often_and_at_the_ends():
    _, state = run(small_federation(rounds=5, evaluation_every=2, graph_every=2))
    measured = [record.round for record in state.records if "accuracy/received" in record.metrics]
    assert measured == [0, 2, 4, 5]
    assert list(state.graphs) == [2, 4, 5]
    assert "accuracy/trained" not in state.records[0].metrics


def break_client(federation, broken, rounds=(2,), entry=1):
    """Make one client's training return a NaN in some rounds."""
    collect = federation.plan.collector.on_client_delivered
    seen = {"round": 0}

    def on_round_start(round_number, sent):
        seen["round"] = round_number
        type(federation.plan.collector).on_round_start(federation.plan.collector, round_number, sent)

    def on_client_delivered(row, client, model):
        collect(row, client, model)
        if client == broken and seen["round"] in rounds:
            federation.plan.collector.trained[row, entry] = torch.nan

    federation.plan.collector.on_round_start = on_round_start
    federation.plan.collector.on_client_delivered = on_client_delivered


@pytest.mark.parametrize("method", ["fedavg", "local", "pfedgraph", "cfl"])
def test_a_non_finite_upload_is_left_out_of_its_round_and_named(method):
    federation = small_federation(method=method, rounds=3)
    break_client(federation, 1)
    status, state = run(federation)
    assert status == "finished"
    assert bool(torch.isfinite(state.models).all())
    assert [record.metrics.get("dropped") for record in state.records] == [None, 0, 1, 0]
    assert state.records[2].info["dropped_clients"] == [1]


def test_a_non_finite_upload_stops_the_run_where_asked():
    federation = small_federation(rounds=3, nonfinite="raise")
    break_client(federation, 1)
    state = federation.fresh_state()
    with pytest.raises(NonFiniteError, match="round 2: the upload of client 1"):
        federation.run(state)
    assert state.round == 1


def break_all(federation):
    collector = federation.plan.collector
    collect = collector.on_client_delivered

    def on_client_delivered(row, client, model):
        collect(row, client, model)
        collector.trained[row, 0] = torch.inf

    collector.on_client_delivered = on_client_delivered


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_round_without_a_usable_upload_ends_the_run_unless_it_may_go_on(method):
    federation = small_federation(method=method, rounds=2)
    break_all(federation)
    state = federation.fresh_state()
    with pytest.raises(NonFiniteError, match="round 1: nothing usable arrived: every upload held NaN or infinity"):
        federation.run(state)
    assert (state.round, len(state.records)) == (0, 1)
    federation = small_federation(method=method, rounds=2, nonfinite="drop_all")
    break_all(federation)
    status, state = run(federation)
    assert status == "finished"
    assert torch.equal(state.models, federation.fresh_state().models)  # everybody keeps what was sent last
    assert [(r["kind"], r["rounds"]) for r in remarks(state.records) if r["kind"] != "nothing_shared"] == [
        ("dropped_uploads", [1, 2])
    ]


def test_nothing_usable_is_said_of_uploads_of_which_no_entry_arrived():
    federation = small_federation(method="fedavg", missing_rate=1 - 1e-12, rounds=2)
    with pytest.raises(NonFiniteError, match="no entry of any model arrived"):
        run(federation)


def test_a_method_that_shared_nothing_is_remarked_on_but_for_the_one_that_means_to():
    """pfedgraph with little weight on the shares of data picks each client's own model alone."""
    _, state = run(small_federation(method="pfedgraph", settings={"lam": 1e-6}, rounds=2))
    assert torch.equal(state.graphs[2], torch.eye(4, dtype=torch.float64))
    assert [(r["kind"], r["rounds"]) for r in remarks(state.records)] == [("nothing_shared", [1, 2])]
    for method in ("local", "fedavg"):
        _, state = run(small_federation(method=method, rounds=1))
        assert remarks(state.records) == []


def test_a_non_finite_aggregate_never_reaches_a_client():
    recorder = Recorder()
    federation = small_federation([recorder], rounds=3)
    whole = federation.plan.aggregator.aggregate

    def aggregate(upload):
        out = whole(upload)
        if recorder.hooks.count("client 0") == 2:
            out.models[0, 0] = torch.inf
        return out

    federation.plan.aggregator.aggregate = aggregate
    state = federation.fresh_state()
    with pytest.raises(NonFiniteError, match="round 2: the aggregate of fedavg is not finite; the models of round 1"):
        federation.run(state)
    assert state.round == 1
    assert bool(torch.isfinite(state.models).all())
    assert "round 3" not in recorder.hooks


def test_a_graph_that_is_not_finite_ends_the_run():
    federation = small_federation(rounds=2)
    whole = federation.plan.aggregator.aggregate
    federation.plan.aggregator.aggregate = lambda upload: dataclasses.replace(
        whole(upload), graph=torch.full((4, 4), torch.nan)
    )
    with pytest.raises(NonFiniteError, match="round 1: the graph of fedavg is not finite"):
        run(federation)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("two_step", {"memory": 0.5, "groups": 0.6}), ("cfl", {"warmup_rounds": 0, "eps1_rel": 9.0})],
)
def test_what_a_method_remembers_is_of_the_last_whole_round_where_one_is_refused(method, settings):
    common = {"method": method, "settings": settings}
    federation, shorter = small_federation(rounds=3, **common), small_federation(rounds=1, **common)
    whole, calls = federation.plan.aggregator.aggregate, []

    def aggregate(upload):
        out = whole(upload)
        calls.append(out.models.mul_(torch.nan if calls else 1))
        return out

    federation.plan.aggregator.aggregate = aggregate
    with pytest.raises(NonFiniteError, match="round 2: the aggregate"):
        run(federation)
    run(shorter)
    torch.testing.assert_close(federation.plan.aggregator.state(), shorter.plan.aggregator.state(), rtol=0, atol=0)


def test_a_state_that_a_method_changes_in_place_is_that_of_the_last_whole_round():
    federation = small_federation(rounds=3)
    method, whole, counted = federation.plan.aggregator, federation.plan.aggregator.aggregate, torch.zeros(1)
    with_history = torch.ones(1, requires_grad=True) * 2  # which deepcopy refuses

    def aggregate(upload):
        counted.add_(1)
        return dataclasses.replace(whole(upload), models=whole(upload).models * (torch.nan if counted > 1 else 1))

    method.aggregate, method.state = aggregate, lambda: {"counted": counted, "more": [with_history, (1, None)]}
    method.load_state = lambda state: counted.copy_(state["counted"])
    with pytest.raises(NonFiniteError, match="round 2: the aggregate"):
        run(federation)
    assert counted == 1


def test_a_stop_abandons_the_round_between_clients_and_keeps_the_last_whole_one():
    recorder = Recorder()
    federation = small_federation([recorder], rounds=5)
    whole = small_federation(rounds=1)
    _, after_one = run(whole)

    def stop_in_round_two(row, client, model):
        if recorder.hooks[-2:-1] == ["round 2"]:
            federation.plan.stop.received = "SIGTERM"

    class Stopper:
        on_client_delivered = staticmethod(stop_in_round_two)

    federation.plan.fabric._callbacks.append(Stopper())
    status, state = run(federation)
    assert status == "stopped"
    assert recorder.hooks[-3:] == ["round 2", "client 0", "stopped"]
    assert state.round == 1
    assert torch.equal(state.models, after_one.models)


RESUMED = [
    ("fedavg", {}),
    ("cfl", {"warmup_rounds": 0}),
    ("fedamp", {}),
    ("local", {"own": "clean"}),
    ("jgesr", {"own": "clean", "memory": 0.6, "noise_correction": "known"}),
    ("two_step", {"own": "clean", "memory": 0.6, "distances": "updates", "graph_scope": "layer"}),
    ("graph_filter", {"own": "clean", "memory": 0.6, "distances": "directions", "layer_weights": "snr"}),
    ("jgesr", {"own": "clean", "groups": 0.6, "mu": 0.001, "fidelity": "uniform"}),
]


@pytest.mark.parametrize(("method", "settings"), RESUMED)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, method, settings):
    common = {"method": method, "settings": settings, "noise": 0.05, "missing_rate": 0.2, "participation": 0.75}
    _, straight = run(small_federation(rounds=6, **common))
    first = small_federation([Checkpoint(tmp_path, 1, {}, keep_trained=False)], rounds=3, **common)
    run(first)
    state = gone_on(tmp_path, rounds=6, **common)
    assert torch.equal(state.models, straight.models)
    for resumed, whole in zip(state.records, straight.records, strict=True):
        assert repr(resumed.clients) == repr(whole.clients)  # as text, since NaN equals nothing


@pytest.mark.parametrize(("rounds", "killed"), [(5, True), (3, False)], ids=["killed at once", "nothing left to do"])
def test_a_run_that_goes_on_from_another_one_s_checkpoint_has_one_of_its_own(tmp_path, rounds, killed):
    settings = {"method": "fedamp", "settings": {"start": "cloud"}}
    _, first = run(small_federation([Checkpoint(tmp_path / "a", 1, {})], rounds=3, **settings))
    source = checkpoint.find(tmp_path / "a")
    parts = [Checkpoint(tmp_path / "b" / "checkpoint", 1, {}), ResultFiles(tmp_path / "b", {})]
    (tmp_path / "b").mkdir()
    second = small_federation(parts, rounds=rounds, **settings)
    state = checkpoint.load(source.folder, source.shared, second.plan.sharding, torch.device("cpu"))
    if killed:
        second.plan.fabric._callbacks.append(SimpleNamespace(on_round_start=lambda **_: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            second.run(state)
    else:
        assert second.run(state) == "finished"
    found = checkpoint.find(tmp_path / "b" / "checkpoint")
    for kind in ("models", "trained"):
        assert torch.equal(checkpoint.rows(found)[kind], checkpoint.rows(source)[kind])
    assert torch.equal(checkpoint.rows(found)["models"], first.models)
    assert Folder(tmp_path / "b").last_graph()[0] == 3


def test_memory_and_handles_stay_flat_over_many_rounds(tmp_path):
    federation = small_federation([ResultFiles(tmp_path, {}), Checkpoint(tmp_path / "checkpoint", 1, {})], rounds=20)
    run(federation)  # whatever is made once is made now

    def count():
        gc.collect()
        tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        return tensors, len(os.listdir("/proc/self/fd"))

    counts = []

    class Counter:
        def on_round_end(self, plan, state, record, watch):
            if record.round in (20, 200):
                counts.append(count())

    federation = small_federation(
        [Counter(), ResultFiles(tmp_path, {}), Checkpoint(tmp_path / "checkpoint", 10, {})],
        rounds=200,
        evaluation_every=10,
        graph_every=200,
    )
    run(federation)
    (tensors, handles), (tensors_later, handles_later) = counts
    assert handles_later <= handles
    assert tensors_later - tensors < 10
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 202


def test_summaries_of_client_values():
    values = torch.tensor([0.5, 1.0, 0.0, 0.9] * 5)
    weights = torch.tensor([1.0, 3.0, 0.0, 0.0] * 5)
    summary = summarise("accuracy/received", values, weights)
    assert summary["accuracy/received"] == pytest.approx(0.6)
    assert summary["accuracy/received_weighted"] == pytest.approx(0.875)
    assert summary["accuracy/received_worst"] == 0.0
    assert summary["accuracy/received_worst_decile"] == 0.0  # two of twenty clients, both at zero
    assert summary["accuracy/received_std"] == pytest.approx(0.3937, abs=1e-4)


@pytest.mark.parametrize("method", ["local", "jgesr"])
def test_noise_makes_no_variance_negative(method):
    """Running statistics travel through the channel like parameters; what comes back can be evaluated."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    federation = small_federation(method=method, noise=4.0, missing_rate=0.2, net=net)
    variances = federation.plan.layout.variances
    computed, sent = [], []
    method_s_own = federation.plan.aggregator.forward

    def keep(*arguments, previous, **keywords):
        out = method_s_own(*arguments, previous=previous, **keywords)
        computed.append(out.models.clone())
        sent.append(previous.clone())
        return out

    federation.plan.aggregator.forward = keep
    state = federation.fresh_state()
    federation.run(state)
    assert variances.sum() == 4
    assert min(float(models[:, variances].min()) for models in computed) < 0, "this channel does no harm"
    for models, next_sent in zip(computed, [*sent[1:], state.models], strict=True):
        assert torch.equal(next_sent[:, variances], models[:, variances].clamp(min=0))
        assert torch.equal(next_sent[:, ~variances], models[:, ~variances])
    assert all(record.metrics["loss/received"] < 1e6 for record in state.records)


def test_noise_makes_no_variance_negative_where_clients_put_in_their_own():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    settings = {"own": "clean", "beta": 1e4}  # to take much from others
    federation = small_federation(method="two_step", settings=settings, noise=4.0, net=net, rounds=1)
    variances, whole, least = federation.plan.layout.variances, federation.plan.aggregator.forward, []

    def watched(*arguments, **keywords):
        out = whole(*arguments, **keywords)
        least.append(float(out.own.rest[:, variances].min()))
        return out

    federation.plan.aggregator.forward = watched
    _, state = run(federation)
    assert least[0] < 0, "this channel does no harm"
    assert float(state.models[:, variances].min()) >= 0


def test_training_from_the_clients_own_models():
    """FedAMP's `start`: round 2 goes on from what round 1 trained, pulled to what was sent; or from what was sent."""
    trained, sent = {}, {}
    for start in ("own", "cloud"):
        federation = small_federation(method="fedamp", settings={"start": start, "lam": 2.0}, noise=0.0, rounds=2)
        engine, calls = federation.plan.engine, []
        train = engine.train

        def watched(number, rows, begin, deliver, stopping, anchors=None, calls=calls, train=train):
            calls.append((begin.clone(), None if anchors is None else anchors.clone()))
            return train(number, rows, begin, deliver, stopping, anchors)

        engine.train = watched
        state = federation.fresh_state()
        federation.run(state)
        (first, no_anchor), (second, anchors) = calls
        assert torch.equal(first, federation.plan.initial.expand_as(first)) and no_anchor is None
        trained[start], sent[start] = second, anchors
    assert sent["cloud"] is None and not torch.equal(trained["own"], trained["cloud"])
    torch.testing.assert_close(sent["own"], trained["cloud"])  # one round in, both servers have sent the same


def test_those_who_sit_out_keep_what_they_trained_last_where_training_starts_from_that():
    federation = small_federation(method="fedamp", noise=0.5, rounds=4, participation=0.5)
    state, last = federation.fresh_state(), federation.plan.initial.expand(4, -1).clone()
    collector, train = federation.plan.collector, federation.plan.engine.train

    def watched(number, rows, begin, *rest):
        assert torch.equal(begin, last)
        losses = train(number, rows, begin, *rest)
        absent = [k for k in range(4) if k not in federation.plan.participants(number)]
        assert len(absent) == 2 and torch.equal(collector.trained[absent], last[absent])
        last.copy_(collector.trained)
        return losses

    federation.plan.engine.train = watched
    federation.run(state)
    assert len(state.records) == 5 and torch.equal(state.own, last)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("missing_rate", [0.0, 0.3])
def test_clients_that_keep_their_own_clean_models_see_nothing_of_the_channel(participation, missing_rate):
    common = {"method": "local", "rounds": 4, "participation": participation}
    _, clean = run(small_federation(noise=0.0, **common))
    _, own = run(small_federation(noise=3.0, missing_rate=missing_rate, settings={"own": "clean"}, **common))
    assert torch.equal(own.models, clean.models)
    assert not torch.equal(own.believed, clean.models)


@pytest.mark.parametrize("settings", [{}, {"graph_scope": "layer"}])
def test_a_client_puts_its_own_model_into_what_it_is_sent(settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)) if settings else None
    common = {"noise": 0.5, "missing_rate": 0.2, "rounds": 3, "participation": 0.75, "net": net}
    federation = small_federation(method="two_step", settings={"own": "clean", **settings}, **common)
    calls, recorder = [], Recorder()
    watched(federation, seen=calls)
    federation.plan.fabric._callbacks.append(recorder)
    _, state = run(federation)
    held = [*(recorder.sent[number] for number in (2, 3)), state.models]
    for number, (out, _, trained) in enumerate(calls, start=1):
        before = recorder.sent[number]
        chosen = federation.plan.participants(number)
        assert len(out.own.weights) == (2 if settings else 1)
        for k in range(4):
            for column in range(trained.shape[1]):
                layer = 0 if column < 8 else 1
                weight = float(out.own.weights[layer, k])
                expected = weight * float(trained[k, column]) + (1 - weight) * float(out.own.rest[k, column])
                expected = expected if k in chosen else float(before[k, column])
                assert float(held[number - 1][k, column]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for (out, _, _), (_, previous, _) in itertools.pairwise(calls):
        assert torch.equal(previous, out.models)  # the server goes on from what it knows


def test_a_client_whose_training_broke_keeps_what_it_had_where_clients_put_in_their_own():
    federation = small_federation(method="local", settings={"own": "clean"}, rounds=2)
    recorder = Recorder()
    federation.plan.fabric._callbacks.append(recorder)
    break_client(federation, 1)
    status, state = run(federation)
    assert status == "finished" and bool(torch.isfinite(state.models).all())
    assert torch.equal(state.models[1], recorder.sent[2][1])


def test_what_a_client_puts_in_counts_as_broken_also_where_it_was_lost():
    """All entries that are no numbers are lost: what arrives is finite, what the client would put in is not."""
    federation = small_federation(method="local", settings={"own": "clean"}, missing_rate=0.5, rounds=1)
    recorder = Recorder()
    federation.plan.fabric._callbacks.append(recorder)
    uplink = federation.plan.uplink
    width = federation.plan.collector.trained.shape[1]
    lost = next(j for j in range(width) if not bool(uplink(torch.zeros(4, width), 1)[1][1, j]))
    break_client(federation, 1, (1,), lost)
    status, state = run(federation)
    assert status == "finished" and bool(torch.isfinite(state.models).all())
    assert state.records[-1].info["dropped_clients"] == [1]


def test_a_client_whose_training_broke_starts_from_what_was_sent():
    federation = small_federation(method="fedamp", rounds=2)
    state = federation.fresh_state()
    own = state.models.clone() + 1
    own[1, 0] = float("nan")
    state.own = own
    start, anchors = federation._ends(state)
    assert torch.equal(start[1], state.models[1]) and torch.equal(start[0], own[0])
    assert torch.equal(anchors, state.models)


@pytest.mark.parametrize(("method", "settings"), [("fedavg", {}), ("cfl", {}), ("fedamp", {}), ("jgesr", {})])
def test_what_comes_down_is_noisy_and_lost_entries_stay(method, settings):
    """Entry by entry: what arrives, what stays as trained, and who took no part; the server knows what it sent."""
    down, seen, recorder = Downlink(0.3, 0.4, seed=5), [], Recorder()
    federation = small_federation(
        [recorder], method=method, settings=settings, rounds=4, participation=0.75, downlink=down
    )
    watched(federation, seen=seen)
    _, state = run(federation)
    alike, after = 0, federation.plan.initial.expand(4, -1)
    for number, (out, _, trained) in enumerate(seen, start=1):
        chosen, before = federation.plan.participants(number), after
        arrived, mask = down._channel(out.models, number, range(4))
        after = torch.empty_like(before)
        for k, column in itertools.product(range(4), range(out.models.shape[1])):
            source = before if k not in chosen else arrived if mask[k, column] else trained
            after[k, column] = source[k, column]
            alike += int(source is trained)
        if federation.plan.aggregator.start != "own":
            held = recorder.sent[number + 1] if number < 4 else state.models
            assert torch.equal(held, after)
    assert torch.equal(state.models, after) and alike > 10
    for (out, _, _), (_, previous, _) in itertools.pairwise(seen):
        assert torch.equal(previous, out.models)


def test_training_alone_needs_no_way_back():
    common = {"method": "local", "settings": {"own": "clean"}, "rounds": 3}
    _, without = run(small_federation(**common))
    _, over = run(small_federation(downlink=Downlink(2.0, 0.5), **common))
    assert torch.equal(over.models, without.models)


def test_the_way_back_makes_no_variance_negative():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    federation = small_federation(noise=0, net=net, rounds=1, downlink=Downlink(40.0))
    _, state = run(federation)
    assert float(state.models[:, federation.plan.layout.variances].min()) == 0, "this way back does no harm"
    assert float(state.models.min()) < -1


def test_a_broken_entry_that_was_lost_on_both_ways_is_not_kept():
    federation = small_federation(missing_rate=0.5, rounds=1, downlink=Downlink(0, 0.99))
    _, arrived = federation.plan.uplink(federation.plan.initial.expand(4, -1), 1)
    broken = int((~arrived[:, 1]).nonzero()[0])
    break_client(federation, broken, rounds=(1,))
    _, state = run(federation)
    assert state.records[1].clients["participated"][broken]
    assert torch.equal(state.models[broken, 1], federation.plan.initial[1])


@pytest.mark.parametrize("method", ["fedavg", "cfl", "fedamp"])
def test_a_resumed_run_over_an_imperfect_way_back_ends_with_the_same_bits(tmp_path, method):
    common = {"method": method, "missing_rate": 0.2, "participation": 0.75, "downlink": Downlink(0.1, 0.3)}
    _, straight = run(small_federation(rounds=6, **common))
    run(small_federation([Checkpoint(tmp_path, 1, {}, keep_trained=method == "fedamp")], rounds=3, **common))
    state = gone_on(tmp_path, rounds=6, **common)
    assert torch.equal(state.models, straight.models) and torch.equal(state.believed, straight.believed)


@pytest.mark.parametrize("method", aggregator_names())
def test_no_method_of_the_package_changes_what_no_checkpoint_has(method, caplog):
    assert run(small_federation(method=method, rounds=2, missing_rate=0.2))[0] == "finished"
    assert "has no state()" not in caplog.text


@pytest.mark.parametrize("first", [True, False])
def test_a_method_that_remembers_without_a_state_is_told_of_by_the_first_process(first, caplog, monkeypatch):
    plan = small_federation(rounds=3).plan
    kind = type(plan.aggregator)

    def aggregate(self, upload):
        self.former = upload.received.mean(0)
        return whole(self, upload)

    whole = kind.aggregate
    monkeypatch.setattr(kind, "aggregate", aggregate)
    monkeypatch.setattr(type(plan.fabric), "is_global_zero", first)
    assert run(Federation(plan))[0] == "finished"
    assert caplog.text.count("changes self.former from round to round but has no state()") == int(first)
