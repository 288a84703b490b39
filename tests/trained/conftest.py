"""One small finished run of two kinds, made in this process, for all tests of what can be taken away from it."""

import pytest

from jgesr_lightning import load_config, run

SETTINGS = (
    "data.name=synthetic data.fraction=0.1 clients=4 rounds=2 local.epochs=1 local.batch_size=8 runtime.devices=1 "
    "logging.wandb=false name=small"
)


@pytest.fixture(scope="session")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return run(load_config("mnist_quick", f"{SETTINGS} aggregator.name=jgesr output_dir={folder}"))


@pytest.fixture(scope="session")
def averaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaged")
    extra = "aggregator.name=fedavg checkpoint.keep_trained=false"
    return run(load_config("mnist_quick", f"{SETTINGS} {extra} output_dir={folder}"))
