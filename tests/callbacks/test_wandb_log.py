import gc
import json
import logging
import os
import pwd
import shlex
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import wandb

from jgesr_lightning.callbacks import wandb_mode
from jgesr_lightning.callbacks.files import ResultFiles
from jgesr_lightning.callbacks.wandb_log import WandbLog, sync_command
from jgesr_lightning.callbacks.wandb_media import client_curves, client_order
from jgesr_lightning.callbacks.wandb_mode import has_key, reachable, resolve_mode, wandb_program
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.records import RoundRecord
from jgesr_lightning.timing import Stopwatch
from jgesr_lightning.wandb_names import Labels
from tests.callbacks.offline import records

WATCH = Stopwatch(torch.device("cpu"))
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
    models: torch.Tensor = field(default_factory=lambda: torch.arange(12.0).reshape(3, 4))
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


def fake_plan(rounds=4, rank_zero=True):
    return SimpleNamespace(
        rounds=rounds,
        is_due=lambda number, every: RoundPlan.is_due(SimpleNamespace(rounds=rounds), number, every),
        fabric=SimpleNamespace(is_global_zero=rank_zero),
        aggregator=SimpleNamespace(mixing=False),
        sharding=SimpleNamespace(gather=lambda values: values.double()),
        layout=ParameterLayout(("weight", "bias"), (torch.Size([1, 3]), torch.Size([1])), 4),
    )


def record_of(number):
    value = [0.1, 0.5, 0.9, 0.7, 0.8][number % 5]
    clients = {"accuracy/received": [value - 0.1, value, value + 0.1], "loss/train": [1.0, 2.0, 3.0]}
    return RoundRecord(number, metrics={"accuracy/received": value, "loss/train": 1.0}, clients=clients)


def graph_of(number):
    graph = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return graph + graph.T


def drive(log, plan, state, until, status="finished"):
    """Run the hooks as the round loop does."""
    log.on_federation_start(plan, state)
    for number in range(len(state.records), until + 1):
        if number > 0:
            state.graphs[number] = graph_of(number)
        state.round = number
        state.records.append(record_of(number))
        log.on_round_end(plan, state, state.records[-1], WATCH)
    log.on_federation_end(plan, state, status)


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
    found = SimpleNamespace(
        config={},
        history=[],
        summary={},
        exits=[],
        metrics=[],
        runs=[],
        preempting=0,
        media=[],
        alerts=[],
        artifacts=[],
    )
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found.runs.append(record.run)
                found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "config":
                found.config |= {
                    "/".join(item.nested_key): json.loads(item.value_json) for item in record.config.update
                }
            elif kind == "history":
                found.history.append(nested(record.history.item))
            elif kind == "summary":
                found.summary |= nested(record.summary.update)
            elif kind == "exit":
                found.exits.append(record.exit.exit_code)
            elif kind == "metric":
                wanted = record.metric.summary
                summary = {name for name in ("last", "max", "min") if getattr(wanted, name)}
                name = record.metric.name or record.metric.glob_name
                found.metrics.append((name, record.metric.step_metric, summary))
            elif kind == "alert":
                found.alerts.append((record.alert.title, record.alert.level))
            elif kind == "artifact":
                found.artifacts.append(record.artifact)
            elif kind == "preempting":
                found.preempting += 1
    found.media = sorted(
        str(p.relative_to(folder)) for p in folder.glob("wandb/offline-run-*/files/media/**/*") if p.is_file()
    )
    return found


def make(folder, **changes):
    labels = Labels("tiny", "p", "mnist s=0.1 jgesr", tags=("t",))
    return WandbLog(folder, **({"labels": labels, "config": CONFIG, "mode": "offline", "graph_every": 2} | changes))


