"""The stacked engine against the sequential one, and what both promise: order, inputs, dropout, padding."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from jgesr_lightning.client import ClientModule
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.models import build_model
from jgesr_lightning.regularisers import CosineDissimilarity
from jgesr_lightning.training import ClientData, build_engine, choose_engine
from jgesr_lightning.training.sequential import SequentialEngine
from jgesr_lightning.training.stacked import StackedEngine

SIZES = (23, 3, 41, 8)  # one shorter than a batch
BATCH, EPOCHS, CLASSES = 8, 2, 3


def make_data(sizes=SIZES, shape=(1, 12, 12), dtype=torch.float64, classes=CLASSES):
    draw = torch.Generator().manual_seed(0)
    data = []
    for n in sizes:
        m = n // 2 + 1
        x = torch.randn(n + m, *shape, generator=draw, dtype=torch.float64).to(dtype)
        x[:, :, :, :6] = 0  # flat regions: the places of a pooling window tie there
        y = torch.randint(classes, (n + m,), generator=draw)
        data.append(ClientData(x[:n], y[:n], x[n:], y[n:]))
    return data


def make_net(*extra, seed=0):
    """Two convolutions, two pools, two linear layers, on 12 x 12 images; `extra` goes before the last layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5, 6),
        nn.ReLU(),
        *extra,
        nn.Linear(6, CLASSES),
    )


