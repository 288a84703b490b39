import importlib.util
import socket
import sys

import pytest
import torch

from jgesr_lightning.runtime import launch
from jgesr_lightning.runtime.environment import LaunchError
from jgesr_lightning.runtime.launch import Launch, build_fabric, plan
from jgesr_lightning.runtime.strategy import ClientParallelStrategy

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29400",
}
BATCH = {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "jgesr", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
STEP = BATCH | {
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.fixture(autouse=True)
def started_from_a_file(monkeypatch):
    """Let the tests' own process be a program that could be started again, which a worker of theirs is not."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets variables in an environment without any launcher's."""
    import os

    for key in list(os.environ):
        if key.startswith(("JGESR_FIRST", "SLURM_", "TORCHELASTIC_", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE", "LT_")):
            monkeypatch.delenv(key)

    def give(variables):
        for key, value in variables.items():
            monkeypatch.setenv(key, value)

    return give


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that sets the number of visible GPUs."""

    def give(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return give


def test_alone_it_starts_as_many_as_asked(environment, monkeypatch):
    environment({})
    monkeypatch.setattr(launch, "_available", lambda kind: 8)
    assert plan("cpu", 3, 1, 20) == Launch("cpu", 3, 1, "ourselves")
    assert plan("cpu", "auto", 1, 20).devices == 8
    assert plan("cpu", "auto", 1, 5).devices == 5  # never more processes than clients


def test_gpus_are_taken_where_there_are_some(environment, gpus):
    environment({})
    gpus(4)
    assert plan("auto", "auto", 1, 20) == Launch("cuda", 4, 1, "ourselves")
    assert plan("auto", 2, 1, 20).devices == 2
    with pytest.raises(LaunchError, match=r"runtime\.devices is 5, but 4 cuda devices are visible"):
        plan("gpu", 5, 1, 20)
    gpus(0)
    assert plan("auto", 2, 1, 20).accelerator == "cpu"
    with pytest.raises(LaunchError, match=r"use runtime\.accelerator=cpu"):
        plan("cuda", 1, 1, 20)


@pytest.mark.parametrize("variables", [{}, TORCHRUN, STEP], ids=["alone", "torchrun", "srun"])
def test_more_processes_than_clients_are_refused(environment, variables):
    environment(variables)
    with pytest.raises(LaunchError, match=r"processes for 1 clients.*runtime.devices=1"):
        plan("cpu", 2, 1, 1)


def test_several_machines_need_a_launcher(environment):
    environment({})
    with pytest.raises(LaunchError, match=r"srun, or on each machine with: torchrun --nnodes=2"):
        plan("cpu", 2, 2, 20)


def test_torchrun_decides(environment):
    environment(TORCHRUN)
    assert plan("cpu", "auto", 1, 20) == plan("cpu", 2, 2, 20) == Launch("cpu", 2, 2, "torchrun")
    with pytest.raises(LaunchError, match=r"torchrun started 2 processes a node.*--nproc-per-node=3"):
        plan("cpu", 3, 1, 20)
    with pytest.raises(LaunchError, match=r"set runtime\.num_nodes=2"):
        plan("cpu", 2, 3, 20)


def test_srun_decides(environment, gpus):
    gpus(2)
    environment(STEP)
    assert plan("auto", "auto", 1, 20) == Launch("cuda", 2, 1, "srun")
    with pytest.raises(LaunchError, match=r"set runtime.devices=2 \(or auto\), or start 4 \(--ntasks-per-node=4\)"):
        plan("cpu", 4, 1, 20)
    gpus(1)
    with pytest.raises(LaunchError, match=r"2 processes a node, but 1 GPUs.*--gpus-per-node, not --gpus-per-task"):
        plan("auto", "auto", 1, 20)


def test_srun_over_two_nodes(environment):
    environment(STEP | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2"})
    assert plan("cpu", "auto", 1, 20) == Launch("cpu", 2, 2, "srun")
    environment({"SLURM_NTASKS": "3"})
    with pytest.raises(LaunchError, match="give each node as many, with --ntasks-per-node"):
        plan("cpu", "auto", 1, 20)


def test_tasks_that_lightning_cannot_use_are_refused_with_a_hint(environment, monkeypatch):
    environment(STEP)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(LaunchError, match="srun was given --ntasks=2; use --ntasks-per-node=2"):
        plan("cpu", "auto", 1, 20)
    environment({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "4"})
    with pytest.raises(LaunchError, match="the SLURM job has --ntasks-per-node=4, but srun started 1"):
        plan("cpu", "auto", 1, 20)


def test_a_batch_script_without_srun(environment):
    environment(BATCH)
    assert plan("cpu", 2, 1, 20) == Launch("cpu", 2, 1, "ourselves")
    environment({"SLURM_NTASKS": "2"})
    with pytest.raises(LaunchError, match="this SLURM job has 2 tasks; start the program with srun"):
        plan("cpu", "auto", 1, 20)


@pytest.mark.parametrize("name", ["bash", "zsh", "interactive"])
def test_a_shell_in_a_job_starts_its_own_processes(environment, name):
    environment(BATCH | {"SLURM_JOB_NAME": name, "SLURM_STEP_ID": "0"})
    assert plan("cpu", 2, 1, 20) == Launch("cpu", 2, 1, "ourselves")
    environment({"SLURM_NTASKS": "8"})
    with pytest.raises(LaunchError, match=r"under the job name .*srun --job-name=train"):
        plan("cpu", "auto", 1, 20)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_salloc_shell_with_several_tasks_starts_its_own_processes(environment, step):
    environment(BATCH | {"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "8"} | step)
    assert plan("cpu", 2, 1, 20) == Launch("cpu", 2, 1, "ourselves")


@pytest.mark.parametrize(
    ("launcher", "variables", "place"),
    [
        ("ourselves", BATCH, (0, 0, 0, "127.0.0.1")),  # although Lightning would take this for a SLURM step
        ("torchrun", TORCHRUN | {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, (3, 1, 1, "first")),
        ("srun", STEP | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODELIST": "node[7-9]"}, (1, 1, 0, "node7")),
    ],
)
def test_fabric_is_told_where_this_process_sits(environment, launcher, variables, place):
    environment(variables)
    fabric = build_fabric(Launch("cpu", 2, 1, launcher), "32-true", [])
    assert isinstance(fabric.strategy, ClientParallelStrategy)
    told = fabric.strategy.cluster_environment
    assert (told.global_rank(), told.local_rank(), told.node_rank(), told.main_address) == place
    assert told.creates_processes_externally == (launcher != "ourselves")
    assert fabric.strategy.num_processes == 2


def test_a_port_of_the_users_that_is_taken_is_refused(environment):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environment({"MASTER_PORT": str(port)})
        with pytest.raises(LaunchError, match=f"MASTER_PORT is {port}, which cannot be had here.*in use"):
            plan("cpu", 2, 1, 20)
        assert plan("cpu", 1, 1, 20).devices == 1  # alone it needs none
    assert plan("cpu", 2, 1, 20).devices == 2


def test_a_notebook_starts_no_other_processes(environment, monkeypatch):
    environment({})
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert plan("cpu", "auto", 1, 20).devices == 1
    with pytest.raises(LaunchError, match=r"runtime\.devices is 2, but an interactive session"):
        plan("cpu", 2, 1, 20)


def test_a_process_of_a_pool_starts_no_others_but_a_cell_of_a_study_does(environment, monkeypatch):
    environment({})
    monkeypatch.setattr(launch, "_available", lambda kind: 8)
    monkeypatch.setattr(launch.multiprocessing, "parent_process", lambda: "the program that made the pool")
    assert plan("cpu", "auto", 1, 20).devices == 1
    with pytest.raises(LaunchError, match=r"runtime\.devices is 2, but .* a process of a pool, can start no others"):
        plan("cpu", 2, 1, 20)
    spec = importlib.util.find_spec("jgesr_lightning.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec, raising=False)  # as study/processes.py has it
    assert plan("cpu", "auto", 1, 20).devices == 8


def test_a_later_run_of_a_program_has_the_processes_of_an_earlier_one(environment, monkeypatch):
    environment({})
    monkeypatch.setattr(launch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(launch.dist, "get_world_size", lambda: 3)
    assert plan("cpu", "auto", 1, 20).devices == plan("cpu", 3, 1, 20).devices == 3
    for devices in (1, 2):
        with pytest.raises(LaunchError, match=f"is {devices}, but an earlier .* 3 processes.*runtime.devices=3, or"):
            plan("cpu", devices, 1, 20)
    with pytest.raises(LaunchError, match="3 processes, which stay: start this run from a program of its own"):
        plan("cpu", "auto", 1, 2)


def test_what_is_put_aside_is_said_once(environment, capsys):
    environment({"LOCAL_RANK": "0", "MASTER_ADDR": "10.255.255.1"})
    for _ in range(2):
        plan("cpu", 1, 1, 20)
    expected = "LOCAL_RANK=0, MASTER_ADDR=10.255.255.1: ignored, as no launcher started this process\n"
    assert capsys.readouterr().err == expected
