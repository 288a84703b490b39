"""Whole runs through the command line: what they leave behind, that they repeat, resume, and refuse what is wrong."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from jgesr_lightning.closing import closing_lines
from jgesr_lightning.config import ConfigError, load_config
from jgesr_lightning.records import RoundRecord
from jgesr_lightning.run_folder import where_it_lies
from jgesr_lightning.runtime import checkpoint
from tests.processes import Started, models, write_config

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parent.parent
SEEDS = ("partition", "initial", "channel", "batches")


def train(config, *settings, log=None):
    """Run the command line to its end; return status and output."""
    run = Started(["train", config, *settings], log or config.parent / f"log_{len(list(config.parent.iterdir()))}.txt")
    return run.wait(), run.output


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def fingerprint(run):
    """Return a run's partition, its initial accuracies and its final models."""
    clients = table(run / "clients.csv")
    return (run / "partition.csv").read_text(), [row for row in clients if row["round"] == "0"], models(run)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Configuration and folder of runs: one as a user starts it, others that differ from it in one thing."""
    folder = tmp_path_factory.mktemp("experiment")
    config = write_config(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "jgesr_lightning", "train", str(config), "name=first"],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (folder / "first.txt").write_text(done.stderr)
    argv = [["train", config, "name=second"], ["train", config, "name=other", "seed=1"]]
    argv += [["train", config, f"name={purpose}", f"seeds.{purpose}=1"] for purpose in SEEDS]
    argv += [["train", config, "name=bf16", "runtime.precision=bf16-mixed", "rounds=1"]]
    argv += [["train", config, "name=diverging", "aggregator.name=jgesr", "aggregator.rho=0.01", "rounds=1"]]
    run = Started(argv, folder / "log.txt")
    assert run.wait() == 0, run.output
    return config


def test_it_says_what_it_does_and_how_far_it_is(base):
    lines = (base.parent / "first.txt").read_text().splitlines()
    assert lines[0].startswith("fedavg on synthetic: 5 clients, 3 rounds, noise 0.1, missing 0, seed 0; lenet of ")
    assert lines[1].startswith("1 x cpu, engine ")
    assert lines[1].endswith(f"results go to {base.parent}/runs/first")
    assert [line.split()[1] for line in lines[2:6]] == ["0/3", "1/3", "2/3", "3/3"]
    assert "left" in lines[4]
    run = base.parent / "runs" / "first"
    last = json.loads((run / "summary.json").read_text())["last"]
    received, weighted, worst = (
        f"{100 * last[f'accuracy/received{end}']:.2f} %" for end in ("", "_weighted", "_worst")
    )
    assert lines[6] == "accuracy after round 3, mean over 5 clients:"
    assert lines[7] == f"  received  {received}   (by test samples {weighted}, worst client {worst})"
    assert lines[8].startswith("  trained   ")
    assert lines[9].startswith("  best for orientation, chosen on the test set: round ")
    assert lines[10] == f"results: {run}"
    assert lines[11].startswith("next: ")
    assert lines[11].endswith(f"python -m jgesr_lightning report {run}   (or figures, table, export)")
    assert lines[12].startswith("more rounds: ")
    assert lines[12].endswith(f"python -m jgesr_lightning train {run}/config.yaml resume=auto rounds=6")


def test_the_metric_that_leads_comes_first_and_chooses_the_best_round(tmp_path):
    def record(number, received, trained):
        accuracies = {"received": received, "trained": trained}
        metrics = {
            f"accuracy/{k}{end}": value for k, value in accuracies.items() for end in ("", "_weighted", "_worst")
        }
        return RoundRecord(number, metrics, {"accuracy/received": [received] * 2})

    records = [record(1, 0.6, 0.7), record(2, 0.5, 0.9), record(3, 0.4, 0.8)]
    lines = closing_lines(records, tmp_path, 3, True, "accuracy/trained")
    assert [line.split()[0] for line in lines[1:3]] == ["trained", "received"]
    assert lines[3] == "  best for orientation, chosen on the test set: round 2, trained 90.00 %"
    assert closing_lines(records, tmp_path, 3, True)[3].endswith("round 1, received 60.00 %")


def test_bf16_trains_in_low_precision_and_aggregates_in_full_and_says_that_a_cpu_is_slow_at_it(base):
    runs = base.parent / "runs"
    trained = models(runs / "bf16")
    assert trained.dtype == torch.float32
    assert torch.isfinite(trained).all()
    assert not torch.equal(trained, trained.bfloat16().float())
    assert [json.loads((runs / name / "summary.json").read_text())["status"] for name in ("bf16", "first")] == [
        *("finished", "finished")
    ]
    output = (base.parent / "log.txt").read_text()
    assert output.count("bf16-mixed on a CPU takes several times as long as runtime.precision=32-true") == 1
    assert "bf16" not in (base.parent / "first.txt").read_text()


def test_a_solver_that_diverges_is_named_with_what_helps(base):
    remarks = json.loads((base.parent / "runs" / "diverging" / "summary.json").read_text())["remarks"]
    assert [(remark["kind"], remark["rounds"]) for remark in remarks] == [("diverged", [1])]
    assert torch.isfinite(models(base.parent / "runs" / "diverging")).all()
    assert (
        "the solver diverged, what was sent is worthless: aggregator.step=backtracking"
        in (base.parent / "log.txt").read_text()
    )


def test_the_files_of_a_run_are_there_and_well_formed(base):
    run = base.parent / "runs" / "first"
    assert sorted(path.name for path in run.iterdir()) == [
        *("checkpoint", "clients.csv", "config.yaml", "graphs.npz", "metrics.csv", "partition.csv", "summary.json")
    ]
    assert load_config(run / "config.yaml") == load_config(base, ["name=first"])
    metrics, clients, partition = (table(run / f"{name}.csv") for name in ("metrics", "clients", "partition"))
    assert [int(row["round"]) for row in metrics] == [0, 1, 2, 3]
    assert [(int(row["round"]), int(row["client"])) for row in clients] == [(r, k) for r in range(4) for k in range(5)]
    for r, row in enumerate(metrics):
        received = [float(c["accuracy/received"]) for c in clients if int(c["round"]) == r]
        assert float(row["accuracy/received"]) == pytest.approx(np.mean(received))
        weights = [int(p["test"]) for p in partition]
        assert float(row["accuracy/received_weighted"]) == pytest.approx(np.average(received, weights=weights))
    for row in partition:
        assert int(row["train"]) + int(row["test"]) == sum(int(row[f"pattern {c}"]) for c in range(10))
    assert sum(int(row["train"]) + int(row["test"]) for row in partition) == 200  # a twentieth of 4,000
    with np.load(run / "graphs.npz") as graphs:
        assert list(graphs) == ["round_00003"]
        np.testing.assert_allclose(graphs["round_00003"].sum(1), 1.0)
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["round_00002", "round_00003"]


def test_the_summary_says_how_the_run_ended(base):
    run = base.parent / "runs" / "first"
    summary = json.loads((run / "summary.json").read_text())
    last = table(run / "metrics.csv")[-1]
    assert (summary["status"], summary["reason"], summary["rounds"], summary["rounds_done"]) == ("finished", "", 3, 3)
    assert summary["last"]["round"] == 3
    assert summary["last"]["accuracy/received"] == float(last["accuracy/received"])
    rounds = table(run / "metrics.csv")[1:]
    assert summary["best"]["accuracy/received"] == max(float(row["accuracy/received"]) for row in rounds)
    assert len(summary["clients"]["accuracy/received"]) == 5
    assert (summary["method"], summary["dataset"], summary["noise"], summary["seed"]) == ("fedavg", "synthetic", 0.1, 0)
    assert summary["config"]["local"]["epochs"] == 1
    assert (summary["remarks"], summary["client_terms"]) == ([], [])
    diverging = json.loads((base.parent / "runs" / "diverging" / "summary.json").read_text())
    assert diverging["client_terms"] == ["Proximal(mu=1)"]
    assert {"train", "uplink", "aggregate", "evaluate", "total"} <= summary["seconds"].keys()


def test_two_equal_runs_are_bit_equal(base):
    first, second = (fingerprint(base.parent / "runs" / name) for name in ("first", "second"))
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])
    texts = [(base.parent / "runs" / name / "clients.csv").read_bytes() for name in ("first", "second")]
    assert texts[0] == texts[1]
    assert not torch.equal(first[2], models(base.parent / "runs" / "other"))


@pytest.mark.parametrize("purpose", SEEDS)
def test_each_source_of_randomness_varies_alone(base, purpose):
    runs = base.parent / "runs"
    first, varied = fingerprint(runs / "first"), fingerprint(runs / purpose)
    assert (first[0] != varied[0]) == (purpose == "partition")
    assert (first[1] != varied[1]) == (purpose in ("partition", "initial"))
    assert not torch.equal(first[2], varied[2])
    deviations = [json.loads((runs / name / "summary.json").read_text())["noise_std"] for name in ("first", purpose)]
    assert (deviations[0] != deviations[1]) == (purpose == "initial")


@pytest.fixture
def used(base, tmp_path):
    """A configuration whose run has ended."""
    config = write_config(tmp_path)
    shutil.copytree(base.parent / "runs" / "first", tmp_path / "runs" / "tiny")
    shared = tmp_path / "runs" / "tiny" / "config.yaml"
    shared.write_text(shared.read_text().replace(str(base.parent), str(tmp_path)).replace("name: first", "name: tiny"))
    return config


def test_a_run_in_a_used_folder_keeps_the_former_one_aside(used):
    run = used.parent / "runs" / "tiny"
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    status, output = train(used, "rounds=1")
    assert status == 0
    assert f"{run} held a run already; it is kept as {run}.1" in output
    assert before == {path.name: path.read_bytes() for path in Path(f"{run}.1").iterdir() if path.is_file()}
    assert json.loads((run / "summary.json").read_text())["rounds"] == 1


def test_a_folder_in_use_is_refused_whatever_it_is_called(tmp_path):
    config = write_config(tmp_path, rounds=100_000)
    running = Started(["train", config], tmp_path / "running.txt")
    running.wait_for("round 1/")
    links = tmp_path / "links"
    links.mkdir()
    (links / "other").symlink_to(tmp_path / "runs" / "tiny")
    status, output = train(config)
    through_link = train(config, f"output_dir={links}", "name=other")
    assert running.process.is_alive()
    running.process.terminate()
    assert through_link[0] == 2 and f"{links}/other is in use by another run" in through_link[1]
    assert status == 2
    assert output.count("\n") == 1
    assert output.startswith(f"error: {tmp_path}/runs/tiny is in use by another run (process {running.pid} on ")
    assert running.wait() == 1
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")] == ["tiny"]


def test_a_refused_resumption_leaves_nothing_where_there_is_a_folder(tmp_path):
    (tmp_path / "runs").mkdir()
    assert train(write_config(tmp_path), "resume=/nowhere")[0] == 2
    assert list((tmp_path / "runs").iterdir()) == []


def stamps(folder):
    """Return when each file of a run was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_resuming_with_other_settings_is_refused_naming_them(used):
    before = stamps(used.parent / "runs" / "tiny")
    status, output = train(used, "resume=auto", "rounds=5", "local.lr=0.5", "aggregator.name=jgesr")
    assert status == 2
    assert output.count("\n") == 1
    # not, one by one, the settings that the other method has
    assert "(aggregator.name was fedavg, is jgesr; local.lr was 0.01, is 0.5); use the same ones" in output
    assert stamps(used.parent / "runs" / "tiny") == before


