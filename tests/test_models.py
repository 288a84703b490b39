"""The networks: shapes, sizes, and an initial model that depends on its seed alone."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from jgesr_lightning import names
from jgesr_lightning.models import build_model, check_sizes, shape_arguments


@pytest.mark.parametrize("name", names.BUILTIN["models"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 16, 16), (3, 20, 37)])
def test_scores_for_every_input_shape(name, shape):
    net = build_model(name, *shape_arguments(shape), 5)
    assert net(torch.randn(3, *shape)).shape == (3, 5)


def test_arguments_of_a_shape():
    shapes = [(1, 28, 28), (3, 20, 37), (30,), (2, 9)]
    assert [shape_arguments(s) for s in shapes] == [(1, 28), (3, (20, 37)), (30, None), (2, (9,))]


def test_plain_features_are_the_perceptron_s():
    assert build_model("mlp", 30, None, 4)(torch.randn(3, 30)).shape == (3, 4)
    with pytest.raises(ValueError, match=r"model\.name=lenet.*shape \(30,\), which mlp would take"):
        build_model("lenet", 30, None, 4)


@pytest.mark.parametrize(
    ("name", "channels", "side", "size"),
    [("lenet", 1, 28, 34622), ("fedavg_cnn", 1, 28, 582026), ("lenet", 3, 32, 52202), ("fedavg_cnn", 3, 32, 878538)],
)
def test_number_of_parameters(name, channels, side, size):
    assert sum(p.numel() for p in build_model(name, channels, side, 10).parameters()) == size


def test_initial_model_depends_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model("lenet", 1, 28, 10, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "global random state was touched"
    torch.manual_seed(2)
    second = build_model("lenet", 1, 28, 10, seed=5).state_dict()
    other = build_model("lenet", 1, 28, 10, seed=6).state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"lenett.*did you mean 'lenet'.*lenet, fedavg_cnn"):
        build_model("lenett", 1, 28, 10)


def test_inputs_too_small():
    with pytest.raises(ValueError, match="12 pixels"):
        build_model("lenet", 1, 12, 10)


def test_a_network_of_torchvision_is_fitted_to_channels_and_classes():
    net = build_model("torchvision:mobilenet_v3_small", 2, (40, 32), 7)
    again = build_model("torchvision:mobilenet_v3_small", 2, (40, 32), 7).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in net.state_dict().items())
    assert again["features.0.1.num_batches_tracked"] == 0, "trying the network left traces in it"
    assert net(torch.randn(2, 2, 40, 32)).shape == (2, 7)


def test_unknown_and_unfit_networks_of_torchvision():
    with pytest.raises(ValueError, match=r"no classification network 'resnet81' \(did you mean 'resnet18'\?\)"):
        build_model("torchvision:resnet81", 1, 28, 10)
    with pytest.raises(ValueError, match=r"torchvision:alexnet cannot take inputs of shape \(1, 28, 28\)"):
        build_model("torchvision:alexnet", 1, 28, 10)


def frozen(net):
    return net.requires_grad_(False)


def complex_net():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
    net[1].weight = nn.Parameter(torch.zeros(3, 16, dtype=torch.complex64))
    return net


class Talkative(nn.Linear):
    def forward(self, x):
        return {"scores": super().forward(x.flatten(1))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda *_: nn.Linear(5, 3), r"cannot take inputs of shape \(1, 4, 4\): mat1 and mat2"),
        (
            lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(16, 2)),
            r"returns \(samples, 2\) for inputs .* \(samples, 3\)",
        ),
        (lambda *_: nn.Conv2d(1, 3, 1), r"returns \(samples, 3, 4, 4\) for"),
        (lambda *_: nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (32, 1))), "has no parameters; there is nothing"),
        (lambda *_: Talkative(16, 3), "returns a dict for"),
        (lambda *_: frozen(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), "all parameters frozen"),
        (lambda *_: complex_net(), "is torch.complex64"),
        (lambda *_: "net", "returns a str; it must return a torch.nn.Module"),
        (lambda *_: 1 / 0, "division by zero"),
        (lambda classes: nn.Flatten(), "takes 1 positional argument but 3 were given"),
    ],
)
def test_a_network_that_does_not_fit_is_one_line(monkeypatch, make, message):
    monkeypatch.setitem(names.BUILTIN["models"], "mine", make)
    with pytest.raises(ValueError, match=message) as caught:
        build_model("mine", 1, 4, 3)
    assert "model.name=mine" in str(caught.value) and "\n" not in str(caught.value)


def test_lazy_layers_are_made_from_the_seed(monkeypatch):
    monkeypatch.setitem(names.BUILTIN["models"], "mine", lambda *_: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
    first, second = (build_model("mine", 1, 4, 3, seed=1)[1].weight for _ in range(2))
    assert first.shape == (3, 16) and torch.equal(first, second)


def test_batch_normalisation_asks_for_two_samples():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_sizes(net, 2, {0: 3})
    check_sizes(nn.Linear(2, 2), 1, {0: 1})
    with pytest.raises(ValueError, match=r"local\.batch_size is 1; the batch normalisation '1' needs at least 2"):
        check_sizes(net, 1, {0: 3})
    with pytest.raises(ValueError, match="client 7 has fewer than 2"):
        check_sizes(net, "full", {3: 5, 7: 1})


def test_whatever_a_function_draws_from_is_seeded_and_given_back(monkeypatch):
    def make(*_):
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        nn.init.constant_(net[1].weight, random.random())
        nn.init.constant_(net[1].bias, np.random.rand())  # noqa: NPY002
        return net

    monkeypatch.setitem(names.BUILTIN["models"], "mine", make)

    def drawn():
        return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = drawn()
    nets = [build_model("mine", 1, 4, 3, seed=seed)[1] for seed in (1, 1, 2)]
    assert drawn() == before
    first, second, other = ((net.weight[0, 0].item(), net.bias[0].item()) for net in nets)
    assert first == second and first[0] != other[0] and first[1] != other[1]


def test_a_key_that_a_users_function_misses_is_said_to_be_one(tmp_path):
    (tmp_path / "n.py").write_text("def make(*_):\n    return {}['boo']\n")
    with pytest.raises(ValueError, match="KeyError: 'boo'"):
        build_model(f"{tmp_path}/n.py:make", 1, 8, num_classes=2, seed=0)
