import gc
import json
import logging
import os
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wandb

from jgesr_lightning.callbacks import wandb_log
from jgesr_lightning.callbacks.wandb_log import WandbLog, has_key, reachable, resolve_mode
from jgesr_lightning.records import RoundRecord
from tests.callbacks.offline import records

CONFIG = {
    "name": "tiny",
    "seed": 3,
    "rounds": 4,
    "data": {"name": "mnist"},
    "channel": {"noise": 0.1, "missing_rate": 0.0},
    "aggregator": {"name": "jgesr", "alpha": 0.05},
}


@dataclass
class State:
    round: int = 0
    records: list[RoundRecord] = field(default_factory=list)
    graphs: dict[int, torch.Tensor] = field(default_factory=dict)
    layer_graphs: dict[int, torch.Tensor] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def fake_federation(rounds=4, rank_zero=True):
    return SimpleNamespace(
        rounds=rounds, fabric=SimpleNamespace(is_global_zero=rank_zero), aggregator=SimpleNamespace(mixing=False)
    )


def record_of(number):
    return RoundRecord(number, metrics={"accuracy/received": [0.1, 0.5, 0.9, 0.7, 0.8][number % 5], "loss/train": 1.0})


def graph_of(number):
    graph = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return graph + graph.T


def drive(log, federation, state, until, status="finished"):
    """Run the hooks as the round loop does."""
    log.on_federation_start(federation, state)
    for number in range(len(state.records), until + 1):
        if number > 0:
            state.graphs[number] = graph_of(number)
        state.round = number
        state.records.append(record_of(number))
        log.on_round_end(federation, state, state.records[-1])
    log.on_federation_end(federation, state, status)


def nested(items):
    """Return the values of a record, those under several keys as dictionaries in one another."""
    values = {}
    for item in items:
        *path, last = item.nested_key or [item.key]
        place = values
        for key in path:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return values


def read_back(folder):
    """Return what the offline files under a run's folder hold, in order of their making."""
    wandb.teardown()  # ends W&B's own process, which writes the files in its own time
    found = SimpleNamespace(config={}, history=[], summary={}, exits=[], metrics=[], runs=[], preempting=0, media=[])
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found.runs.append(record.run)
                found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                found.history.append(nested(record.history.item))
            elif kind == "summary":
                found.summary |= nested(record.summary.update)
            elif kind == "exit":
                found.exits.append(record.exit.exit_code)
            elif kind == "metric":
                found.metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
            elif kind == "preempting":
                found.preempting += 1
    found.media = sorted(
        str(p.relative_to(folder)) for p in folder.glob("wandb/offline-run-*/files/media/**/*") if p.is_file()
    )
    return found


def make(folder, **changes):
    settings = {
        "run_name": "tiny",
        "project": "p",
        "config": CONFIG,
        "mode": "offline",
        "graph_every": 2,
        "tags": ["t"],
    }
    return WandbLog(folder, **(settings | changes))


def test_offline_files_hold_config_curves_graph_and_class_table(tmp_path):
    folder = tmp_path / "runs" / "tiny"  # not there yet
    table = (["client", "train", "test", "zero", "one"], [[0, 6, 2, 8, 0], [1, 3, 1, 0, 4]])
    drive(make(folder, class_table=table), fake_federation(), State(), 4)
    found = read_back(folder)
    assert found.config["aggregator"] == {"name": "jgesr", "alpha": 0.05}
    assert [row["round"] for row in found.history] == [0, 1, 2, 3, 4]
    assert [row["accuracy/received"] for row in found.history] == [0.1, 0.5, 0.9, 0.7, 0.8]
    assert dict(found.metrics)["*"] == "round"
    assert [row["round"] for row in found.history if "graph/picture" in row] == [2, 4]
    pictures = [path for path in found.media if path.endswith(".png")]
    assert len(pictures) == 2
    last = next(row["graph/values"]["path"] for row in found.history if row["round"] == 4)
    (values,) = folder.glob(f"wandb/offline-run-*/files/{last}")
    logged = json.loads(values.read_text())
    assert logged["columns"] == ["client", "0", "1", "2"]
    assert [row[1:] for row in logged["data"]] == graph_of(4).tolist()
    (classes,) = folder.glob(f"wandb/offline-run-*/files/{found.history[0]['clients/classes']['path']}")
    assert json.loads(classes.read_text())["data"] == table[1]
    assert found.summary["last/accuracy/received"] == 0.8
    assert found.summary["last/round"] == 4
    assert found.summary["best/accuracy/received"] == 0.9
    assert found.summary["best/round"] == 2
    assert found.exits == [0]
    assert found.preempting == 0
    (run,) = found.runs
    assert (run.display_name, run.project, list(run.tags)) == ("tiny", "p", ["t"])
    assert run.run_group.startswith("mnist s=0.1 jgesr ")
    assert run.run_id == (folder / "wandb_run_id").read_text().strip()
    assert not (Path.home() / ".local").exists()  # what offline tables need for a later sync is in the run's folder
    assert "WANDB_DATA_DIR" not in os.environ


def test_graphs_of_single_layers_are_logged_beside_the_whole(tmp_path):
    state = State(round=2, graphs={2: graph_of(2)}, layer_graphs={2: torch.stack([graph_of(5), graph_of(6)])})
    log = make(tmp_path)
    federation = fake_federation()
    log.on_federation_start(federation, state)
    log.on_round_end(federation, state, record_of(2))
    log.close(exit_code=0)
    (row,) = read_back(tmp_path).history
    assert row["graph/layers"]["count"] == 2
    (values,) = tmp_path.glob(f"wandb/offline-run-*/files/{row['graph/layer_values']['path']}")
    assert [line[:2] for line in json.loads(values.read_text())["data"]] == [
        [0, 0],
        [0, 1],
        [0, 2],
        [1, 0],
        [1, 1],
        [1, 2],
    ]


