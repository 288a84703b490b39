"""Cells in forks of a warm process: equal to runs by themselves, started at once, and signals reach them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jgesr_lightning.cli import main
from jgesr_lightning.study import processes
from jgesr_lightning.study.processes import Forked, Place, default_workers, training, visible_gpus
from jgesr_lightning.study.runner import run_cells
from tests.processes import cpu_seconds
from tests.study.studies import ROOT, TWO, cells_of, quiet, write_study

KINDS = "methods: {local: {}, jgesr: {}}\ndata: [synthetic]\nsettings: {data.fraction: 0.1}\n"
UNTIMED = ("seconds", "aggregation", "versions", "config", "wandb")

forks = pytest.mark.skipif(not processes.CAN_FORK, reason="cells are forked on Linux alone")


def rows(folder, name):
    """Return a table without its columns of seconds."""
    lines = [line.split(",") for line in (folder / name).read_text().splitlines()]
    kept = [at for at, column in enumerate(lines[0]) if "seconds" not in column]
    return [[line[at] for at in kept] for line in lines]


def untimed(values):
    return {key: value for key, value in values.items() if "seconds" not in key}


@forks
def test_forked_cells_equal_runs_by_themselves(tmp_path):
    cells = cells_of(tmp_path, KINDS)
    outcome = run_cells(cells, training(main, workers=2), quiet, workers=2)
    assert sorted(outcome.finished) == sorted(cell.name for cell in cells), outcome
    for cell in cells:
        log = (cell.folder.parent / "logs" / f"{cell.name}.log").read_text()
        assert "round 2/2" in log and "results: " in log
        alone = tmp_path / "alone" / cell.name
        arguments = [text for text in cell.overrides if not text.startswith("output_dir=")]
        assert main(["train", cell.base, *arguments, f"output_dir={tmp_path / 'alone'}"]) == 0
        for table in ("metrics.csv", "clients.csv"):
            assert rows(cell.folder, table) == rows(alone, table)
    # a summary that was damaged is made anew from the checkpoint
    sound = cells[0].summary()
    (cells[0].folder / "summary.json").write_text('{"status": "finished"}')
    again = run_cells(cells, training(main, workers=1), quiet)
    assert sorted(again.finished) == sorted(outcome.finished), again
    for key in ("last", "clients", "config"):
        assert untimed(cells[0].summary()[key]) == untimed(sound[key])


@forks
def test_the_second_cell_starts_at_once(tmp_path):
    cells = cells_of(tmp_path, KINDS + "seeds: [0, 1]\n")
    start, log = training(main, workers=1), tmp_path / "second.log"
    run_cells(cells[:1], start, quiet)
    child, end = start(cells[1], Place(log)), time.monotonic() + 60
    while not (log.exists() and "parameters" in log.read_text()):  # its first line: data and network are there
        assert time.monotonic() < end
        time.sleep(0.01)
    taken = cpu_seconds(child.pid)
    while child.poll() is None:
        time.sleep(0.01)
    assert child.poll() == 0
    assert taken < 2  # importing alone takes more; this is some 0.2 s


@forks
def test_the_warm_process_computes_nothing_and_leaves_cuda_alone():
    program = """
import os, torch
def touched(*_, **__):
    raise SystemExit("CUDA was asked")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
torch._C._cuda_getDeviceCount = touched
from jgesr_lightning.study.processes import warm
before = len(os.listdir("/proc/self/task"))
warm(wandb=True)
assert not torch.cuda.is_initialized()
print("threads", before, len(os.listdir("/proc/self/task")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] in (["1", "1"], ["2", "2"])  # one more may be numpy's, from its import on


def program(text, **environment):
    """Run a program of somebody's with a number of threads that it chooses itself."""
    here = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, env=here | environment, timeout=240
    )


COMPUTED = """
import torch
torch.set_num_threads(2)
torch.ones(300, 300) @ torch.ones(300, 300)
torch.ones(100_000).sum()
"""


