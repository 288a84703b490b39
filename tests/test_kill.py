"""Runs that are stopped, killed, or whose disk is full: what they leave, and that they end as if nothing had been."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch

from jgesr_lightning.runtime import checkpoint
from tests.processes import Started, models, together, write_config

pytestmark = pytest.mark.processes
ROUNDS = 12
KILLS = {1: 4, 2: 2}
# state that lives on: clusters, graphs, participation, missing entries
HARD = {
    "clients": 6,
    "participation": 0.7,
    "channel": {"noise": 0.1, "missing_rate": 0.1},
    "aggregator": {"name": "cfl", "warmup_rounds": 1},
    "logging": {"wandb": False, "graph_every": 2},
}


def train(folder, *settings, breaking=None, log="log.txt", **changes):
    """Start a run in `folder` and return its process."""
    return Started(["train", write_config(folder, **changes), *settings], folder / log, breaking=breaking)


def summary(folder):
    return json.loads((folder / "runs" / "tiny" / "summary.json").read_text())


def files(folder):
    """Return what a run found out, apart from seconds and the folder's own name."""
    run = folder / "runs" / "tiny"
    state = checkpoint.read_shared(checkpoint.newest(run / "checkpoint"))
    records = [
        {
            "metrics": {name: value for name, value in record["metrics"].items() if "seconds" not in name},
            "clients": record["clients"],
        }
        for record in state["records"]
    ]
    return repr(records), (run / "clients.csv").read_text(), state["aggregator"], list(state["graphs"])


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bits(tmp_path, world):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    changes = {**HARD, "rounds": ROUNDS, "runtime": {"accelerator": "cpu", "devices": "auto" if world > 1 else 1}}

    def start(folder):
        logs = folder / f"logs_{len(list(folder.glob('logs_*')))}"
        return together(world, ["train", write_config(folder, **changes), "resume=auto"], logs)

    assert [process.wait() for process in start(straight)] == [0] * world
    draw = random.Random(world)
    for first_round in sorted(draw.sample(range(1, ROUNDS), KILLS[world])):
        former = checkpoint.newest(broken / "runs" / "tiny" / "checkpoint")  # quick rounds: it may be past that one
        reached = 0 if former is None else int(former.name.removeprefix("round_"))
        processes = start(broken)
        processes[0].wait_for(f"round {max(first_round, reached + 1)}/")
        time.sleep(draw.uniform(0, 0.1))
        for process in processes:
            process.process.kill()
        ends = [process.wait() for process in processes]
        assert -signal.SIGKILL in ends, "the run was too short for this test"
    assert [process.wait() for process in start(broken)] == [0] * world
    assert torch.equal(models(broken / "runs" / "tiny"), models(straight / "runs" / "tiny"))
    assert files(broken) == files(straight)
    assert summary(broken)["status"] == "finished"
    leftovers = [path for path in broken.rglob("*") if path.name.endswith((".tmp", ".partial"))]
    assert all(path.parent.name != "checkpoint" for path in leftovers)
    assert not (broken / "runs" / "tiny.1").exists()


def test_killed_between_any_two_steps_of_writing_it_ends_with_the_same_bits(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    changes = {**HARD, "rounds": 2}
    assert train(straight, **changes).wait() == 0
    # every place in turn, in one run: each time it is begun again it gets a little further than before
    for step in range(2, 120, 4):
        one = Started(
            ["train", write_config(broken, **changes), "resume=auto"], broken / f"log_{step}.txt", {"STEP": str(step)},
            "die_at_a_step_of_writing",
        )  # fmt: skip
        if one.wait() == 0:
            break
        assert one.process.exitcode == -signal.SIGKILL, one.output
    else:
        raise AssertionError("the run never got to its end")
    assert step > 20
    assert torch.equal(models(broken / "runs" / "tiny"), models(straight / "runs" / "tiny"))
    assert files(broken) == files(straight)


def test_killed_between_the_last_checkpoint_and_the_summary_it_still_finishes(tmp_path):
    assert train(tmp_path, rounds=2).wait() == 0
    path = tmp_path / "runs" / "tiny" / "summary.json"
    path.write_text(json.dumps(summary(tmp_path) | {"status": "running"}))
    assert train(tmp_path, "resume=auto", rounds=2).wait() == 0
    assert summary(tmp_path)["status"] == "finished"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT], ids=lambda number: number.name
)
def test_a_signal_stops_at_the_next_safe_point_with_a_checkpoint(tmp_path, number):
    run = train(tmp_path, rounds=100_000)
    run.wait_for("round 2/")
    os.kill(run.pid, number)
    assert run.wait(60) == 1
    told = summary(tmp_path)
    assert (told["status"], told["reason"]) == ("stopped", number.name)
    assert told["rounds_done"] >= 2
    assert checkpoint.newest(tmp_path / "runs" / "tiny" / "checkpoint").name == f"round_{told['rounds_done']:05d}"
    assert f"stopped by {number.name} after round {told['rounds_done']} of 100000, saved" in run.output
    assert "Traceback" not in run.output


