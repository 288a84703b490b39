"""One run shared out over processes: the same numbers, one set of files, and an end when one of them is lost."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jgesr_lightning.aggregators import aggregator_names
from jgesr_lightning.runtime import checkpoint, launch, rendezvous, strategy
from jgesr_lightning.runtime.sharding import Sharding, assign
from tests.processes import cpu_seconds, models, together, write_config

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parent.parent
WORLDS = (1, 2, 4)
SETTINGS = {"cfl": ["aggregator.warmup_rounds=0"]}
VARIANTS = {
    "fedavg": ["aggregator.name=fedavg"],
    "fedavg_part": ["aggregator.name=fedavg", "participation=0.5", "channel.missing_rate=0.1"],
    "jgesr": ["aggregator.name=jgesr"],
    "jgesr_layer": ["aggregator.name=jgesr", "aggregator.graph_scope=layer"],
    "jgesr_float32": ["aggregator.name=jgesr", "channel.missing_rate=0.1", "runtime.precision=32-true"],
    "cfl_down": ["aggregator.name=cfl", *SETTINGS["cfl"], "downlink.noise=0.3", "downlink.missing_rate=0.2"],
    **{
        f"{name}_missing": [f"aggregator.name={name}", "channel.missing_rate=0.1", *SETTINGS.get(name, [])]
        for name in aggregator_names()
    },
}
"""Runs that are the same on any number of processes; each method with missing entries, all but one in float64."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of all runs, named by variant and number of processes; the runs of one number share their processes."""
    folder = tmp_path_factory.mktemp("processes")
    config = write_config(folder)
    for world in WORLDS:
        devices = "runtime.devices=auto" if world > 1 else "runtime.devices=1"
        argv = [["train", config, f"name={name}_{world}", devices, *extra] for name, extra in VARIANTS.items()]
        started = together(world, argv, folder / f"logs_{world}")
        assert [process.wait() for process in started] == [0] * world, started[0].output
        assert all(process.output == "" for process in started[1:])  # the first one alone speaks
    return folder / "runs"


def test_these_tests_share_a_worker(request):
    """Else each worker starts the same processes over again, which has doubled the time of all tests unnoticed."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs --dist loadgroup, as `make test` has it")
    assert request.node.nodeid.endswith("@test_processes")


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_models_on_any_number_of_processes(runs, name, world):
    one, several = models(runs / f"{name}_1"), models(runs / f"{name}_{world}")
    assert (one - several).abs().max() <= TOLERANCES[one.dtype]
    summary = json.loads((runs / f"{name}_{world}" / "summary.json").read_text())
    assert (summary["status"], summary["processes"]) == ("finished", world)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_the_same_accuracies_and_one_set_of_files(runs, world):
    def rows(name):
        with open(runs / name / "clients.csv") as file:
            return [{key: value for key, value in row.items() if "loss" not in key} for row in csv.DictReader(file)]

    assert rows(f"fedavg_part_{world}") == rows("fedavg_part_1")
    files = [sorted(path.name for path in (runs / f"fedavg_{w}").iterdir()) for w in (1, world)]
    assert files[0] == files[1]
    saved = sorted(path.name for path in checkpoint.newest(runs / f"fedavg_{world}" / "checkpoint").iterdir())
    assert saved == ["digests.json", *(f"models_{rank:05d}.pt" for rank in range(world)), "state.pt"]


def test_no_process_holds_more_than_its_share(runs):
    folder = checkpoint.newest(runs / "fedavg_4" / "checkpoint")
    rows = [torch.load(path, weights_only=True)["models"].shape[0] for path in sorted(folder.glob("models_*"))]
    assert sum(rows) == 5
    assert max(rows) == 2
    owners = assign([1.0] * 5, 4)
    widths = [Sharding(owners, 34_622, rank, torch.device("cpu")).columns for rank in range(4)]
    assert max(part.stop - part.start for part in widths) <= -(-34_622 // 4)


def test_a_broken_client_is_left_out_on_every_process(tmp_path):
    config = write_config(tmp_path)
    argv = [
        ["train", config, "name=drop", "runtime.devices=auto"],
        ["train", config, "name=raise", "nonfinite=raise", "runtime.devices=auto"],
    ]
    started = together(2, argv, tmp_path, "break_client_one_in_round_two")
    assert [process.wait() for process in started] == [1, 0]
    summaries = {
        name: json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("drop", "raise")
    }
    assert summaries["drop"]["status"] == "finished"
    assert summaries["drop"]["dropped_uploads"] == {"2": [1]}
    assert summaries["raise"]["status"] == "failed"
    assert checkpoint.newest(tmp_path / "runs" / "raise" / "checkpoint").name == "round_00001"
    assert "not finite, left out: clients [1]" in started[0].output
    saved = checkpoint.newest(tmp_path / "runs" / "raise" / "checkpoint")
    assert started[0].output.endswith(
        f"error: round 2: the upload of client 1 is not finite (nonfinite=raise); "
        f"the last checkpoint is {saved} (resume=auto goes on from there)\n"
    )
    assert started[1].output == ""
    assert torch.isfinite(models(tmp_path / "runs" / "drop")).all()


def test_processes_leave_each_other_in_order_after_what_ended_well(tmp_path):
    """Else a thread of gloo's may outlive the interpreter, which aborts a process that has done all there was."""
    argv = ["train", write_config(tmp_path), "runtime.devices=auto", "resume=auto"]
    for place in ("first", "done"):  # where the second finds nothing to do
        started = together(2, argv, tmp_path / place, "say_what_is_left_for_the_end")
        assert [process.wait() for process in started] == [0, 0]
        assert all(process.output.count("at exit: _destroy_dist_connection") == 1 for process in started)


