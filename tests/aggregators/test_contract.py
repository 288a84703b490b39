"""What every registered method keeps, whatever it computes."""

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.aggregators import Aggregate, Aggregator, aggregator_class, aggregator_names, build_aggregator
from jgesr_lightning.aggregators.base import Own, kept
from jgesr_lightning.config import ConfigError, load_config
from jgesr_lightning.names import BUILTIN
from tests.aggregators.sharding import run_sharded

NAMES = aggregator_names()
SETTINGS = {"cfl": {"warmup_rounds": 0, "eps1_rel": 0.9}}  # so that it splits in these tests
NEEDS_NO_SQUARES = ("local", "fedavg", "fedprox", "median")  # the others refuse models whose squares overflow
K, D = 5, 37


def build(name):
    return build_aggregator(name, **SETTINGS.get(name, {}))


def round_of(clients=K, size=D, dtype=torch.float64, missing=0.0, seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    initial = normal(size)
    previous = initial + 0.1 * normal(clients, size)
    received = previous + spread * normal(clients, size)
    mask = torch.rand(clients, size, generator=generator) >= missing if missing else None
    weights = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.2
    return {
        "received": received.to(dtype),
        "weights": weights,
        "mask": mask,
        "previous": previous.to(dtype),
        "initial": initial.to(dtype),
    }


def assert_same(out, expected, tolerance=1e-9):
    torch.testing.assert_close(out.models, expected.models, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.graph, expected.graph, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_shapes_types_memory_and_untouched_inputs(name, dtype, missing):
    given_round = round_of(dtype=dtype, missing=missing)
    before = {key: None if value is None else value.clone() for key, value in given_round.items()}
    out = build(name)(**given_round)
    assert out.models.shape == (K, D) and out.models.dtype == dtype
    assert out.graph.shape == (K, K) and out.graph.dtype == torch.float64 and out.graph.device.type == "cpu"
    assert torch.isfinite(out.models).all() and torch.isfinite(out.graph).all()
    assert not out.models.requires_grad and out.models.is_contiguous()
    out.models.fill_(-7)  # own memory: neither the inputs nor one row through another
    for key, value in given_round.items():
        if value is not None:
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_their_own_memory(name):
    out = build(name)(**round_of())
    expected = out.models[1:].clone()
    out.models[0] = 1e9
    assert torch.equal(out.models[1:], expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_graph_is_a_mixing_or_an_adjacency_matrix(name, missing):
    graph = build(name)(**round_of(missing=missing)).graph
    assert (graph >= 0).all()
    if aggregator_class(name).mixing:
        torch.testing.assert_close(graph.sum(1), torch.ones(K, dtype=torch.float64))
    else:
        assert torch.equal(graph, graph.T) and (graph.diagonal() == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_info_is_plain(name):
    def plain(value):
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    info = build(name)(**round_of()).info
    assert all(plain(value) for value in info.values()), info
    assert info["participants"] == K and info["seconds"] >= 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_permuting_the_clients_permutes_the_result(name, missing):
    plain = round_of(missing=missing)
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled = {key: value if value is None or key == "initial" else value[order] for key, value in plain.items()}
    out, expected = build(name)(**shuffled), build(name)(**plain)
    torch.testing.assert_close(out.models, expected.models[order], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.graph, expected.graph[order][:, order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_scale_of_the_weights_does_not_matter(name, missing):
    plain = round_of(missing=missing)
    assert_same(build(name)(**{**plain, "weights": 600 * plain["weights"]}), build(name)(**plain))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_absent_clients_keep_their_model_and_change_nobody(name, missing):
    whole = round_of(missing=missing)
    present = torch.tensor([True, False, True, True, False])
    some = {key: value if value is None or key == "initial" else value[present] for key, value in whole.items()}
    stale = whole["received"].clone()
    stale[~present] = 1e6
    expected = build(name)(**some)
    for value in (1e6, math.nan, math.inf):
        stale[~present] = value
        out = build(name)(**{**whole, "received": stale}, present=present)
        torch.testing.assert_close(out.models[present], expected.models)
        torch.testing.assert_close(out.graph[present][:, present], expected.graph)
        assert torch.equal(out.models[~present], whole["previous"][~present])
        assert (out.graph[~present][:, present] == 0).all() and (out.graph[present][:, ~present] == 0).all()
        assert out.info["participants"] == 3


@pytest.mark.parametrize("name", NAMES)
def test_client_with_nothing_delivered_counts_as_absent(name):
    whole = round_of(missing=0.3)
    whole["mask"][2] = False
    present = torch.tensor([True, True, False, True, True])
    assert_same(build(name)(**whole), build(name)(**whole, present=present))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_hardly_anyone_takes_part(name, count):
    whole = round_of()
    present = torch.arange(K) < count
    out = build(name)(**whole, present=present)
    assert torch.equal(out.models[count:], whole["previous"][count:])
    assert torch.isfinite(out.models).all() and torch.isfinite(out.graph).all()
    if count == 1:
        torch.testing.assert_close(out.models[0], whole["received"][0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clients", [1, 2])
def test_one_and_two_clients_work_or_are_refused_by_name(name, clients):
    few = round_of(clients=clients)
    if clients < aggregator_class(name).min_clients:
        with pytest.raises(ValueError, match=f"{name} needs at least"):
            build(name)(**few)
        return
    out = build(name)(**few)
    assert torch.isfinite(out.models).all()
    if clients == 1:
        torch.testing.assert_close(out.models, few["received"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_previous", [True, False])
def test_what_did_not_arrive_is_never_read(name, with_previous):
    holes = round_of(missing=0.3)
    if not with_previous:
        if "previous" in aggregator_class(name).needs:
            with pytest.raises(ValueError, match="needs `previous`"):
                build(name)(**{**holes, "previous": None})
            return
        holes["previous"] = None
    expected = build(name)(**holes)
    for value in (math.nan, math.inf, 1e6):
        filled = torch.where(holes["mask"], holes["received"], value)
        assert_same(build(name)(**{**holes, "received": filled}), expected, tolerance=0)


@pytest.mark.parametrize("name", NAMES)
def test_coordinate_that_nobody_delivered_keeps_its_previous_value(name):
    holes = round_of(missing=0.2)
    holes["mask"][:, 4] = False
    holes["previous"][:, 4] = holes["initial"][4]  # the same for all, so that smoothing has nothing to move
    out = build(name)(**holes)
    torch.testing.assert_close(out.models[:, 4], holes["previous"][:, 4])


@pytest.mark.parametrize("name", NAMES)
def test_full_mask_is_no_mask(name):
    plain = round_of()
    masked = build(name)(**{**plain, "mask": torch.ones(K, D, dtype=torch.bool)})
    assert_same(masked, build(name)(**plain), tolerance=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_identical_models_stay_what_they_are(name):
    same = round_of()
    same["received"] = same["received"][:1].repeat(K, 1)
    same["previous"] = same["previous"][:1].repeat(K, 1)
    out = build(name)(**same)
    torch.testing.assert_close(out.models, same["received"])
    assert torch.isfinite(out.graph).all()


@pytest.mark.parametrize("name", NAMES)
def test_nobody_moved(name):
    still = round_of()
    still["received"] = still["previous"] = still["initial"].repeat(K, 1)
    out = build(name)(**still)
    torch.testing.assert_close(out.models, still["received"])
    zero = {key: value if key in ("weights", "mask") else torch.zeros_like(value) for key, value in still.items()}
    assert (build(name)(**zero).models == 0).all()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e30),
        (torch.float32, 1e-30),
        (torch.float64, 1e150),
        (torch.float64, 1e160),
        (torch.float64, 1e-170),
    ],
)
def test_huge_and_tiny_models_give_no_nan(name, missing, dtype, size):
    extreme = round_of(dtype=torch.float64, missing=missing)
    for key in ("received", "previous", "initial"):
        extreme[key] = (extreme[key] * size).to(dtype)
    if size == 1e160 and name not in NEEDS_NO_SQUARES:
        with pytest.raises(ValueError, match=r"received holds values .* squares"):
            build(name)(**extreme)
        return
    out = build(name)(**extreme)
    assert torch.isfinite(out.models).all() and torch.isfinite(out.graph).all()


@pytest.mark.timeout(120)  # an extreme round must not keep the server busy either
@pytest.mark.parametrize("name", NAMES)
def test_one_client_far_away_gives_no_nan(name):
    far = round_of(dtype=torch.float32)
    far["received"][0] *= 1e25
    out = build(name)(**far)
    assert torch.isfinite(out.models).all() and torch.isfinite(out.graph).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), clients=st.integers(2, 6), size=st.integers(1, 9), missing=st.sampled_from([0, 0.5]))
def test_results_stay_within_what_arrived_and_was_sent(name, seed, clients, size, missing):
    some = round_of(clients=clients, size=size, missing=missing, seed=seed)
    out = build(name)(**some)
    values = torch.cat([some["received"], some["previous"]])
    slack = 1e-9
    assert (out.models >= values.amin(0) - slack).all() and (out.models <= values.amax(0) + slack).all()


@pytest.mark.parametrize("name", NAMES)
def test_non_contiguous_inputs(name):
    plain = round_of(missing=0.3)
    strided = {
        key: value.T.contiguous().T if value is not None and value.ndim == 2 else value for key, value in plain.items()
    }
    assert not strided["received"].is_contiguous()
    assert_same(build(name)(**strided), build(name)(**plain))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("some_absent", [False, True])
def test_columns_shared_out_over_processes(name, missing, some_absent):
    whole = round_of(missing=missing)
    whole["present"] = torch.tensor([True, True, False, True, True]) if some_absent else None
    expected = build(name)(**whole)
    for bounds in (None, (0, 1, 20, D)):
        assert_same(run_sharded(lambda: build(name), **whole, bounds=bounds), expected, tolerance=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_plain_and_restores_the_method(name):
    first = build(name)
    for seed in range(3):
        first(**round_of(seed=seed))
    torch.save(first.state(), buffer := io.BytesIO())
    buffer.seek(0)
    second = build(name)
    second.load_state(torch.load(buffer, weights_only=True))
    assert second.state() == first.state()
    last = round_of(seed=9)
    assert_same(second(**last), first(**last), tolerance=0)


@pytest.mark.parametrize("name", NAMES)
def test_client_terms_are_scalars_with_finite_gradients(name):
    sent = torch.randn(D)
    for proximal_mu in (None, 0, 0.5):
        for term in build(name).client_terms(proximal_mu):
            x = (sent + torch.randn(D)).requires_grad_()
            term(x, sent).backward()
            assert term(x, sent).shape == () and torch.isfinite(x.grad).all()
            assert term(torch.randn(3, D), torch.randn(3, D)).shape == (3,)
            assert repr(term)
    with_pull = {repr(term) for term in build(name).client_terms(0.5)}
    assert "Proximal(mu=0.5)" in with_pull


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"received": torch.zeros(K)}, "received must be"),
        ({"received": torch.zeros(K, D, dtype=torch.int64)}, "received must be"),
        ({"weights": torch.ones(K + 1)}, "weights must have shape"),
        ({"weights": torch.zeros(K)}, "weights must be positive"),
        ({"weights": torch.full((K,), math.nan)}, "weights must be positive"),
        ({"mask": torch.ones(K, D)}, "mask must be of type bool"),
        ({"mask": torch.ones(K, D + 1, dtype=torch.bool)}, "mask must have shape"),
        ({"previous": torch.zeros(K, D + 1)}, "previous must have shape"),
        ({"initial": torch.zeros(D + 1)}, "initial must have shape"),
        ({"noise_std": torch.tensor(0.1)}, "noise_std must have shape"),
        ({"noise_std": torch.ones(K + 1)}, "noise_std must have shape"),
        ({"noise_std": torch.full((K,), math.nan)}, "noise_std must be finite"),
        ({"noise_std": torch.arange(K) - 1.0}, "noise_std must be finite and at least 0"),
        ({"layers": (D, 1)}, "layers must sum"),
        ({"present": torch.ones(K + 1, dtype=torch.bool)}, "present must have shape"),
        ({"present": torch.arange(K) > 0, "previous": None}, "previous"),
    ],
)
def test_wrong_input_is_refused_by_name(name, change, message):
    with pytest.raises(ValueError, match=message):
        build(name)(**{**round_of(), **change})


@pytest.mark.parametrize("name", [name for name in NAMES if aggregator_class(name).needs])
def test_missing_models_are_refused_by_name(name):
    for needed in aggregator_class(name).needs:
        with pytest.raises(ValueError, match=f"{name} needs `{needed}`"):
            build(name)(**{**round_of(), needed: None})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_gpu_gives_what_the_cpu_gives(name, missing):
    plain = round_of(missing=missing)
    moved = {key: value if value is None or key == "weights" else value.cuda() for key, value in plain.items()}
    out = build(name)(**moved)
    assert out.models.is_cuda
    torch.testing.assert_close(out.models.cpu(), build(name)(**plain).models)


class Somebodys(Aggregator):
    """A method of a user's, which returns what it is given."""

    name = "somebodys"

    def __init__(self, puts_in="received", **parts):
        super().__init__()
        self.own, self.parts = puts_in, parts

    def aggregate(self, upload):
        if "whole" in self.parts:
            return self.parts["whole"]
        parts = {"models": upload.received.clone(), "graph": torch.eye(len(upload.clients)), **self.parts}
        return Aggregate(**{name: part(upload) if callable(part) else part for name, part in parts.items()})


def test_a_method_of_a_users_that_keeps_something_can_also_take_it_back(monkeypatch):
    class Keeps(Somebodys):
        def state(self):
            return {"rounds": 3}

    class Both(Keeps):
        def load_state(self, state):
            pass

    for kind in (Keeps, Both):
        monkeypatch.setitem(BUILTIN["aggregators"], kind.__name__, kind)
    with pytest.raises(ValueError, match="Keeps has one of state and load_state; to go on takes both"):
        build_aggregator("Keeps")
    build_aggregator("Both")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"whole": None}, "an Aggregate; it returned none"),
        ({"whole": torch.zeros(K, D)}, "an Aggregate; it returned (5, 37)"),
        ({"models": torch.zeros(D)}, "models of shape (5, 37); it returned (37,)"),
        ({"graph": [[1]]}, "a graph of shape (5, 5); it returned a list"),
        ({"layer_graphs": torch.zeros(2, K)}, "layer_graphs of shape (2, 5, 5); it returned (2, 5)"),
        ({"own": None}, "an own for own='clean', as in Aggregate(..., own=Own(weights, rest)); it returned none"),
        ({"own": Own(torch.ones(K), torch.zeros(K, D))}, "own.weights of shape (1, 5); it returned (5,)"),
        ({"own": Own(torch.ones(3, K), torch.zeros(K, D))}, "own.weights of shape (1, 5); it returned (3, 5)"),
        ({"own": Own(torch.ones(2, K), torch.zeros(D))}, "own.rest of shape (5, 37); it returned (37,)"),
    ],
)
def test_what_a_method_of_a_users_must_return_is_said(parts, said):
    method = Somebodys("clean" if "own" in parts else "received", **parts)
    with pytest.raises(ValueError) as caught:
        method(**round_of(), layers=(30, 7))
    assert str(caught.value) == f"Somebodys.aggregate must return {said}"