def test_offline_files_hold_config_curves_graph_and_class_table(tmp_path):
    folder = tmp_path / "runs" / "tiny"  # not there yet
    table = (["client", "train", "test", "zero", "one"], [[0, 6, 2, 8, 0], [1, 3, 1, 0, 4], [2, 3, 1, 4, 0]])
    drive(make(folder, class_table=table), fake_plan(), State(), 4)
    found = read_back(folder)
    assert found.config["aggregator"] == {"name": "jgesr", "alpha": 0.05}
    assert [row["round"] for row in found.history] == [0, 1, 2, 3, 4]
    assert [row["accuracy/received"] for row in found.history] == [0.1, 0.5, 0.9, 0.7, 0.8]
    metrics = {name: (step, summary) for name, step, summary in found.metrics}
    assert metrics["*"] == ("round", set())
    assert metrics["accuracy/received"] == ("round", {"last", "max"})
    assert metrics["loss/train"] == ("round", {"last"})
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
    assert run.run_group == "mnist s=0.1 jgesr"
    assert [run.run_id, "5"] == (folder / "wandb_run_id").read_text().split()
    assert not (Path.home() / ".local").exists()  # what offline tables need for a later sync is in the run's folder
    assert "WANDB_DATA_DIR" not in os.environ


@pytest.mark.parametrize("place", [None, "read_only"])
def test_without_a_home_folder_that_can_be_written_w_and_b_keeps_all_in_the_runs(place, tmp_path, monkeypatch, caplog):
    """As in a container under a user number that has no entry, or with its home folder mounted read-only."""

    def nobody(number):
        raise KeyError(number)

    if place is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", nobody)
    else:
        (tmp_path / place).mkdir(mode=0o555)
        monkeypatch.setenv("HOME", str(tmp_path / place))
    before, during = dict(os.environ), {}
    folder = tmp_path / "runs" / "tiny"
    drive(make(folder, announce=lambda facts: during.update(os.environ)), fake_plan(), State(), 2)
    added = {name: during[name] for name in during.keys() - before.keys() if name.endswith(("_DIR", "_HOME"))}
    assert "WANDB_CACHE_DIR" in added and ("WANDB_CONFIG_DIR" in added) == (place is None)
    assert all(Path(value).is_relative_to(folder / "wandb") for value in added.values())
    assert read_back(folder).exits == [0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not added.keys() & os.environ.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"runs"} | ({place} - {None}))


def test_graphs_of_single_layers_are_logged_beside_the_whole(tmp_path):
    layers = {2: torch.stack([graph_of(5), graph_of(6)])}
    state = State(round=2, records=[record_of(2)], graphs={2: graph_of(2)}, layer_graphs=layers)
    log = make(tmp_path)
    log.on_federation_start(fake_plan(), state)
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
    drive(make(tmp_path), fake_plan(), state, 2, status="stopped")
    first = read_back(tmp_path)
    assert first.preempting == 1
    assert first.exits == [1]
    drive(make(tmp_path), fake_plan(), state, 4)
    both = read_back(tmp_path)
    assert len({run.run_id for run in both.runs}) == 1
    assert [row["round"] for row in both.history] == [0, 1, 2, 3, 4]
    assert both.exits == [1, 0]
    assert both.summary["best/round"] == 2  # known from the records, although that round came before


def test_a_run_that_was_killed_before_w_and_b_had_a_round_gives_it_all_rounds_when_resumed(tmp_path):
    state, killed = State(), make(tmp_path)
    killed.on_federation_start(fake_plan(), state)
    assert killed._start.done(60)
    state.round, state.records = 2, [record_of(number) for number in range(3)]
    killed._start.result[0].finish(exit_code=1)
    drive(make(tmp_path), fake_plan(), state, 4)
    found = read_back(tmp_path)
    assert len({run.run_id for run in found.runs}) == 1
    assert [row["round"] for row in found.history] == [0, 1, 2, 3, 4]


def test_a_run_of_an_older_version_is_gone_on_with_where_it_was(tmp_path):
    (tmp_path / "wandb_run_id").write_text("abc12345\n")
    drive(make(tmp_path), fake_plan(), State(round=2, records=[record_of(number) for number in range(3)]), 4)
    found = read_back(tmp_path)
    assert {run.run_id for run in found.runs} == {"abc12345"}
    assert [row["round"] for row in found.history] == [3, 4]


