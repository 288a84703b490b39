"""From a configuration to the parts: what is said of them, and what cannot be is refused before anything is written."""

import pytest

from jgesr_lightning import build, names
from jgesr_lightning.config import ConfigError, load_config
from jgesr_lightning.data.synthetic import make_synthetic
from jgesr_lightning.experiment import run

TINY = [
    "data.name=synthetic",
    "data.fraction=0.02",
    "clients=2",
    "rounds=1",
    "runtime.devices=1",
    "logging.wandb=false",
]


def config(*settings):
    return load_config("mnist_quick", [*TINY, *settings])


def test_data_are_made_once(monkeypatch):
    calls = []
    monkeypatch.setitem(names.BUILTIN["data"], "counted", lambda root: calls.append(root) or make_synthetic())
    build.data_module(config("data.name=counted"))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("settings", "mu"),
    [
        (["aggregator.name=jgesr"], 1.0),
        (["aggregator.name=two_step", "aggregator.mu=0.5"], 0.5),
        (["aggregator.name=graph_filter", "local.proximal_mu=0"], 0),
        (["aggregator.name=fedprox"], 0.01),
        (["aggregator.name=fedavg"], 0),
        (["aggregator.name=fedavg", "local.proximal_mu=0.2"], 0.2),
    ],
)
def test_the_proximal_weight_in_force_is_named(tmp_path, settings, mu):
    made = config(*settings)
    data = build.data_module(made)
    labels = build.wandb_labels(made, tmp_path)
    facts = build.watchers(made, tmp_path, data, build.start(made, data, "cpu"), labels).files.facts
    assert facts["proximal_mu"] == mu
    assert facts["client_terms"] == ([f"Proximal(mu={mu:g})"] if mu else [])


NETWORKS = """
from torch import nn
def small(channels, size, classes): return nn.Sequential(nn.Flatten(), nn.Linear(5, classes))
def normalised(channels, size, classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(channels * size ** 2), nn.Linear(channels * size ** 2, classes))
"""


@pytest.mark.parametrize(
    ("network", "more", "message"),
    [
        ("small", [], r"networks\.py:small cannot take inputs of shape \(1, 28, 28\): mat1 and mat2"),
        ("normalised", ["engine=stacked"], r"engine=stacked cannot train '1' \(BatchNorm1d\); use engine=sequential"),
        ("normalised", ["local.batch_size=1"], r"local\.batch_size is 1; the batch normalisation '1' needs at least 2"),
        ("nothing", [], "nothing"),
    ],
)
def test_a_network_that_cannot_be_trained_stops_the_run_before_its_folder(tmp_path, network, more, message):
    (tmp_path / "networks.py").write_text(NETWORKS)
    with pytest.raises(ConfigError, match=message) as caught:
        run(config(f"model.name={tmp_path / 'networks.py'}:{network}", f"output_dir={tmp_path / 'runs'}", *more))
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()