def test_settings_that_differ_are_named_as_they_are_typed(used):
    status, output = train(used, "resume=auto", "local.clip_norm=1", "data.verify=false", "deterministic=false")
    assert status == 2
    assert "(local.clip_norm was null, is 1.0); use the same ones" in output


def test_what_is_not_finite_may_be_met_more_laxly_from_then_on(used):
    assert train(used, "resume=auto", "rounds=4", "nonfinite=drop_all")[0] == 0
    status, output = train(used, "resume=auto", "rounds=5", "nonfinite=raise")
    assert status == 2
    assert "(nonfinite was drop_all, is raise); use the same ones" in output


def test_so_is_beginning_again_with_other_settings_where_nothing_was_saved(used):
    shutil.rmtree(used.parent / "runs" / "tiny" / "checkpoint")
    status, output = train(used, "resume=auto", "local.lr=0.5")
    assert status == 2
    assert "local.lr was 0.01, is 0.5" in output
    status, output = train(used, "resume=auto")
    assert status == 0
    assert "going on" not in output
    assert not (used.parent / "runs" / "tiny.1").exists()


def test_a_run_goes_on_in_its_folder_or_from_another(base, used, tmp_path):
    runs = used.parent / "runs"
    argv = [
        ["train", used, "name=straight", "rounds=5"],
        ["train", used, "resume=auto"],
        ["train", used, "resume=auto", "rounds=5", "checkpoint.every=2", "engine=sequential"],
        ["train", used, f"resume={base.parent / 'runs' / 'first'}", "rounds=5", "name=elsewhere"],
        ["train", used, f"resume={runs / 'elsewhere' / 'checkpoint'}", "rounds=6", "name=elsewhere"],
    ]
    run = Started(argv, tmp_path / "log.txt")
    assert run.wait() == 0, run.output
    assert f"{runs / 'tiny'} is finished already (3 rounds); nothing to do" in run.output
    assert f"going on from {base.parent / 'runs' / 'first' / 'checkpoint' / 'round_00003'}, after round 3" in run.output
    torch.testing.assert_close(models(runs / "tiny"), models(runs / "straight"), rtol=0, atol=1e-12)
    assert [row["round"] for row in table(runs / "tiny" / "metrics.csv")] == list("012345")
    assert checkpoint.newest(runs / "elsewhere" / "checkpoint").name == "round_00006"
    assert table(runs / "elsewhere" / "clients.csv")[:30] == table(runs / "straight" / "clients.csv")
    assert not list(runs.glob("*.1"))
    assert checkpoint.newest(base.parent / "runs" / "first" / "checkpoint").name == "round_00003"  # as it was