@forks
@pytest.mark.processes
def test_a_study_within_a_program_that_has_computed_does_not_hang_and_gives_the_same(tmp_path):
    path = write_study(tmp_path, "methods: [jgesr]\ndata: [synthetic]\nsettings: {data.fraction: 0.05}\n")
    study = "import sys; from jgesr_lightning.cli import main; sys.exit(main(['study', {!r}, {!r}, '--workers', '1']))"
    for place, before in (("within", COMPUTED), ("alone", "")):
        # threads that wait asleep: they are to be there, not to take the cores from others
        done = program(before + study.format(str(path), f"output_dir={tmp_path / place}"), OMP_WAIT_POLICY="passive")
        assert done.returncode == 0, done.stderr
    (cell,) = (folder for folder in (tmp_path / "alone" / "tiny").iterdir() if (folder / "summary.json").is_file())
    for table in ("metrics.csv", "clients.csv"):
        assert rows(tmp_path / "within" / "tiny" / cell.name, table) == rows(cell, table)


@forks
def test_a_fork_is_safe_unless_threads_or_cuda_would_be_missing_in_it():
    done = program(f"""
import threading, numpy, torch
from jgesr_lightning.study import processes
told = []
numpy.ones((300, 300)) @ numpy.ones((300, 300))  # its threads handle forks
told.append(processes.can_fork())
processes.has_gpu = lambda: True
torch.cuda._is_in_bad_fork = lambda: True
told.append(processes.can_fork())
torch.cuda._is_in_bad_fork = lambda: False
told.append(processes.can_fork())
stay = threading.Event()
threading.Thread(target=stay.wait).start()  # no cell would wait for this one
told.append(processes.can_fork())
{COMPUTED}
told.append(processes.can_fork())
print(*told)
stay.set()
""")
    assert done.stdout.split() == ["True", "False", "True", "True", "False"], done.stderr


@pytest.mark.parametrize("workers", [1, 3])
def test_a_cell_of_its_own_program_has_the_threads_the_gpu_and_the_path_of_a_fork(tmp_path, monkeypatch, workers):
    given = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    monkeypatch.setattr(processes, "visible_gpus", lambda environment: ["4", "7"])
    monkeypatch.setattr(sys, "path", ["", "/somebodys", *sys.path])
    monkeypatch.setattr(processes.subprocess, "Popen", lambda command, **rest: given.append((command, rest["env"])))
    (cell,) = cells_of(tmp_path, "methods: [local]\ndata: [synthetic]\n")
    training(main, workers, fork=False)(cell, Place(tmp_path / "log", slot=workers - 1))
    command, environment = given[0]
    assert command[1:5] == ["-m", "jgesr_lightning", "train", cell.base]
    assert "WANDB_RUN_ID" not in environment and environment["PYTHONPATH"].startswith("/somebodys:")
    alone = ("1", "4") if workers == 3 else (None, None)
    assert (environment.get("OMP_NUM_THREADS"), environment.get("CUDA_VISIBLE_DEVICES")) == alone
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    training(main, workers, fork=False)(cell, Place(tmp_path / "log"))
    assert given[1][1]["OMP_NUM_THREADS"] == "5"


@forks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_never_lost_between_fork_and_the_childs_own_handlers(number, capfd):
    former = signal.signal(number, lambda *_: None)  # as a study's, which the child inherits
    try:
        for _ in range(10):
            child = Forked(lambda: time.sleep(30) or 0)
            os.kill(child.pid, number)
            end = time.monotonic() + 20
            while child.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.005)
            assert child.poll() == -number
    finally:
        signal.signal(number, former)
    assert capfd.readouterr().err == ""  # no traceback


@forks
def test_each_cell_has_a_wandb_run_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    cells = cells_of(tmp_path, TWO)
    run_cells(cells, training(lambda arguments: print("id", os.environ.get("WANDB_RUN_ID")), workers=1), quiet)
    assert [(cell.folder.parent / "logs" / f"{cell.name}.log").read_text() for cell in cells] == ["id None\n"] * 2


@forks
def test_a_cell_that_crashes_ends_alone(tmp_path):
    cells = cells_of(tmp_path, "methods: {local: {}, fedavg: {}}\ndata: [synthetic]\n")

    def run(arguments):
        print("on the way")
        if "aggregator.name=local" in arguments:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("unforeseen")

    outcome = run_cells(cells, training(run, workers=1), quiet)
    assert outcome.failed == {
        cells[0].name: "ended by SIGKILL: on the way",
        cells[1].name: "exit status 1: RuntimeError: unforeseen",
    }