def make_engine(
    cls, net, data, precision="64-true", mu=0.0, terms=(), momentum=0.0, clients=None, batch=BATCH, local=None, **more
):
    """Return an engine; `local` holds further settings of the client module."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    client = ClientModule(net, mu, 0.1, momentum, terms, **(local or {}))
    clients = list(range(len(data))) if clients is None else clients
    return cls(fabric, client, data, clients, CLASSES, EPOCHS, batch, 7, **more)


def row_of(net, dtype=torch.float64):
    return ParameterLayout.of(net).flatten(net.state_dict()).to(dtype)


def run_rounds(engine, start, rounds=2, rows=None):
    """Return the models and the losses after `rounds` rounds of local training without aggregation."""
    models = start.expand(len(engine.data), -1).clone()
    for number in range(1, rounds + 1):
        trained = models.clone()

        def deliver(row, model, trained=trained):
            trained[row] = model

        losses = engine.train(number, range(len(models)) if rows is None else rows, models, deliver)
        models = trained
    return models, losses


def compare(net_factory, tolerance=1e-10, precision="64-true", dtype=torch.float64, data=None, batch=BATCH, **settings):
    data = make_data(dtype=dtype) if data is None else data
    start = row_of(net_factory(), dtype)
    reference = make_engine(SequentialEngine, net_factory(), data, precision, batch=batch, **settings)
    expected, expected_losses = run_rounds(reference, start)
    assert (expected - start).abs().max() > 1e-3, "nothing was trained"
    for group in (1, 2, 4):
        engine = make_engine(StackedEngine, net_factory(), data, precision, group=group, batch=batch, **settings)
        models, losses = run_rounds(engine, start)
        torch.testing.assert_close(models, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=tolerance)
        for ours, theirs in zip(engine.evaluate(models), reference.evaluate(models), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=max(tolerance, 1e-7))  # accuracies are float32


class Bounded:
    """A penalty of no name, to show that any differentiable one is trained."""

    def __call__(self, x, sent):
        return 0.05 * (x - sent).square().sum(-1).add(1e-3).sqrt()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("mu", "terms"),
    [(0.0, ()), (0.5, ()), (0.0, (CosineDissimilarity(0.3),)), (0.5, (CosineDissimilarity(0.3), Bounded()))],
    ids=["none", "proximal", "cosine", "several"],
)
def test_stacked_equals_sequential(mu, terms, momentum):
    compare(make_net, mu=mu, terms=terms, momentum=momentum)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 144, CLASSES)],
        lambda: [nn.Conv2d(1, 3, 3, stride=2, bias=False), nn.MaxPool2d([2, 2]), nn.Flatten(), nn.Linear(12, CLASSES)],
        lambda: [
            nn.Conv2d(1, 3, 5, padding="same"), nn.MaxPool2d(3), nn.Conv2d(3, 2, 2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(50, CLASSES, bias=False),
        ],
        lambda: [nn.Conv2d(1, 4, 3, dilation=2), nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                 nn.Linear(54, CLASSES)],
        lambda: [nn.Conv2d(1, 24, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 30, 3, padding=1), nn.MaxPool2d(2),
                 nn.ReLU(), nn.Flatten(), nn.Linear(120, CLASSES)],
        lambda: [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Sequential(nn.Conv2d(2, 3, 2), nn.LeakyReLU()),
                 nn.MaxPool2d(3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES)],
        lambda: [nn.Flatten(), nn.Linear(144, 5), nn.Sigmoid(), nn.Identity(), nn.Linear(5, 4), nn.ReLU(inplace=True),
                 nn.Linear(4, CLASSES)],
        lambda: [nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(1, 2, 1), nn.Flatten(), nn.ELU(inplace=True),
                 nn.Linear(72, CLASSES)],
    ],
    ids=["padding", "stride", "same", "groups", "wide", "smooth", "linear", "unfused"],
)  # fmt: skip
def test_layers(layers):
    def factory():
        torch.manual_seed(0)
        return nn.Sequential(*layers())

    compare(factory)


def test_several_channels():
    def factory():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, CLASSES))

    compare(factory, data=make_data(shape=(3, 12, 12)))


def test_float32_stays_close():
    compare(make_net, tolerance=2e-5, precision="32-true", dtype=torch.float32, mu=0.1)


@pytest.mark.parametrize(
    ("cls", "more"), [(SequentialEngine, {}), (StackedEngine, {"group": 1}), (StackedEngine, {"group": 3})]
)
def test_a_model_that_is_no_number_is_right_nowhere(cls, more):
    data = [ClientData(d.train_inputs, d.train_labels, d.test_inputs, 0 * d.test_labels) for d in make_data()]
    net = make_net()
    engine = make_engine(cls, net, data, **more)
    models = row_of(net).expand(len(data), -1).clone()
    before = engine.evaluate(models)[0]
    models[1] = torch.nan
    accuracy, loss = engine.evaluate(models)
    assert accuracy[1] == 0 and bool(loss[1].isnan())  # all its samples are of class 0, which the largest of NaN is
    others = [0, 2, 3]
    assert torch.equal(accuracy[others], before[others]) and bool(loss[others].isfinite().all())


def test_float32_drift_over_many_rounds_is_bounded_in_accuracy():
    data = make_data(sizes=(24, 32), dtype=torch.float32)
    start = row_of(make_net(), torch.float32)
    engines = [make_engine(cls, make_net(), data, "32-true") for cls in (SequentialEngine, StackedEngine)]
    first, second = (e.evaluate(run_rounds(e, start, rounds=30)[0])[0] for e in engines)
    assert (first - second).abs().max() < 0.05


def test_bf16_activations_round_no_worse_than_autocast_does():
    data = make_data(sizes=(24, 32), dtype=torch.float32)
    start = row_of(make_net(), torch.float32)
    exact, autocast, ours = (
        run_rounds(make_engine(cls, make_net(), data, precision, mu=0.1), start)[0]
        for cls, precision in (
            (SequentialEngine, "32-true"),
            (SequentialEngine, "bf16-mixed"),
            (StackedEngine, "bf16-mixed"),
        )
    )
    assert ours.dtype == torch.float32, "weights stay in full precision"
    assert 0 < (ours - exact).norm() < 2 * (autocast - exact).norm() < 0.5 * (exact - start).norm()


def test_float32_samples_are_converted_for_double_precision():
    for cls in (SequentialEngine, StackedEngine):
        engine = make_engine(cls, make_net(), make_data(dtype=torch.float32), "64-true")
        models, _ = run_rounds(engine, row_of(make_net()), rounds=1)
        assert models.dtype == torch.float64 and engine.evaluate(models)[1].isfinite().all()


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
def test_order_of_clients_changes_no_bit_and_inputs_stay(cls):
    start = row_of(make_net(), torch.float32)
    data = make_data(dtype=torch.float32)
    copies = [d.train_inputs.clone() for d in data]
    engine = make_engine(cls, make_net(nn.Dropout(0.3)), data, "32-true", mu=0.2)
    sent = start.expand(4, -1).clone()
    kept = sent.clone()
    results = []
    for rows in ([0, 1, 2, 3], [3, 2, 1, 0], [2]):
        out = sent.clone()
        engine.train(5, rows, sent, lambda row, model, out=out: out[row].copy_(model))
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0][2], results[2][2]) and torch.equal(results[2][0], sent[0])
    assert torch.equal(sent, kept)
    assert all(torch.equal(d.train_inputs, c) for d, c in zip(data, copies, strict=True))


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
def test_clients_do_not_depend_on_who_else_is_in_the_process(cls):
    data, start = make_data(), row_of(make_net())
    together, _ = run_rounds(make_engine(cls, make_net(), data), start)
    alone, _ = run_rounds(make_engine(cls, make_net(), [data[2]], clients=[2]), start)
    assert torch.equal(together[2], alone[0])


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
def test_losses_are_means_over_batches_and_nan_where_absent(cls):
    engine = make_engine(cls, make_net(), make_data())
    _, losses = run_rounds(engine, row_of(make_net()), rounds=1, rows=[0, 3])
    assert losses.dtype == torch.float64
    assert losses[[1, 2]].isnan().all() and losses[[0, 3]].isfinite().all()


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
def test_it_trains_where_the_caller_has_turned_gradients_off(cls):
    engine, start = make_engine(cls, make_net(), make_data()), row_of(make_net())
    with torch.no_grad():
        _, losses = run_rounds(engine, start, rounds=1)
        assert not torch.is_grad_enabled()
    assert losses.isfinite().all()


@pytest.mark.parametrize("cls", [SequentialEngine, StackedEngine])
def test_stopping_abandons_the_rest(cls):
    engine, start = make_engine(cls, make_net(), make_data()), row_of(make_net())
    delivered = []
    engine.train(1, range(4), start.expand(4, -1), lambda row, _: delivered.append(row), stopping=lambda: True)
    assert delivered == []
    engine.train(
        1, range(4), start.expand(4, -1), lambda row, _: delivered.append(row), stopping=lambda: bool(delivered)
    )
    assert len(delivered) == 1


def test_dropout_draws_the_masks_of_the_reference():
    compare(lambda: make_net(nn.Dropout(0.4)))


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout2d])
def test_dropout_of_images_too_wherever_it_stands(dropout):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(
            dropout(0.2), nn.Conv2d(2, 4, 3), nn.ReLU(), dropout(0.4), nn.Conv2d(4, 3, 3), nn.AvgPool2d(2), nn.ELU(),
            dropout(0.3), nn.Flatten(), nn.Linear(48, CLASSES),
        )  # fmt: skip

    compare(net, data=make_data(shape=(2, 12, 12)))
    compare(lambda: nn.Sequential(*list(net())[:4], nn.Flatten(), nn.Linear(400, CLASSES)),
            data=make_data(shape=(2, 12, 12)))  # fmt: skip


@pytest.mark.parametrize("channels", [False, True])
def test_each_client_has_masks_of_its_own_in_the_right_share(channels):
    from jgesr_lightning.training.stages import Context, Dropout, Place

    p, shape = 0.3, torch.Size((2, 50, 40, 3, 3))
    place = Place(shape, None, torch.float32, torch.device("cpu"), first=True)
    stage = Dropout(place, p, channels)
    generators = [torch.Generator().manual_seed(k) for k in (1, 2)]
    x = torch.ones(shape)
    y = stage.forward(x, Context(True, [50, 30], generators))
    assert y[0].unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
    share = (y[0] == 0).float().mean().item()
    trials = 50 * 40 * (1 if channels else 9)
    assert abs(share - p) < 4 * (p * (1 - p) / trials) ** 0.5
    if channels:
        assert ((y == 0).flatten(3).sum(-1) % 9 == 0).all(), "a channel is dropped whole or not at all"
    assert not torch.equal(y[0, :30] == 0, y[1, :30] == 0)
    alone = Dropout(place._replace(shape=torch.Size((1, *shape[1:]))), p, channels)
    again = alone.forward(x[:1], Context(True, [50], [torch.Generator().manual_seed(1)]))
    assert torch.equal(again[0], y[0]), "a client's masks depend on nobody else"
    assert torch.equal(stage.backward(x), y)
    assert torch.equal(stage.forward(x, Context(False, [50, 30], ())), x)


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 3)), r"'1' \(BatchNorm1d\)"),
        (nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))), r"'0.1' \(BatchNorm2d\)"),
        (nn.Sequential(nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 3)), r"'1' \(LayerNorm\)"),
        (nn.Sequential(nn.Conv2d(1, 2, 3, padding_mode="circular")), r"'0' \(Conv2d that"),
        (nn.Sequential(nn.Conv2d(1, 2, (3, 5))), r"'0' \(Conv2d that"),
        (ClientModule(nn.Linear(2, 2)), "a ClientModule, which is no nn.Sequential"),
    ],
)
def test_unsupported_layers_are_refused_by_name(net, name):
    with pytest.raises(ValueError, match=f"engine=stacked cannot train {name}.*; use engine=sequential"):
        make_engine(StackedEngine, net, make_data())


def test_shared_and_frozen_weights_are_refused():
    layer = nn.Linear(144, 144)
    with pytest.raises(ValueError, match=r"'2'.*shares its weights"):
        make_engine(StackedEngine, nn.Sequential(nn.Flatten(), layer, layer), make_data())
    layer.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"frozen parameter '1\.bias'"):
        make_engine(StackedEngine, nn.Sequential(nn.Flatten(), layer), make_data())
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, CLASSES))
    net.register_buffer("scale", torch.ones(4))  # which weight decay would shrink
    with pytest.raises(ValueError, match="engine=stacked cannot train the buffer 'scale'; use engine=sequential"):
        make_engine(StackedEngine, net, make_data())


def test_sequential_trains_batch_norm_statistics():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, CLASSES))
    engine = make_engine(SequentialEngine, net, make_data(sizes=(16, 16)))
    start = row_of(net)
    models, _ = run_rounds(engine, start, rounds=1)
    means = engine.client.layout.restore(models)["1.running_mean"]
    assert (means != 0).any() and not torch.equal(means[0], means[1])


def build(name, net, **options):
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    return build_engine(name, fabric, ClientModule(net), make_data(), range(4), CLASSES, EPOCHS, BATCH, 0)


def test_the_factory_takes_the_named_engine_and_says_why():
    engine, reason = build("sequential", make_net())
    assert (engine.name, reason) == ("sequential", "as configured")
    engine, reason = build("stacked", make_net())
    assert (engine.name, reason) == ("stacked", "as configured")
    engine, reason = build("auto", make_net())
    assert engine.name == "stacked" and "cpu" in reason


def test_auto_falls_back_by_rule_and_names_the_layer():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 3))
    engine, reason = build("auto", net)
    assert engine.name == "sequential" and "BatchNorm1d" in reason
    with pytest.raises(ValueError, match="BatchNorm1d"):
        build("stacked", net)
    with pytest.raises(ValueError, match="known: auto, sequential, stacked"):
        build("stackd", make_net())


def test_images_that_are_not_square():
    def factory():
        return build_model("lenet", 2, (17, 22), CLASSES)

    compare(factory, data=make_data(sizes=(23, 9), shape=(2, 17, 22)))


def test_plain_features():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 7, generator=draw, dtype=torch.float64), torch.randint(CLASSES, (60,), generator=draw)
    data = [ClientData(x[a:b], y[a:b], x[b : b + 5], y[b : b + 5]) for a, b in ((0, 23), (28, 40))]
    for batch in (BATCH, "full"):
        compare(lambda: build_model("mlp", 7, None, CLASSES), data=data, batch=batch)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(12, 4), nn.Flatten(), nn.Linear(48, 3)), r"shape \(1, 12, 12\) \(batch1 must"),
        (lambda: nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(144, 3))), r"shape \(1, 12, 12\)"),
        (lambda: doubled(nn.Sequential(nn.Flatten(), nn.Linear(144, 3))), "a network whose forward is more than"),
    ],
    ids=["dimensions", "derived weights", "hook"],
)
def test_what_stages_would_get_wrong_is_found_before(make, reason):
    net = make()
    with pytest.raises(ValueError, match=rf"engine=stacked cannot train .*{reason}.*; use engine=sequential"):
        choose_engine("stacked", "cpu", net, 8, input_shape=(1, 12, 12))
    taken, why = choose_engine("auto", "cpu", net, 8, input_shape=(1, 12, 12))
    assert taken == "sequential" and why.startswith("engine=stacked cannot train") and "use engine" not in why
    assert net.training


def doubled(net):
    net.register_forward_hook(lambda module, inputs, scores: 2 * scores)
    return net