def test_the_id_may_be_given(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine1234")
    drive(make(tmp_path), fake_plan(), State(), 1)
    assert {run.run_id for run in read_back(tmp_path).runs} == {"mine1234"}


def test_a_run_of_a_sweep_without_w_and_b_is_a_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    drive(make(tmp_path, mode="auto"), fake_plan(), State(), 1)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the sweep learns nothing of this run" in line


def test_a_run_resumed_elsewhere_begins_with_the_rounds_that_came_before(tmp_path):
    state = State(round=2, records=[record_of(number) for number in range(3)])
    drive(make(tmp_path), fake_plan(), state, 4)
    assert [row["round"] for row in read_back(tmp_path).history] == [0, 1, 2, 3, 4]


def test_a_run_started_afresh_in_an_old_folder_is_a_new_run(tmp_path):
    for _ in range(2):
        drive(make(tmp_path), fake_plan(), State(), 1)
    assert len({run.run_id for run in read_back(tmp_path).runs}) == 2


def test_other_ranks_and_disabled_do_nothing(tmp_path):
    drive(make(tmp_path / "rank"), fake_plan(rank_zero=False), State(), 2)
    drive(make(tmp_path / "off", mode="disabled"), fake_plan(), State(), 2)
    assert not (tmp_path / "rank").exists()
    assert not (tmp_path / "off").exists()


def test_the_run_goes_on_without_wandb_but_a_sweep_does_not(tmp_path, monkeypatch, caplog):
    def refuse(**_):
        raise OSError("no room\nleft")

    monkeypatch.setattr(wandb, "init", refuse)
    drive(make(tmp_path), fake_plan(), State(), 2)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no room left" in line
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    with pytest.raises(RuntimeError, match="sweep"):
        drive(make(tmp_path), fake_plan(), State(), 2)


def test_a_failure_in_the_middle_ends_logging_not_the_run(tmp_path, monkeypatch, caplog):
    log, state, plan = make(tmp_path), State(), fake_plan()
    log.on_federation_start(plan, state)
    assert log._ready(wait=60)
    monkeypatch.setattr(log._run, "log", lambda *args, **kwargs: 1 / 0)
    for number in (0, 1):
        state.records.append(record_of(number))
        log.on_round_end(plan, state, state.records[-1], WATCH)
    log.on_federation_end(plan, state, "finished")
    assert sum("ZeroDivisionError" in record.getMessage() for record in caplog.records) == 1
    assert read_back(tmp_path).exits == [1]


def test_two_hundred_rounds_leave_no_figures_and_no_handles(tmp_path):
    log, state, plan = make(tmp_path, graph_every=10), State(), fake_plan(rounds=200)
    log.on_federation_start(plan, state)
    assert log._ready(wait=60)

    def figures_and_handles():
        gc.collect()
        alive = sum(type(thing).__name__ == "Figure" for thing in gc.get_objects())
        return alive, len(os.listdir("/proc/self/fd"))

    counted = []
    for number in range(1, 201):
        state.graphs = {number: graph_of(number)}
        state.records.append(record_of(number))
        log.on_round_end(plan, state, state.records[-1], WATCH)
        if number in (40, 200):
            counted.append(figures_and_handles())
    log.on_federation_end(plan, state, "finished")
    assert counted[1][0] == counted[0][0] == 0
    assert counted[1][1] <= counted[0][1] + 2


def test_mode_auto(monkeypatch):
    monkeypatch.setattr(wandb_mode, "has_key", lambda url: True)
    monkeypatch.setattr(wandb_mode, "reachable", lambda url: True)
    assert resolve_mode("auto") == ("online", "")
    monkeypatch.setattr(wandb_mode, "reachable", lambda url: False)
    mode, reason = resolve_mode("auto")
    assert mode == "offline"
    assert "not answering within 2 s" in reason
    assert resolve_mode("auto", sweep=True) == ("online", "")
    assert resolve_mode("online") == ("online", "")
    monkeypatch.setattr(wandb_mode, "reachable", lambda url: True)
    monkeypatch.setattr(wandb_mode, "has_key", lambda url: False)
    mode, reason = resolve_mode("auto")
    assert mode == "offline"
    assert "no API key" in reason
    for named, mode in {"dryrun": "offline", "disabled": "disabled", "online": "online"}.items():
        monkeypatch.setenv("WANDB_MODE", named)
        assert resolve_mode("auto") == (mode, "")


def test_each_clients_curve_is_a_table_and_a_plot(tmp_path):
    drive(make(tmp_path), fake_plan(), State(), 4)
    found = read_back(tmp_path)
    row = found.history[-1]
    (path,) = tmp_path.glob(f"wandb/offline-run-*/files/{row['clients/rounds']['path']}")
    logged = json.loads(path.read_text())
    assert logged["columns"] == ["round", "client", "accuracy/received", "loss/train"]
    assert len(logged["data"]) == 5 * 3
    assert logged["data"][-1] == [4, "002", pytest.approx(0.9), 3.0]
    panel = found.config["_wandb/visualize/clients/accuracy"]["panel_config"]["fieldSettings"]
    assert panel == {"x": "round", "y": "accuracy/received", "stroke": "client"}


def test_long_runs_of_many_clients_fit_a_table_and_end_with_the_last_round(monkeypatch):
    monkeypatch.setattr("jgesr_lightning.callbacks.wandb_media.MAX_ROWS", 10)
    data = client_curves([record_of(number) for number in range(11)])["clients/rounds"].data
    assert sorted({row[0] for row in data}) == [2, 6, 10]  # three rounds of three clients


def test_all_pictures_of_a_run_have_the_clients_in_one_order(tmp_path, monkeypatch):
    orders = []
    monkeypatch.setattr("jgesr_lightning.reporting.plots.graph_heatmap", lambda graph, order, *_: orders.append(order))
    monkeypatch.setattr("jgesr_lightning.reporting.plots.to_pixels", lambda figure: torch.zeros(2, 2, 3).byte().numpy())
    # clients 0 and 2 hold class a, client 1 class b, whatever the graphs of the rounds look like
    table = (["client", "train", "test", "a", "b"], [[0, 6, 2, 8, 0], [1, 3, 1, 0, 4], [2, 9, 3, 12, 1]])
    state = State()
    drive(make(tmp_path, class_table=table, graph_every=1), fake_plan(), state, 2, status="stopped")
    drive(make(tmp_path, class_table=table, graph_every=1), fake_plan(), state, 4)
    assert orders == [[0, 2, 1]] * 4
    assert client_order(None, 3) == [0, 1, 2]


def test_training_does_not_wait_for_wandb(tmp_path, monkeypatch):
    release, begin = threading.Event(), wandb.init

    def slow(**settings):
        assert release.wait(60)
        return begin(**settings)

    monkeypatch.setattr(wandb, "init", slow)
    told = []
    log, state, plan = make(tmp_path, announce=told.append), State(), fake_plan()
    log.on_federation_start(plan, state)
    for number in range(3):
        state.records.append(record_of(number))
        log.on_round_end(plan, state, state.records[-1], WATCH)  # returns, although W&B has not started
    assert (log.logger, told) == (None, [])
    release.set()
    log.on_federation_end(plan, state, "finished")
    found = read_back(tmp_path)
    assert [row["round"] for row in found.history] == [0, 1, 2]
    (facts,) = told
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert facts == {
        "id": found.runs[0].run_id, "mode": "offline", "project": "p", "group": "mnist s=0.1 jgesr",
        "sync": f"{wandb_program()} sync {folder}",
    }  # fmt: skip


def test_a_run_that_fails_while_wandb_starts_is_marked_failed(tmp_path):
    log, state = make(tmp_path), State()
    log.on_federation_start(fake_plan(), state)
    state.records.append(record_of(0))
    log.close(exit_code=1, reason="round 1: nothing usable arrived")
    found = read_back(tmp_path)
    assert found.exits == [1]
    assert found.alerts == [("run failed", "ERROR")]
    assert [row["round"] for row in found.history] == [0]
    log.close(exit_code=0)  # has ended: nothing to do


def test_alerts_tell_of_a_diverged_solver_once_and_of_an_early_stop(tmp_path):
    state = State()
    log, plan = make(tmp_path), fake_plan()
    log.on_federation_start(plan, state)
    for number in range(3):
        state.records.append(record_of(number))
        state.records[-1].info["reason"] = "diverged" if number else "converged"
        log.on_round_end(plan, state, state.records[-1], WATCH)
    log.on_federation_end(plan, state, "stopped")
    assert read_back(tmp_path).alerts == [("solver diverged", "ERROR"), ("run stopped early", "WARN")]
    drive(make(tmp_path / "well"), fake_plan(), State(), 1)
    assert read_back(tmp_path / "well").alerts == []


def test_final_models_and_graph_are_an_artifact_where_asked_for(tmp_path):
    drive(make(tmp_path / "without"), fake_plan(), State(), 2)
    assert {one.type for one in read_back(tmp_path / "without").artifacts} == {"run_table"}
    state = State()
    drive(make(tmp_path, artifacts=True), fake_plan(rounds=2), state, 2)
    (artifact,) = [one for one in read_back(tmp_path).artifacts if one.type == "model"]
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(files) == {"models.pt", "graph.npy"}
    kept = torch.load(files["models.pt"], weights_only=True)
    assert kept["weight"].tolist() == [[[0.0, 1.0, 2.0]], [[4.0, 5.0, 6.0]], [[8.0, 9.0, 10.0]]]
    assert kept["bias"].flatten().tolist() == [3.0, 7.0, 11.0]
    assert numpy.load(files["graph.npy"]).tolist() == graph_of(2).tolist()


def test_code_is_kept_where_asked_for(tmp_path):
    drive(make(tmp_path, save_code=True), fake_plan(), State(), 1)
    (artifact,) = [one for one in read_back(tmp_path).artifacts if one.type == "code"]
    assert "experiment.py" in " ".join(entry.path for entry in artifact.manifest.contents)


def test_labels_reach_wandb(tmp_path):
    labels = Labels("n", "p", "g", entity="team", job_type="ablation", notes="why", tags=("a", "b"))
    drive(make(tmp_path, labels=labels), fake_plan(), State(), 0)
    (run,) = read_back(tmp_path).runs
    assert (run.display_name, run.project, run.run_group, run.entity) == ("n", "p", "g", "team")
    assert (run.job_type, run.notes, list(run.tags)) == ("ablation", "why", ["a", "b"])


def test_the_command_that_sends_a_resumed_run_names_all_its_folders(tmp_path):
    folder = tmp_path / "a run"
    state, told = State(), []
    drive(make(folder), fake_plan(), state, 2, status="stopped")
    wandb.teardown()
    time.sleep(1.1)  # W&B names folders by the second
    drive(make(folder, announce=told.append), fake_plan(), state, 4)
    parts = sorted(str(path) for path in folder.glob("wandb/offline-run-*"))
    assert len(parts) == 2
    assert shlex.split(told[0]["sync"])[1:] == ["sync", *parts]
    done = subprocess.run([*shlex.split(told[0]["sync"])[:2], "--help"], capture_output=True, text=True, check=True)
    assert "offline" in done.stdout
    assert sync_command(folder, "another") == f"{wandb_program()} sync"


def test_offline_by_itself_says_why_and_how_to_send_it(tmp_path, caplog):
    drive(make(tmp_path, mode="auto"), fake_plan(), State(), 1)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert "no API key" in line
    assert f"`{wandb_program()} login` sets one" in line
    assert f"{wandb_program()} sync {folder}" in line


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


def test_the_summary_of_a_short_run_says_where_wandb_has_it(tmp_path):
    """Facts that come when the run has ended, as W&B starts beside it, still get into summary.json."""
    files = ResultFiles(tmp_path, {"name": "tiny"}, write_csv=False)
    state = State(round=1, records=[record_of(0), record_of(1)])
    files.add_facts(first=1)
    assert not (tmp_path / "summary.json").exists()
    files.write_summary(1, state, "running", "")
    assert json.loads((tmp_path / "summary.json").read_text())["first"] == 1
    files.add_facts(second=2)
    assert "second" not in json.loads((tmp_path / "summary.json").read_text())  # written with the next round
    files.write_summary(1, state, "finished", "")
    drive(make(tmp_path, announce=lambda facts: files.add_facts(wandb=dict(facts))), fake_plan(), state, 1)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["second"]) == ("finished", 2)
    assert written["wandb"]["id"] == (tmp_path / "wandb_run_id").read_text().split()[0]
    assert written["wandb"]["sync"].startswith(f"{wandb_program()} sync ")