def test_a_stopped_run_is_preempted_and_its_resumption_continues_the_same_run(tmp_path):
    state = State()
    drive(make(tmp_path), fake_federation(), state, 2, status="stopped")
    first = read_back(tmp_path)
    assert first.preempting == 1
    assert first.exits == [1]
    drive(make(tmp_path), fake_federation(), state, 4)
    both = read_back(tmp_path)
    assert len({run.run_id for run in both.runs}) == 1
    assert [row["round"] for row in both.history] == [0, 1, 2, 3, 4]
    assert both.exits == [1, 0]
    assert both.summary["best/round"] == 2  # known from the records, although that round came before


def test_a_run_resumed_elsewhere_begins_with_the_rounds_that_came_before(tmp_path):
    state = State(round=2, records=[record_of(number) for number in range(3)])
    drive(make(tmp_path), fake_federation(), state, 4)
    assert [row["round"] for row in read_back(tmp_path).history] == [0, 1, 2, 3, 4]


def test_a_run_started_afresh_in_an_old_folder_is_a_new_run(tmp_path):
    for _ in range(2):
        drive(make(tmp_path), fake_federation(), State(), 1)
    assert len({run.run_id for run in read_back(tmp_path).runs}) == 2


def test_other_ranks_and_disabled_do_nothing(tmp_path):
    drive(make(tmp_path / "rank"), fake_federation(rank_zero=False), State(), 2)
    drive(make(tmp_path / "off", mode="disabled"), fake_federation(), State(), 2)
    assert not (tmp_path / "rank").exists()
    assert not (tmp_path / "off").exists()


def test_the_run_goes_on_without_wandb_but_a_sweep_does_not(tmp_path, monkeypatch, caplog):
    def refuse(**_):
        raise OSError("no room\nleft")

    monkeypatch.setattr(wandb, "init", refuse)
    drive(make(tmp_path), fake_federation(), State(), 2)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no room left" in line
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    with pytest.raises(RuntimeError, match="sweep"):
        make(tmp_path).on_federation_start(fake_federation(), State())


def test_a_failure_in_the_middle_ends_logging_not_the_run(tmp_path, monkeypatch, caplog):
    log, state, federation = make(tmp_path), State(), fake_federation()
    log.on_federation_start(federation, state)
    monkeypatch.setattr(log._run, "log", lambda *args, **kwargs: 1 / 0)
    log.on_round_end(federation, state, record_of(0))
    log.on_round_end(federation, state, record_of(1))
    log.on_federation_end(federation, state, "finished")
    assert sum("ZeroDivisionError" in record.getMessage() for record in caplog.records) == 1
    assert read_back(tmp_path).exits == [1]


def test_two_hundred_rounds_leave_no_figures_and_no_handles(tmp_path):
    log, state, federation = make(tmp_path, graph_every=10), State(), fake_federation(rounds=200)
    log.on_federation_start(federation, state)

    def figures_and_handles():
        gc.collect()
        alive = sum(type(thing).__name__ == "Figure" for thing in gc.get_objects())
        return alive, len(os.listdir("/proc/self/fd"))

    counted = []
    for number in range(1, 201):
        state.graphs = {number: graph_of(number)}
        log.on_round_end(federation, state, record_of(number))
        if number in (40, 200):
            counted.append(figures_and_handles())
    log.on_federation_end(federation, state, "finished")
    assert counted[1][0] == counted[0][0] == 0
    assert counted[1][1] <= counted[0][1] + 2


def test_mode_auto(monkeypatch):
    monkeypatch.setattr(wandb_log, "has_key", lambda url: True)
    monkeypatch.setattr(wandb_log, "reachable", lambda url: True)
    assert resolve_mode("auto") == ("online", "")
    monkeypatch.setattr(wandb_log, "reachable", lambda url: False)
    mode, reason = resolve_mode("auto")
    assert mode == "offline"
    assert "not answering within 2 s" in reason
    assert resolve_mode("auto", sweep=True) == ("online", "")
    assert resolve_mode("online") == ("online", "")
    monkeypatch.setattr(wandb_log, "reachable", lambda url: True)
    monkeypatch.setattr(wandb_log, "has_key", lambda url: False)
    mode, reason = resolve_mode("auto")
    assert mode == "offline"
    assert "no API key" in reason
    for named, mode in {"dryrun": "offline", "disabled": "disabled", "online": "online"}.items():
        monkeypatch.setenv("WANDB_MODE", named)
        assert resolve_mode("auto") == (mode, "")


def test_offline_by_itself_says_why_and_how_to_send_it(tmp_path, caplog):
    drive(make(tmp_path, mode="auto"), fake_federation(), State(), 1)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert "no API key" in line
    assert f"wandb sync {folder}" in line


def test_key_in_the_environment_or_in_netrc(monkeypatch, tmp_path):
    url = "https://wandb.example.org:8443"
    assert not has_key(url)
    Path.home().mkdir()
    (Path.home() / ".netrc").write_text("machine other.example.org login user password secret\n")
    assert not has_key(url)
    (tmp_path / "elsewhere").write_text("machine wandb.example.org login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "elsewhere"))
    assert has_key(url)
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert has_key(url)


def test_reachable_tries_the_server_or_the_proxy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"http://127.0.0.1:{port}")
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        assert reachable("https://server.invalid")
    assert not reachable(f"http://127.0.0.1:{port}")


def test_a_name_server_that_never_answers_does_not_delay(monkeypatch):
    release = threading.Event()

    def hang(*_, **__):
        release.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    assert not reachable("https://server.invalid", seconds=0.05)
    release.set()
