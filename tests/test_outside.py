"""Methods of somebody else's package and file, under every command: nothing of ours is touched."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from jgesr_lightning import cli
from jgesr_lightning.config import load_config
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


@pytest.mark.processes
def test_a_method_that_draws_and_keeps_columns_goes_on_on_any_number_of_processes(tmp_path):
    path = write_config(tmp_path, aggregator={"name": f"{OUTSIDE}/momentum.py:Momentum"})

    def train(world, name, *more):
        devices = "runtime.devices=auto" if world > 1 else "runtime.devices=1"
        return [["train", path, f"name={name}", devices, *rest] for rest in more]

    def run(world, argv):
        started = together(world, argv, tmp_path / f"logs_{world}_{argv[0][2]}")
        assert [process.wait() for process in started] == [0] * world, started[0].output

    run(1, train(1, "one", ["rounds=3"], ["rounds=3"]))
    run(2, train(2, "two", ["rounds=3"]) + train(2, "again", ["rounds=2"]))
    copied = shutil.copytree(tmp_path / "runs" / "again", tmp_path / "runs" / "alone")
    run(2, train(2, "again", ["rounds=3", "resume=auto"]))
    run(1, train(1, "alone", ["rounds=3", "resume=auto"]))
    one, first, two, again, alone = (
        models(tmp_path / "runs" / name) for name in ("one", "one.1", "two", "again", "alone")
    )
    assert torch.equal(one, first) and torch.equal(two, again) and copied.is_dir()
    for others in (two, alone):
        torch.testing.assert_close(others, one, rtol=1e-12, atol=1e-12)


@pytest.mark.processes
def test_a_state_that_differs_between_processes_is_refused(tmp_path):
    path = write_config(tmp_path, aggregator={"name": f"{OUTSIDE}/momentum.py:Undeclared"})
    started = together(2, ["train", path, "runtime.devices=auto"], tmp_path)
    assert [process.wait() for process in started] == [1, 0]
    assert "state()['velocity'] differs between processes" in started[0].output
    assert "the class attribute column_state" in started[0].output


@pytest.mark.processes
def test_columns_that_one_process_kept_undeclared_are_refused_on_two(tmp_path):
    path = write_config(tmp_path, aggregator={"name": f"{OUTSIDE}/momentum.py:Undeclared"})
    alone = together(1, ["train", path, "runtime.devices=1", "rounds=1"], tmp_path / "logs")
    assert [process.wait() for process in alone] == [0], alone[0].output
    started = together(2, ["train", path, "runtime.devices=auto", "rounds=2", "resume=auto"], tmp_path)
    assert [process.wait() for process in started] == [1, 0]
    assert "cannot go on from " in started[0].output and "Traceback" not in started[0].output
    assert "name it in the class attribute column_state, or go on with one process" in started[0].output


def test_config_train_resume_table_and_study(tmp_path, monkeypatch, capsys):
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
    (tmp_path / "mine.py").write_text("from robust_methods import Krum\n\n\nclass Mine(Krum): pass\n")
    (tmp_path / "some.yaml").write_text(
        "base: tiny.yaml\ndata: [synthetic]\nmethods:\n  ./mine.py:Mine: {byzantine: 1}\n"
        f"  half: {{name: '{TRIMMED}', trim: 0.4}}\n  fedavg: {{}}\n"
    )
    assert cli.main(["study", "some.yaml", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "synthetic_s0.1_Mine_seed0: not begun",
        "synthetic_s0.1_half_seed0: not begun",
        "synthetic_s0.1_fedavg_seed0: not begun",
    ]


def test_going_on_with_other_code_is_remarked_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path, aggregator={"name": "./mykrum.py:Krum", "byzantine": 1})
    text = (OUTSIDE / "robust_methods" / "krum.py").read_text()

    def train(content, rounds):
        (tmp_path / "mykrum.py").write_text(content)
        assert cli.main(["train", str(path), f"rounds={rounds}", "resume=auto"]) == 0
        return json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())

    first = train(text, 1)
    assert list(first["code"]) == ["aggregator.name"] and first["remarks"] == []
    same = train("# a comment\n" + text.replace("chosen = int(", "chosen  =  int("), 2)
    assert same["code"] == first["code"] and same["remarks"] == []
    path_of_summary = tmp_path / "runs" / "tiny" / "summary.json"
    path_of_summary.write_text(json.dumps(same | {"code": {"aggregator.name": "of an attempt that saved nothing"}}))
    other = train(text.replace("self.byzantine - 2", "self.byzantine - 3"), 3)
    assert other["code"] != first["code"]
    (remark,) = other["remarks"]
    assert (remark["kind"], remark["rounds"]) == ("changed_code", [2])
    assert remark["text"] == f"after round 2 it went on with other code: {tmp_path}/mykrum.py:Krum"
    assert train(text.replace("self.byzantine - 2", "self.byzantine - 3"), 4)["remarks"] == [remark]
    capsys.readouterr()
    assert cli.main(["table", "runs"]) == 0
    assert "a part of somebody's own was changed on the way" in capsys.readouterr().out


PARTS = """
import numpy as np
import torch
from torch import nn
from jgesr_lightning.data.dataset import make_dataset

def blobs(root):
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    inputs = torch.randn(600, 4, generator=rng) + 3 * nn.functional.one_hot(labels, 4)
    return make_dataset("blobs", (inputs[:500], labels[:500]), (inputs[500:], labels[500:]), ("a", "b", "c"))