def test_a_failure_of_the_first_process_ends_all_with_one_line(tmp_path):
    argv = ["train", write_config(tmp_path), "runtime.devices=auto"]
    started = together(2, argv, tmp_path, "fail_to_write_summaries")
    assert [process.wait(60) for process in started] == [1, 0]
    lines = [line for process in started for line in process.output.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]


def test_a_fault_on_another_process_is_told_and_recorded_by_the_first(tmp_path):
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "traceback.1.txt").write_text("of an earlier attempt")
    started = together(
        2, ["train", write_config(tmp_path), "runtime.devices=auto"], tmp_path, "fail_on_the_second_process"
    )
    assert [process.wait() for process in started] == [1, 0]
    last = started[0].output.splitlines()[-1]
    assert last.startswith("error: lost another process of this run")
    assert f"; process 1: ZeroDivisionError: division by zero; where it happened: {run}/traceback.1.txt; " in last
    assert last.endswith(f"the last checkpoint is {run}/checkpoint/round_00001 (resume=auto goes on from there)")
    assert "error" not in started[1].output
    assert all("Traceback" not in process.output for process in started)
    assert (run / "traceback.1.txt").read_text().startswith("Traceback")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds_done"]) == ("failed", 1)


def test_a_lost_process_ends_the_others_with_one_line(tmp_path):
    argv = ["train", write_config(tmp_path, rounds=100_000), "runtime.devices=auto"]
    first, second = together(2, argv, tmp_path)
    first.wait_for("round 2/")
    os.kill(second.pid, signal.SIGKILL)
    assert first.wait(60) == 1
    assert first.output.splitlines()[-1].startswith("error: lost another process of this run")
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert summary["status"] == "failed"


def test_a_refusal_reaches_all_processes(tmp_path):
    config = write_config(tmp_path, rounds=1)
    done = ["train", config, "runtime.devices=auto"]
    argv = [done, [*done, "resume=auto"], [*done, "resume=auto", "seed=4"]]
    started = together(2, argv, tmp_path)
    assert [process.wait() for process in started] == [2, 0]
    assert "is finished already" in started[0].output
    assert "seed was 0, is 4" in started[0].output.splitlines()[-1]
    assert started[1].output == ""


