"""The order of a network's tensors in a row: there and back, buffers and shared parameters included."""

import pytest
import torch
from torch import nn

from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.models import build_model


def test_row_is_the_concatenated_state_dict():
    net = build_model("lenet", 1, 28, 10)
    layout = ParameterLayout.of(net)
    row = layout.flatten(net.state_dict())
    assert torch.equal(row, torch.cat([t.reshape(-1) for t in net.state_dict().values()]))
    assert layout.size == layout.num_parameters == sum(p.numel() for p in net.parameters()) == len(row)


def test_restore_inverts_flatten_for_any_leading_dimensions():
    net = build_model("lenet", 3, 32, 7)
    layout = ParameterLayout.of(net)
    rows = torch.randn(2, 3, layout.size)
    tensors = layout.restore(rows)
    assert tensors["0.weight"].shape == (2, 3, 6, 3, 5, 5)
    for i in range(2):
        for j in range(3):
            one = {name: t[i, j] for name, t in tensors.items()}
            assert torch.equal(layout.flatten(one), rows[i, j])


def test_restore_returns_views_and_flatten_returns_a_copy():
    net = build_model("lenet", 1, 28, 10)
    layout = ParameterLayout.of(net)
    row = layout.flatten(net.state_dict())
    row.zero_()
    assert net.state_dict()["0.weight"].abs().sum() > 0
    layout.restore(row)["0.weight"].fill_(1)
    assert row[: layout.sizes[0]].eq(1).all() and row[layout.sizes[0] :].eq(0).all()


def test_memory_format_does_not_change_the_row():
    net = build_model("lenet", 3, 32, 10)
    layout = ParameterLayout.of(net)
    row = layout.flatten(net.state_dict())
    assert torch.equal(layout.flatten(net.to(memory_format=torch.channels_last).state_dict()), row)


def test_buffers_follow_the_parameters_and_counters_stay():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = ParameterLayout.of(net)
    assert layout.names == (
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var",
    )  # fmt: skip
    assert layout.num_parameters == 12 + 4 + 8 + 8 + 2
    assert layout.size == layout.num_parameters + 8
    assert layout.layers == (16, 8, 10, 8)
    net.load_state_dict(layout.restore(torch.randn(layout.size)), strict=False)


def test_layers_join_weight_and_bias_and_sum_to_d():
    layout = ParameterLayout.of(build_model("lenet", 1, 28, 10))
    assert layout.layers == (156, 2416, 30840, 1210)
    assert sum(layout.layers) == layout.size


def test_a_shared_parameter_stands_once():
    first = nn.Linear(4, 4)
    net = nn.Sequential(first, nn.ReLU(), first)
    layout = ParameterLayout.of(net)
    assert layout.names == ("0.weight", "0.bias")
    assert layout.size == layout.num_parameters == 20


def test_a_row_of_the_wrong_length_is_an_error():
    layout = ParameterLayout.of(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        layout.restore(torch.zeros(layout.size + 1))


def test_frozen_parameters_stay():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[0].weight.requires_grad_(False)
    assert ParameterLayout.of(net).names == ("0.bias", "1.weight", "1.bias")


def test_variances_are_the_columns_of_running_variances():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False))
    layout = ParameterLayout.of(net)
    row = layout.flatten(net.state_dict())
    row[layout.variances] = -1
    state = layout.restore(row)
    assert state["1.running_var"].eq(-1).all() and state["3.running_var"].eq(-1).all()
    assert row.eq(-1).sum() == layout.variances.sum() == 6
    assert not ParameterLayout.of(nn.Linear(2, 2)).variances.any()