@forks
def test_no_cell_leaves_temporary_files_whatever_ends_it_and_its_study(tmp_path, monkeypatch):
    (here := tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    cells = cells_of(tmp_path, "methods: {local: {}, fedavg: {}, cfl: {}}\ndata: [synthetic]\n")

    def run(arguments):
        print(tempfile.mkdtemp(), os.environ["TMPDIR"], flush=True)  # what a library leaves to the end of the program
        if "aggregator.name=local" in arguments:
            os.kill(os.getpid(), signal.SIGKILL)
        if "aggregator.name=fedavg" in arguments:
            raise RuntimeError("unforeseen")
        return 0

    start = training(run, workers=1)
    run_cells(cells[:2], start, quiet)
    assert list(here.iterdir()) == []
    child = start(cells[2], Place(tmp_path / "log"))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # nobody looks after it
    assert list(here.iterdir()) == []
    assert child.poll() == 0
    logs = [tmp_path / "log", *(cells[0].folder.parent / "logs").iterdir()]
    for made, place in (log.read_text().splitlines()[0].split() for log in logs):
        assert Path(made).parent == Path(place) and Path(place).parent == here


@forks
def test_a_cell_looks_like_a_train_command_and_holds_no_other_cells_lock(tmp_path):
    (cell,) = cells_of(tmp_path, "methods: [local]\ndata: [synthetic]\n")
    read, write = os.pipe()
    mine, pipe = os.dup(write), os.fstat(write).st_ino

    def is_the_pipe(descriptor):
        with contextlib.suppress(OSError):
            return os.fstat(descriptor).st_ino == pipe
        return False

    def run(arguments):
        held = [is_the_pipe(descriptor) for descriptor in (mine, write)]
        found = {
            "argv": sys.argv[1:4], "module": sys.modules["__main__"].__spec__.name, "held": held,
            "session": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"),
            "file": Path(sys.modules["__main__"].__file__).name,
        }  # fmt: skip
        print(json.dumps(found))
        return 0

    child = training(run, workers=1)(cell, Place(tmp_path / "log", [mine], foreign=[write]))
    while child.poll() is None:
        time.sleep(0.01)
    found = json.loads((tmp_path / "log").read_text())
    assert found == {
        "argv": ["train", cell.base, "data.name=synthetic"], "module": "jgesr_lightning.__main__",
        "held": [True, False], "session": True, "stdin": os.devnull, "file": "__main__.py",
    }  # fmt: skip
    for descriptor in (read, write, mine):
        os.close(descriptor)


def test_workers_where_nobody_says(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: 8)
    monkeypatch.setattr(processes, "has_gpu", lambda: False)

    def cells(devices="auto", accelerator="auto", count=20, clients=20):
        runtime = SimpleNamespace(devices=devices, accelerator=accelerator, num_nodes=1)
        return [SimpleNamespace(config=SimpleNamespace(runtime=runtime, clients=clients))] * count

    assert default_workers(cells()) == 8
    assert default_workers(cells(count=3)) == 3
    assert default_workers(cells(clients=4)) == 4  # as many processes as one run would have had
    assert default_workers(cells(devices=2)) == 1
    assert default_workers(cells(accelerator="cuda")) == 1
    monkeypatch.setattr(processes, "has_gpu", lambda: True)
    assert default_workers(cells()) == 1
    assert default_workers(cells(accelerator="cpu")) == 8


def test_gpus_that_may_be_used(monkeypatch):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}) == ["2", "GPU-abc"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setattr(processes.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    assert visible_gpus({}) == ["0", "1"]


@forks
@pytest.mark.parametrize("workers", [1, 3])
def test_cells_that_share_the_machine_have_one_thread(tmp_path, monkeypatch, workers):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processes, "visible_gpus", lambda environment: ["4", "7"])
    (cell,) = cells_of(tmp_path, "methods: [local]\ndata: [synthetic]\n")
    before = torch.get_num_threads()

    def run(arguments):
        print(torch.get_num_threads(), os.environ.get("CUDA_VISIBLE_DEVICES"), arguments[-1])
        return 0

    child = training(run, workers)(cell, Place(tmp_path / "log", slot=workers - 1))
    while child.poll() is None:
        time.sleep(0.01)
    threads, gpu, last = (tmp_path / "log").read_text().split()
    if workers == 1:
        assert (int(threads), gpu, last) == (before, "None", "resume=auto")
    else:
        assert (int(threads), gpu, last) == (1, "4", "runtime.devices=1")  # the third of two GPUs is the first again
    assert torch.get_num_threads() == before
