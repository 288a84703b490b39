"""Methods of somebody else's package and file, under every command: nothing of ours is touched."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from jgesr_lightning import cli
from tests.processes import TINY, models, together, write_config

OUTSIDE = Path(__file__).parent / "outside"
TRIMMED = "robust_methods:TrimmedMean"


@pytest.fixture(autouse=True)
def _outside(monkeypatch):
    monkeypatch.syspath_prepend(OUTSIDE)


@pytest.mark.processes
def test_a_method_from_a_file_computes_the_same_on_two_processes(tmp_path):
    file = (OUTSIDE / "robust_methods" / "krum.py").read_text()
    for world in (1, 2):
        folder = tmp_path / str(world)
        path = write_config(folder, aggregator={"name": "./mykrum.py:Krum", "byzantine": 1})
        (folder / "mykrum.py").write_text(file)
        started = together(world, ["train", path, f"runtime.devices={world}", "rounds=2"], folder)
        assert [process.wait() for process in started] == [0] * world, started[0].output
    one, two = (models(tmp_path / str(world) / "runs" / "tiny") for world in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
    assert len(one.unique(dim=0)) == 1  # the chosen one, for all
    stored = yaml.safe_load((tmp_path / "2" / "runs" / "tiny" / "config.yaml").read_text())
    assert stored["aggregator"] == {"name": f"{tmp_path}/2/mykrum.py:Krum", "byzantine": 1, "scale": None}


def test_config_train_resume_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "aggregator": {"name": TRIMMED, "trim": 0.2}}))
    assert cli.main(["config", "tiny.yaml", "aggregator.trim=0.4"]) == 0
    assert "name: robust_methods:TrimmedMean\n  trim: 0.4\n" in capsys.readouterr().out
    assert cli.main(["train", "tiny.yaml", "rounds=1"]) == 0
    assert cli.main(["train", "tiny.yaml", "rounds=2", "resume=auto"]) == 0
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert (summary["status"], summary["rounds_done"], summary["method"]) == ("finished", 2, "TrimmedMean")
    capsys.readouterr()
    assert cli.main(["table", "runs"]) == 0
    assert "TrimmedMean (trim=0.2)" in capsys.readouterr().out
