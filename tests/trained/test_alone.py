"""A run's folder by itself: its models go without the files of one's own that only its training needed."""

import shutil
import sys

import numpy as np
import pytest

from jgesr_lightning import load_client, load_config, run
from jgesr_lightning.cli import main
from jgesr_lightning.config import Config, to_dict
from jgesr_lightning.trained import open_trained

PARTS = """
import numpy as np, torch
from jgesr_lightning.aggregators.fedavg import FedAvg
from jgesr_lightning.data import make_dataset
class Mine(FedAvg):
    def __init__(self, strength: float = 2.0):
        super().__init__()
def blobs(root):
    y = torch.arange(120) % 3
    return make_dataset("blobs", (torch.eye(3)[y] + 0.1 * torch.rand(120, 3), y), None, "abc")
def halves(labels, num_clients):
    return np.array_split(np.arange(len(labels)), num_clients)
"""
SETTINGS = (
    "clients=2 rounds=1 local.epochs=1 data.fraction=1 model.name=mlp runtime.devices=1 logging.wandb=false "
    "data.name=./blobs.py:blobs data.partition=./halves.py:halves aggregator.name=./mine.py:Mine aggregator.strength=3"
)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Return the folder of a run whose method, data and partition stand in files that are gone by now."""
    monkeypatch.chdir(tmp_path)
    for name in ("blobs", "halves", "mine"):
        (tmp_path / f"{name}.py").write_text(PARTS)
    folder = run(load_config("mnist_quick", f"{SETTINGS} output_dir={tmp_path}/runs")).folder
    shutil.move(folder, tmp_path / "alone")
    shutil.rmtree(tmp_path / "runs")
    for name in ("blobs", "halves", "mine"):
        (tmp_path / f"{name}.py").unlink()
        for module in [module for module in sys.modules if module.startswith(f"_{name}_")]:
            monkeypatch.delitem(sys.modules, module)
    np.savez(tmp_path / "new.npz", x=np.eye(3, dtype=np.float32).repeat(8, 0), y=np.arange(3).repeat(8))
    return tmp_path / "alone"


def test_models_are_taken_away_and_applied_without_them(alone, capsys):
    assert main(["predict", str(alone), "--client", "0", "new.npz"]) == 0
    assert main(["evaluate", str(alone), "--data", "new.npz"]) == 0
    assert main(["export", str(alone), "--out", "away"]) == 0
    assert load_client(alone, 1).classes == load_client("away", 1).classes == ("a", "b", "c")
    assert open_trained(alone).card["run"]["method"] == "Mine"
    assert open_trained(alone).config.aggregator.settings == {"strength": 3.0}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["evaluate", "{}"], "error: data.name is '{}/blobs.py:blobs'; there is no file {}/blobs.py\n"),
        (
            ["attach", "{}", "--data", "new.npz"],
            "error: aggregator.name is '{}/mine.py:Mine'; there is no file {}/mine.py\n",
        ),
    ],
)
def test_what_needs_them_says_which_is_missing(alone, tmp_path, capsys, command, line):
    capsys.readouterr()
    assert main([part.format(alone) for part in command]) == 2
    assert capsys.readouterr().err == line.replace("{}", str(tmp_path))


def test_each_needs_its_own_parts_alone(alone, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(PARTS)
    assert main(["attach", str(alone), "--data", "new.npz"]) == 0
    (tmp_path / "mine.py").unlink()
    for name in ("blobs", "halves"):
        (tmp_path / f"{name}.py").write_text(PARTS.replace("0.1 * torch.rand(120, 3)", "0"))
    capsys.readouterr()
    assert main(["evaluate", str(alone)]) == 2  # they are read, and compared with those of the run
    assert "are others by now" in capsys.readouterr().err


def test_what_was_stored_reads_back_as_it_was():
    config = load_config("mnist_s01", "aggregator.name=fedprox logging.tags=[a,b]")
    assert Config.stored(to_dict(config)) == config
