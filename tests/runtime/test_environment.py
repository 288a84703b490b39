import pytest

from jgesr_lightning.runtime import environment
from jgesr_lightning.runtime.environment import LaunchError, Seat, seat, settle

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "712345",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_nothing_set_is_the_first_process():
    assert seat({}) == Seat()


def test_the_whole_set_of_a_launcher_counts():
    assert seat(TORCHRUN) == Seat("torchrun", 3, 1, 1, 2, 2, "first", 29400)
    assert seat({name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}) == seat(TORCHRUN)
    assert seat(SRUN) == Seat("srun", 3, 1, 1, 2, 2, None, 15000 + 2345)
    assert seat(SRUN | {"SLURM_STEP_ID": "1"}).port != seat(SRUN).port  # two steps of a job meet at different places
    assert seat(SRUN | TORCHRUN).launcher == "torchrun"  # torchrun inside a job


def test_a_process_that_a_run_started_knows_its_place():
    given = {"JGESR_FIRST_PROCESS": "77", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "MASTER_PORT": "41000"}
    assert seat(given) == Seat(rank=2, local_rank=2, port=41000, started_by=77)
    assert not environment.is_first(given)
    assert settle(dict(given)) == ""


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("absent", [None, ""])
def test_half_a_set_of_torchruns_is_refused_by_name(name, absent):
    given = {key: value for key, value in TORCHRUN.items() if key != name} | ({} if absent is None else {name: ""})
    with pytest.raises(LaunchError, match=f"half set: TORCHELASTIC_RUN_ID is there, {name} is missing"):
        seat(given)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_half_a_set_of_sruns_is_refused_by_name(name):
    with pytest.raises(LaunchError, match=f"half set: SLURM_STEP_ID is there, {name} is missing"):
        seat({key: value for key, value in SRUN.items() if key != name})


@pytest.mark.parametrize(
    "given",
    [
        {"LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"NODE_RANK": "0", "MASTER_ADDR": "10.255.255.1"},
        {"MASTER_PORT": "tcp://10.0.0.1:80"},  # as Kubernetes sets it for a service called "master"
        {"MASTER_PORT": "70000"},
        {"LT_CLI_USED": "junk", "LT_DEVICES": "7"},
        {"RANK": ""},
    ],
)
def test_what_names_no_other_process_is_put_aside_with_a_line(given):
    left = dict(given) | {"PATH": "/bin", "SLURM_PROCID": "0"}
    line = settle(left)
    assert line == f"{', '.join(f'{k}={v}' for k, v in given.items())}: ignored, as no launcher started this process"
    assert "\n" not in line
    assert left == {"PATH": "/bin", "SLURM_PROCID": "0", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    assert settle(left) == ""
    assert seat(left) == Seat()


@pytest.mark.parametrize(
    "given",
    [{"RANK": "1"}, {"LOCAL_RANK": "1"}, {"NODE_RANK": "1"}, {"WORLD_SIZE": "2"}, {"SLURM_PROCID": "1"},
     {"LOCAL_WORLD_SIZE": "8"}, {"JSM_NAMESPACE_RANK": "3"}],
)  # fmt: skip
def test_what_names_other_processes_is_refused(given):
    ((name, value),) = given.items()
    with pytest.raises(LaunchError, match=rf"^{name}={value}: set as if .* or unset {name}$"):
        seat(given)
    assert environment.is_first(given)  # so that somebody says it


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "NODE_RANK"])
@pytest.mark.parametrize("junk", ["junk", "-1", "1.5", "٣", "1" * 5000, " "])
def test_junk_is_named(name, junk):
    with pytest.raises(LaunchError, match=f"^{name} is ") as caught:
        seat({name: junk})
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "change", [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"WORLD_SIZE": "5"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "0"},
               {"MASTER_PORT": "70000"}, {"MASTER_PORT": "http"}]
)  # fmt: skip
def test_contradictions_of_torchruns_are_refused(change):
    with pytest.raises(LaunchError, match=next(iter(change))):
        seat(TORCHRUN | change)


def test_sruns_tasks_do_not_hear_leftovers(capsys):
    given = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "LOCAL_RANK": "5"}
    assert settle(given) == "LOCAL_RANK=5: ignored, as srun started this process"
    assert "LOCAL_RANK" not in given
    assert settle(SRUN | {"LOCAL_RANK": "5"}) == ""  # the other tasks do not speak