def test_rows_of_a_mixing_matrix_sum_to_one():
    twice = torch.full((K, K), 2 / K, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^Somebodys.aggregate .* a row sums to 2; rows sum to one, or say `"):
        Somebodys(graph=twice)(**round_of())
    edges = type("Edges", (Somebodys,), {"mixing": False})
    assert torch.equal(edges(graph=twice)(**round_of()).graph, twice)
    rounded = torch.full((K, K), 1 / K) * (1 + 1e-6)  # of a method in single precision
    Somebodys(graph=rounded)(**round_of())
    for value in (torch.nan, torch.inf):
        broken = torch.full((K, K), value)
        assert not bool(Somebodys(graph=broken)(**round_of()).graph.isfinite().any())  # the federation names the round


def test_a_function_is_not_taken_for_a_method(tmp_path):
    (tmp_path / "mine.py").write_text("def mean(models, weights):\n    return weights @ models\n")
    said = "mean is a function that takes settings and returns an Aggregator, not the method itself"
    with pytest.raises(ValueError, match=rf"^mean needs its setting 'models'; {said}$"):
        build_aggregator(f"{tmp_path}/mine.py:mean")
    with pytest.raises(ConfigError, match=rf"^aggregator.models is missing; {said}$"):
        load_config("mnist_quick", [f"aggregator.name={tmp_path}/mine.py:mean"])


@pytest.mark.parametrize("what", ["received", "mask", "previous", "initial"])
def test_arrays_of_numpy_are_no_uploads(what):
    given_round = round_of(missing=True)
    with pytest.raises(ValueError, match=rf"^{what} must be a tensor; got a ndarray$"):
        build_aggregator("fedavg")(**{**given_round, what: given_round[what].numpy()})


@pytest.mark.parametrize(
    "models", [lambda upload: upload.received, lambda upload: upload.received[:1].expand(K, -1)], ids=["same", "one"]
)
def test_models_of_a_users_method_have_memory_of_their_own(models):
    given_round = round_of()
    before = given_round["received"].clone()
    out = Somebodys(models=models)(**given_round).models
    out[1:] = -7
    assert torch.equal(given_round["received"], before) and torch.equal(out[0], before[0])


def test_what_a_method_of_a_users_tells_must_fit_into_files():
    told = Somebodys(info={"numbers": torch.arange(3)})(**round_of()).info
    assert told["numbers"] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"Somebodys's info\['why'\] is a object; it must be a number, a text"):
        Somebodys(info={"why": object()})(**round_of())


def test_what_a_method_of_a_users_returns_in_other_types_is_brought_to_ours():
    given_round = round_of(dtype=torch.float32)
    out = Somebodys("clean", models=lambda upload: upload.received.double(), own=kept)(**given_round)
    assert torch.equal(out.models, given_round["received"]) and out.models.dtype == torch.float32
    assert torch.equal(out.graph, torch.eye(K, dtype=torch.float64))
    layered = Somebodys(layer_graphs=torch.ones(2, K, K, dtype=torch.int64))(**given_round, layers=(30, 7))
    assert layered.layer_graphs.dtype == torch.float64
    assert torch.equal(out.own.weights, torch.ones(1, K, dtype=torch.float64))
