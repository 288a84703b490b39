"""The networks: shapes, sizes, and an initial model that depends on its seed alone."""

import pytest
import torch

from jgesr_lightning.models import MODELS, build_model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("channels", "side", "classes"), [(1, 28, 10), (3, 32, 10), (2, 16, 5)])
def test_scores_for_every_input_shape(name, channels, side, classes):
    net = build_model(name, channels, side, classes)
    assert net(torch.randn(3, channels, side, side)).shape == (3, classes)


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
