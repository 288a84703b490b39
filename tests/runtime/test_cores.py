"""How many cores a process counts on, by affinity and by the share that a container gives it."""

import os
from types import SimpleNamespace

import pytest
import torch

from jgesr_lightning.runtime import strategy
from jgesr_lightning.runtime.cores import cores
from jgesr_lightning.runtime.signals import StopRequest


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 64 cores, and what its files say."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)

    def write(groups, files):
        for path, text in {"proc/self/cgroup": groups, **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


MAX = "sys/fs/cgroup/cpu.max"
INNER = "sys/fs/cgroup/pods/one/cpu.max"
QUOTA, PERIOD = (f"sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_{name}_us" for name in ("quota", "period"))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {MAX: "200000 100000\n"}, 2),
        ("0::/\n", {MAX: "150000 100000\n"}, 2),  # a core and a half
        ("0::/\n", {MAX: "10000 100000\n"}, 1),
        ("0::/\n", {MAX: "max 100000\n"}, 64),
        ("0::/\n", {MAX: "9900000 100000\n"}, 64),
        ("0::/pods/one\n", {MAX: "max 100000\n", INNER: "300000 100000\n"}, 3),
        ("0::/pods/one\n", {"sys/fs/cgroup/pods/cpu.max": "400000 100000\n", INNER: "max 100000\n"}, 4),
        ("5:cpu,cpuacct:/docker\n1:name=systemd:/\n", {QUOTA: "250000\n", PERIOD: "100000\n"}, 3),
        ("5:cpu,cpuacct:/docker\n", {QUOTA: "-1\n", PERIOD: "100000\n"}, 64),
        ("", {}, 64),
        ("nothing known\n", {}, 64),
    ],
)
def test_the_smaller_of_cores_and_share_counts(machine, groups, files, expected):
    assert cores(machine(groups, files)) == expected


def test_without_files_of_linux_all_cores_count(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores(tmp_path) == 6


def test_this_machine_has_a_core():
    assert 1 <= cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("processes", "threads"), [(1, 3), (2, 1), (8, 1)])
def test_the_threads_of_all_processes_are_no_more_than_the_cores(monkeypatch, processes, threads):
    monkeypatch.setattr(strategy, "cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # to have the run's own setting taken back afterwards
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    environment = SimpleNamespace(creates_processes_externally=True, seat=None)
    launcher = strategy.Launcher(environment, processes, 1, StopRequest())
    try:
        assert launcher.launch(torch.get_num_threads) == threads
        assert os.environ["OMP_NUM_THREADS"] == str(threads)
    finally:
        torch.set_num_threads(before)