def test_a_folder_that_was_moved_is_gone_on_with_where_it_is(used):
    runs = used.parent / "runs"
    (runs / "tiny").rename(runs / "tiny.1")
    status, output = train(runs / "tiny.1" / "config.yaml", "resume=auto", "rounds=4", log=used.parent / "log.txt")
    assert status == 0, output
    assert load_config(runs / "tiny.1" / "config.yaml").resume is None  # given to train again it begins anew
    assert checkpoint.newest(runs / "tiny.1" / "checkpoint").name == "round_00004"
    assert not (runs / "tiny").exists()
    written = load_config(runs / "tiny.1" / "config.yaml")
    assert written.folder == runs / "tiny.1"
    written = written.replace(resume="auto")
    assert where_it_lies(written, f"{runs}/tiny.1/config.yaml", ["resume=auto"]) is written
    for resume, setting in (("auto", "--name=tiny"), ("auto", f"output_dir={runs}"), (None, "rounds=4")):
        former = written.replace(name="tiny", resume=resume)
        assert where_it_lies(former, f"{runs}/tiny.1/config.yaml", [setting]) is former
    (runs / "tiny.1").rename(runs / ".aside")
    with pytest.raises(ConfigError, match=r"\.aside cannot go on there: name is '\.aside'.*; rename the folder"):
        where_it_lies(written, f"{runs}/.aside/config.yaml", ["resume=auto"])