def deal(labels, num_clients, seed):
    order = np.random.default_rng(seed).permutation(len(labels))
    return [order[k::num_clients] for k in range(num_clients)]

def linear(features, size, classes):
    assert size is None
    return nn.Linear(features, classes)
"""


def test_data_partition_and_network_from_a_file_beside_the_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "parts.py").write_text(PARTS)
    path = write_config(
        tmp_path / "sub",
        data={"name": "./parts.py:blobs", "partition": "./parts.py:deal", "min_samples": 4},
        model={"name": "./parts.py:linear"},
        local={"epochs": 2, "batch_size": 16, "lr": 0.1},
    )
    assert cli.main(["train", str(path)]) == 0
    assert "fedavg on blobs: 5 clients" in capsys.readouterr().err
    folder = tmp_path / "sub" / "runs" / "tiny"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["dataset"], summary["model"], summary["status"]) == ("blobs", "linear", "finished")
    assert summary["last"]["accuracy/received"] > 0.8
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    parts = tmp_path / "sub" / "parts.py"
    assert (stored["data"]["name"], stored["data"]["partition"]) == (f"{parts}:blobs", f"{parts}:deal")
    assert stored["model"]["name"] == f"{parts}:linear"
    assert cli.main(["table", str(tmp_path / "sub" / "runs")]) == 0
    assert "blobs s=0.1" in capsys.readouterr().out


def test_a_project_that_moved_goes_on(tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    text = "base: tiny.yaml\ndata: [synthetic]\nmethods:\n  ./momentum.py:Momentum: {}\n"
    for folder in (home, tmp_path / "away"):
        write_config(folder, output_dir="runs", aggregator={"name": "./momentum.py:Momentum"})
        shutil.copy(OUTSIDE / "momentum.py", folder)
        (folder / "some.yaml").write_text(text)
    monkeypatch.chdir(home)
    assert cli.main(["train", "tiny.yaml", "rounds=1"]) == 0
    assert cli.main(["study", "some.yaml", "rounds=1", "--workers", "1"]) == 0
    shutil.copytree(home / "runs", tmp_path / "away" / "runs")
    monkeypatch.chdir(tmp_path / "away")
    capsys.readouterr()
    assert cli.main(["study", "some.yaml", "rounds=1", "--list"]) == 0
    assert capsys.readouterr().out.startswith("synthetic_s0.1_Momentum_seed0: finished, ")
    assert cli.main(["train", "tiny.yaml", "rounds=2", "resume=auto"]) == 0
    with (home / "momentum.py").open("a") as file:
        file.write("# another one by now\n")
    monkeypatch.chdir(home)
    shutil.rmtree(home / "runs")
    shutil.copytree(tmp_path / "away" / "runs", home / "runs")
    assert cli.main(["train", "tiny.yaml", "rounds=3", "resume=auto"]) == 2
    assert "away/momentum.py:Momentum, is " in capsys.readouterr().err
    shutil.rmtree(tmp_path / "away")  # which it was before cannot be told any more
    assert cli.main(["train", "tiny.yaml", "rounds=3", "resume=auto"]) == 0


def test_data_of_ones_own_are_found_from_anywhere_and_after_a_move(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    home, away = tmp_path / "home", tmp_path / "away"
    data = {"name": "tensors", "root": "set.npz", "min_samples": 2, "partition": "iid"}
    write_config(home, output_dir="runs", data=data, model={"name": "mlp"})
    np.savez(home / "set.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 2)
    (home / "some.yaml").write_text("base: tiny.yaml\ndata: [tensors]\nmethods: [fedavg]\n")
    monkeypatch.chdir(home)
    assert cli.main(["train", "tiny.yaml", "rounds=1"]) == 0
    assert cli.main(["study", "some.yaml", "rounds=1", "--workers", "1"]) == 0
    monkeypatch.chdir("/")
    assert cli.main(["evaluate", str(home / "runs" / "tiny")]) == 0
    home.rename(away)
    monkeypatch.chdir(away)
    capsys.readouterr()
    assert cli.main(["study", "some.yaml", "rounds=1", "--list"]) == 0
    assert capsys.readouterr().out.startswith("tensors_s0.1_fedavg_seed0: finished, ")
    assert cli.main(["train", "tiny.yaml", "rounds=2", "resume=auto"]) == 0


@pytest.mark.processes
def test_a_project_that_moved_before_anything_was_saved_begins_again(tmp_path):
    settings = {"aggregator": {"name": "./momentum.py:Momentum"}, "rounds": 1}
    path = write_config(tmp_path / "home", **settings)
    shutil.copy(OUTSIDE / "momentum.py", tmp_path / "home")
    assert together(1, ["train", path], tmp_path)[0].wait() == 0  # elsewhere, so that nothing is imported here
    shutil.rmtree(tmp_path / "home" / "runs" / "tiny" / "checkpoint")
    (tmp_path / "home").rename(tmp_path / "away")
    assert cli.main(["train", str(write_config(tmp_path / "away", **settings)), "resume=auto"]) == 0


def test_lists_of_indices_beside_the_configuration(tmp_path, monkeypatch):
    lists = [list(range(client, 4000, 5)) for client in range(5)]
    path = write_config(tmp_path / "sub", data={"name": "synthetic", "partition": "./lists.json"}, rounds=1)
    (tmp_path / "sub" / "lists.json").write_text(json.dumps(lists))
    monkeypatch.chdir(tmp_path)
    assert load_config(path).data.partition == str(tmp_path / "sub" / "lists.json")
    assert cli.main(["train", str(path)]) == 0