def test_a_signal_to_one_process_stops_all(tmp_path):
    argv = ["train", write_config(tmp_path, rounds=100_000), "runtime.devices=auto"]
    first, second = together(2, argv, tmp_path)
    first.wait_for("round 1/")
    os.kill(second.pid, signal.SIGUSR1)
    assert (first.wait(60), second.wait(60)) == (1, 0)
    assert summary(tmp_path)["status"] == "stopped"
    assert "stopped by another process after round" in first.output


def test_a_second_interrupt_stops_at_once(tmp_path):
    run = train(tmp_path, rounds=3, breaking="train_for_ever")
    run.wait_for("training for ever")
    os.kill(run.pid, signal.SIGINT)
    time.sleep(0.5)
    assert run.process.is_alive()  # the safe point after the client never comes
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(60) == 130
    assert run.output.splitlines()[-1] == "interrupted"
    assert "Traceback" not in run.output


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Folder of a run of two rounds."""
    folder = tmp_path_factory.mktemp("stopped")
    assert train(folder, rounds=2).wait() == 0
    return folder


def copy_of(stopped, tmp_path):
    run = tmp_path / "runs" / "tiny"
    run.parent.mkdir()
    shutil.copytree(stopped / "runs" / "tiny", run)
    return run


@pytest.mark.parametrize("name", ["state.pt", "models_00000.pt"])
def test_where_no_checkpoint_is_whole_it_is_one_clear_line(stopped, tmp_path, name):
    run = copy_of(stopped, tmp_path)
    for path in (run / "checkpoint").glob(f"round_*/{name}"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = sorted(run.rglob("*"))
    again = train(tmp_path, "resume=auto", rounds=3)
    assert again.wait() in (1, 2)
    errors = [line for line in again.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"{name} is damaged" in errors[0] and "without resume" in errors[0]
    assert "Traceback" not in again.output
    assert sorted(run.rglob("*")) == before


def test_one_flipped_bit_sends_it_back_to_the_checkpoint_before_and_to_the_same_bits(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    path = checkpoint.newest(run / "checkpoint") / "models_00000.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = train(tmp_path, "resume=auto", rounds=2)
    assert again.wait() == 0
    lines = again.output.splitlines()
    before = run / "checkpoint" / "round_00001"
    assert f"{path} is damaged (its digest is not that of what was written): passed over, {before} is used" in lines
    assert f"going on from {before}, after round 1" in lines
    assert torch.equal(models(run), models(stopped / "runs" / "tiny"))
    assert files(tmp_path) == files(stopped)


def test_a_full_disk_is_one_clear_line_and_nothing_else_is_lost(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    kept = checkpoint.newest(run / "checkpoint")
    content = {path.name: path.read_bytes() for path in kept.iterdir()}
    full = train(tmp_path, "resume=auto", rounds=4, breaking="allow_files_of_100_kB")
    assert full.wait() == 1
    errors = [line for line in full.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "could not write the checkpoint" in errors[0]
    assert f"{kept} is kept: make room, then go on with resume=auto" in errors[0]
    assert "Traceback" not in full.output
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == content
    assert sorted(path.name for path in kept.parent.iterdir()) == ["round_00001", kept.name]
    assert summary(tmp_path)["status"] == "failed"
    assert train(tmp_path, "resume=auto", rounds=4).wait() == 0
    whole = tmp_path / "whole"
    assert train(whole, rounds=4).wait() == 0
    assert torch.equal(models(run), models(whole / "runs" / "tiny"))


def test_no_room_for_a_table_is_one_clear_line_with_its_name(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    full = train(tmp_path, "resume=auto", rounds=4, breaking="fail_to_append")
    assert full.wait() == 1
    errors = [line for line in full.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"No space left on device: '{run}/metrics.csv'" in errors[0] and "resume=auto" in errors[0]
    assert "Traceback" not in full.output
    assert checkpoint.newest(run / "checkpoint").name == "round_00002"