def test_a_configuration_beside_somebodys_own_files_is_no_runs(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "pretrained.bin").touch()
    (tmp_path / "summary.json").write_text('{"of": "something else"}')
    config = load_config("mnist_quick", "resume=auto name=mine")
    assert where_it_lies(config, f"{tmp_path}/config.yaml", []) is config


WRONG = {
    "a value": (["rounds=0"], "rounds is 0"),
    "a key": (["local.lrr=1"], "local.lrr"),
    "a method": (["aggregator.name=fedavgg"], "did you mean"),
    "a partition": (["clients=300", "data.min_samples=20"], "clients"),
    "resume": (["resume=/nowhere"], "there is no checkpoint in it"),
    "fewer rounds": (["resume=FIRST", "rounds=2"], "rounds is 2, but"),
    "processes": (["runtime.devices=6"], "6 processes for 5 clients"),
    "machines": (["runtime.num_nodes=2"], "torchrun --nnodes=2"),
    "an accelerator": (["runtime.accelerator=mps"], "runtime.accelerator is 'mps'"),
    "output_dir": (["output_dir=/proc/nowhere"], "/proc/nowhere"),
    "output_dir, a file": (["output_dir=HERE/tiny.yaml"], "tiny.yaml/tiny cannot be made or written (File exists"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line_and_status_2_and_nothing_is_written(base, tmp_path, what):
    settings, expected = WRONG[what]
    config = write_config(tmp_path)
    first = str(base.parent / "runs" / "first")
    given = [setting.replace("FIRST", first).replace("HERE", str(tmp_path)) for setting in settings]
    status, output = train(config, *given, log=tmp_path / "log.txt")
    assert status == 2
    assert output.startswith("error: ")
    assert output.count("\n") == 1
    assert expected in output
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["log.txt", "tiny.yaml"]