def test_shares_that_differ_between_processes_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, numpy as np\n"
        "def drawn(labels, num_clients, seed):\n"
        "    order = np.random.default_rng(os.getpid()).permutation(len(labels))\n"
        "    return np.array_split(order, num_clients)\n"
    )
    config = write_config(tmp_path, rounds=1)
    started = together(
        2, [["train", config, "runtime.devices=auto", f"data.partition={tmp_path}/mine.py:drawn"]], tmp_path
    )
    assert started[0].wait() == 2
    assert "error: the processes have different data, or shares of them" in started[0].output
    assert "drawn" in started[0].output.splitlines()[-1]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Two runs of two processes on the command line: started by ourselves with W&B offline, and by torchrun."""
    folder = tmp_path_factory.mktemp("launched")
    config = write_config(folder)
    overrides = ["local.lr=0.05", "aggregator.name=fedprox", "--local.proximal_mu=0.1"]
    program = ["-m", "jgesr_lightning", "train", str(config), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
    commands = {
        "ours": [sys.executable, *program, "runtime.devices=2", "logging.wandb=true", "logging.wandb_mode=offline"],
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(*program, "runtime.devices=auto"),
        ],
    }
    leftovers = {"ours": {"LOCAL_RANK": "0", "MASTER_ADDR": "10.255.255.1"}, "torchrun": {}}  # as containers set them
    ends = {}
    for name, command in commands.items():
        ends[name] = subprocess.run(
            [*command, f"name={name}"],
            env=environment | leftovers[name],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    alone = together(1, ["train", config, *overrides, "name=alone"], folder)[0]
    assert alone.wait() == 0
    return folder / "runs", ends


@pytest.mark.parametrize("name", ["ours", "torchrun"])
def test_started_by_ourselves_and_by_torchrun(launched, name):
    runs, ends = launched
    assert ends[name].returncode == 0, ends[name].stderr
    assert "terminate called" not in ends[name].stderr
    assert ends[name].stderr.count("results: ") == 1
    assert "2 x cpu" in ends[name].stderr
    assert "Warning" not in ends[name].stderr
    assert "distributed_backend" not in ends[name].stdout + ends[name].stderr
    # the settings reached both processes: else their clients would have trained otherwise
    assert (models(runs / name) - models(runs / "alone")).abs().max() <= 1e-10


def test_what_containers_set_is_put_aside_with_a_line(launched):
    _, ends = launched
    line = "LOCAL_RANK=0, MASTER_ADDR=10.255.255.1: ignored, as no launcher started this process"
    assert ends["ours"].stderr.splitlines().count(line) == 1
    assert "ignored" not in ends["torchrun"].stderr


def started_by(pid):
    """Return the processes of its run that the process `pid` has started."""

    def environment(child):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        return []

    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in children if f"JGESR_FIRST_PROCESS={pid}".encode() in environment(child)]


def program(config):
    """Start a run that starts another process."""
    command = [sys.executable, "-m", "jgesr_lightning", "train", str(config), "runtime.devices=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_what_meets_one_process_ends_the_long_round_of_the_other(tmp_path, number):
    first = program(write_config(tmp_path, local={"epochs": 20_000}))
    while not first.stdout.readline().startswith("round 0/"):
        assert first.poll() is None
    time.sleep(0.5)
    (other,) = started_by(first.pid)
    os.kill(int(other) if number == signal.SIGKILL else first.pid, number)
    try:
        output, _ = first.communicate(timeout=strategy.GRACE_SECONDS)
    finally:
        first.kill()
    assert first.returncode == 1
    told = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    if number == signal.SIGKILL:
        assert output.startswith("error: lost another process of this run") and output.count("\n") == 1
        assert (told["status"], told["reason"]) == ("failed", output.removeprefix("error: ").strip())
    else:
        assert output.startswith("stopped by SIGTERM after round 0 of 3, saved")
        assert (told["status"], told["reason"]) == ("stopped", "SIGTERM")


def test_an_interrupt_while_others_start_ends_all_at_once(tmp_path):
    first = program(write_config(tmp_path))
    end = time.monotonic() + 120
    while not (others := started_by(first.pid)):
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    before = cpu_seconds(first.pid)
    os.kill(first.pid, signal.SIGINT)
    while os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    # neither are all imports carried on with, nor is PyTorch taken apart; how long that lasts hangs on the machine
    assert cpu_seconds(first.pid) - before < 1
    output, _ = first.communicate(timeout=60)
    assert (first.returncode, output) == (130, "interrupted\n")
    cmdline, end = Path(f"/proc/{others[0]}/cmdline"), time.monotonic() + 10
    while cmdline.exists() and cmdline.read_bytes():
        assert time.monotonic() < end, "the other process runs on"
        time.sleep(0.05)


def test_one_wandb_run_for_all_processes(launched):
    runs, _ = launched
    assert len(list((runs / "ours" / "wandb").glob("offline-run-*"))) == 1
    assert not (runs / "torchrun" / "wandb").exists()


def test_the_first_process_ends_where_another_failed_and_it_does_not_notice(monkeypatch, capsys):
    class Child:
        def __init__(self, status):
            self.status, self.killed = status, False

        def poll(self):
            return self.status

        def kill(self):
            self.killed = True

    ended = []
    monkeypatch.setattr(strategy, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(strategy.os, "_exit", ended.append)
    strategy.watch_children([Child(0), Child(0)])
    assert ended == []
    children, said = [Child(None), Child(-9)], []
    with strategy.last_words(lambda reason: 1 / 0), strategy.last_words(said.append):
        strategy.watch_children(children)
    assert ended == [1]
    assert children[0].killed
    assert said == ["process 2 ended with status -9"]
    assert capsys.readouterr().err == "error: process 2 ended with status -9; so does everything\n"


def test_another_process_ends_with_the_one_that_started_it(monkeypatch):
    ended = []
    monkeypatch.setattr(strategy.os, "_exit", ended.append)
    monkeypatch.setattr(strategy, "POLL_SECONDS", 0.0)
    parents = iter([7, 7, 1])
    monkeypatch.setattr(strategy.os, "getppid", lambda: next(parents))
    strategy.watch_parent(7)
    assert ended == [1]
    assert list(parents) == []


def test_timeouts_are_long_once_everybody_is_there():
    waits = [rendezvous.MEET_SECONDS, launch.READY_SECONDS, launch.COLLECTIVE_TIMEOUT.total_seconds()]
    assert waits == sorted(waits)
    assert waits[0] == launch.CONNECT_TIMEOUT.total_seconds() == 120
