"""How runs end that nobody foresaw would: in the summary, in one line, with what was saved."""

import errno
import json
import logging
import os
import signal
import sys
import warnings

import pytest
import torch
import yaml

from jgesr_lightning import cli, load_config, run
from jgesr_lightning.callbacks.files import ResultFiles
from jgesr_lightning.callbacks.wandb_log import WandbLog
from jgesr_lightning.failure import describe
from jgesr_lightning.runtime import strategy
from jgesr_lightning.training.stacked import StackedEngine
from tests.processes import TINY

FAULTS = {
    "a bug": (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero; "),
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), "out of memory (CUDA out of memory); "),
    "nothing said": (KeyError(), "KeyError; "),
    "a file of somebody's own": (
        FileNotFoundError(errno.ENOENT, "No such file or directory", "prior.npy"),
        "FileNotFoundError: [Errno 2] No such file or directory: 'prior.npy'; ",
    ),
    "a connection of somebody's own": (ConnectionResetError("gone"), "ConnectionResetError: gone; "),
    "a method that leaves": (SystemExit("I leave"), "SystemExit: I leave; "),
}  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("JGESR_DEBUG", raising=False)
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "output_dir": str(tmp_path / "runs")}))
    return path


def summary(config):
    return json.loads((config.parent / "runs" / "tiny" / "summary.json").read_text())


def fail_in_round(monkeypatch, number, error):
    whole = StackedEngine.train

    def train(self, round_number, *args, **kwargs):
        if round_number == number:
            raise error
        return whole(self, round_number, *args, **kwargs)

    monkeypatch.setattr(StackedEngine, "train", train)


@pytest.mark.parametrize(("error", "status"), [(KeyError(), 1), (KeyboardInterrupt(), 130)])
def test_at_a_terminal_what_ended_the_run_has_a_line_of_its_own_below_the_bar(
    error, status, config, capsys, monkeypatch
):
    fail_in_round(monkeypatch, 2, error)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["train", str(config)]) == status
    shown = capsys.readouterr().err
    assert "%|" in shown  # there was a bar
    assert shown.splitlines()[-1].startswith(("error: KeyError; ", "interrupted"))


def test_at_a_terminal_warnings_go_above_the_bar_which_ends_full(config, capsys, monkeypatch):
    whole = StackedEngine.train

    def train(self, round_number, *args, **kwargs):
        logging.getLogger("a.method").warning("a word in round %d", round_number)
        warnings.warn("and another", stacklevel=1)
        return whole(self, round_number, *args, **kwargs)

    monkeypatch.setattr(StackedEngine, "train", train)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
    assert cli.main(["train", str(config), "participation=0.5", "aggregator.name=fedavg"]) == 0
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if "a word" in line] == [f"a word in round {number}" for number in (1, 2, 3)]
    assert sum("UserWarning: and another" in line and "%|" not in line for line in lines) >= 1
    assert [line for line in lines if "%|" in line][-1].startswith("round 3/3:  100%")
    assert logging.root.handlers == []


def test_warnings_that_were_captured_before_a_run_still_are_after_it(config, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logging.root, "handlers", [])
    with warnings.catch_warnings():
        logging.captureWarnings(True)
        try:
            captured = warnings.showwarning
            assert cli.main(["train", str(config), "rounds=1"]) == 0
            assert warnings.showwarning is captured
        finally:
            logging.captureWarnings(False)


@pytest.mark.parametrize(("error", "status", "seconds"), [(KeyError(), 1, 10.0), (KeyboardInterrupt(), 130, 0.0)])
def test_an_interruption_does_not_wait_for_w_and_b_to_start(config, monkeypatch, error, status, seconds):
    fail_in_round(monkeypatch, 1, error)
    waits = []
    monkeypatch.setattr(WandbLog, "close", lambda self, exit_code, reason, wait: waits.append(wait))
    assert cli.main(["train", str(config)]) == status
    assert waits == [seconds]


def test_an_interruption_says_what_is_saved(config, capsys, monkeypatch):
    fail_in_round(monkeypatch, 2, KeyboardInterrupt())
    assert cli.main(["train", str(config)]) == 130
    saved, last = capsys.readouterr().err.splitlines()[-2:]
    assert saved.endswith("checkpoint/round_00001 (resume=auto goes on from there)")
    assert last == "interrupted"


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unforeseen_error_is_one_line_a_failed_summary_and_says_where(fault, config, capsys, monkeypatch):
    error, expected = FAULTS[fault]
    fail_in_round(monkeypatch, 2, error)
    codes = []
    monkeypatch.setattr(WandbLog, "close", lambda self, exit_code, **_: codes.append(exit_code))
    run = config.parent / "runs" / "tiny"
    assert cli.main(["train", str(config)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: " + expected.removesuffix("; "))
    assert last.endswith(
        f"the last checkpoint is {run}/checkpoint/round_00001 (resume=auto goes on from there); "
        f"where it happened: {run}/traceback.txt"
    )
    assert (summary(config)["status"], summary(config)["rounds_done"]) == ("failed", 1)
    assert summary(config)["reason"] in last
    assert type(error).__name__ in (run / "traceback.txt").read_text()
    assert codes == [1]
    monkeypatch.undo()
    assert cli.main(["train", str(config), "resume=auto"]) == 0
    assert not (run / "traceback.txt").exists()
    assert (summary(config)["status"], summary(config)["reason"]) == ("finished", "")


def test_a_failure_before_the_first_round_keeps_what_the_summary_said(config, capsys, monkeypatch):
    assert cli.main(["train", str(config)]) == 0
    before = summary(config)
    monkeypatch.setattr("jgesr_lightning.build.build_engine", lambda *_: 1 / 0)
    assert cli.main(["train", str(config), "resume=auto", "rounds=4"]) == 1
    assert "round_00003 (resume=auto goes on from there)" in capsys.readouterr().err
    after = summary(config)
    assert (after["status"], after["reason"][:17]) == ("failed", "ZeroDivisionError")
    assert after["last"] == before["last"]


def test_a_failure_of_a_fresh_run_before_its_first_round(config, monkeypatch):
    monkeypatch.setattr("jgesr_lightning.build.build_engine", lambda *_: 1 / 0)
    assert cli.main(["train", str(config)]) == 1
    assert (summary(config)["status"], summary(config)["rounds_done"]) == ("failed", 0)
    assert summary(config)["reason"].endswith("no round was saved")
    assert summary(config)["config"]["rounds"] == 3


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "make room, then go on"), (errno.EISDIR, "put that right, then go on")]
)
def test_what_helps_where_nothing_can_be_written_follows_the_reason(config, capsys, monkeypatch, number, said):
    path = str(config.parent / "runs" / "tiny" / "clients.csv")
    fail_in_round(monkeypatch, 2, OSError(number, os.strerror(number), path))
    assert cli.main(["train", str(config)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "could not write the results in" in last and f"{path!r}; {said} with resume=auto" in last


def test_a_signal_that_comes_too_late_to_stop_a_run_is_no_reason(config, monkeypatch):
    whole = ResultFiles.on_round_end

    def on_round_end(self, plan, state, record, watch):
        if record.round == plan.rounds:
            os.kill(os.getpid(), signal.SIGTERM)
        whole(self, plan, state, record, watch)

    monkeypatch.setattr(ResultFiles, "on_round_end", on_round_end)
    result = run(load_config(config))
    assert (result.status, result.reason) == ("finished", "")
    assert (summary(config)["status"], summary(config)["reason"]) == ("finished", "")


def test_an_interruption_is_a_failed_run(config, monkeypatch):
    fail_in_round(monkeypatch, 2, KeyboardInterrupt())
    assert cli.main(["train", str(config)]) == 130
    assert (summary(config)["status"], summary(config)["reason"]) == ("failed", "interrupted")


def test_uploads_that_are_all_worthless_fail_the_run(config, capsys):
    assert cli.main(["train", str(config), "local.lr=1e30", "runtime.precision=32-true"]) == 1
    assert ": nothing usable arrived: every upload" in capsys.readouterr().err
    assert summary(config)["status"] == "failed"
    assert "nothing usable arrived" in summary(config)["reason"]


def test_the_traceback_is_shown_where_asked_for(config, monkeypatch):
    fail_in_round(monkeypatch, 1, ZeroDivisionError())
    monkeypatch.setenv("JGESR_DEBUG", "1")
    with pytest.raises(RuntimeError, match="ZeroDivisionError; no round was saved"):
        cli.main(["train", str(config)])


@pytest.mark.parametrize("table", ["metrics", "clients"])
def test_a_table_that_is_removed_or_changed_comes_back_whole(table, config, monkeypatch):
    before = []
    path = config.parent / "runs" / "tiny" / f"{table}.csv"
    whole = ResultFiles.on_round_end

    def on_round_end(self, plan, state, record, watch):
        if record.round == 1:
            path.unlink()
        if record.round == 2:
            path.write_text("")
        if record.round == 3:  # to as many bytes
            before.append(path.read_text())
            path.write_text(before[0].replace("0.", "7."))
            assert path.read_text() != before[0]
        whole(self, plan, state, record, watch)

    monkeypatch.setattr(ResultFiles, "on_round_end", on_round_end)
    assert cli.main(["train", str(config)]) == 0
    assert path.read_text().startswith(before[0])
    lines = path.read_text().splitlines()
    assert lines[0].startswith("round,")
    per_round = 5 if table == "clients" else 1
    assert [int(line.split(",")[0]) for line in lines[1:]] == [r for r in range(4) for _ in range(per_round)]


def test_a_lost_process_that_nobody_could_account_for_is_in_the_summary_unless_all_was_done(config, monkeypatch):
    whole, said = StackedEngine.train, []

    def train(self, *args, **kwargs):
        strategy._last_words[0]("process 1 ended with status -9")
        said.append(summary(config))
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(StackedEngine, "train", train)
    monkeypatch.setattr(WandbLog, "close", lambda *_, **__: strategy._last_words[0]("too late"))
    assert cli.main(["train", str(config), "rounds=1"]) == 0
    reason = "lost another process of this run (process 1 ended with status -9); no round was saved"
    assert [(told["status"], told["reason"]) for told in said] == [("failed", reason)]
    assert (summary(config)["status"], summary(config)["reason"]) == ("finished", "")
    assert strategy._last_words == []


def test_only_the_first_line_of_an_error_is_told():
    assert describe(RuntimeError("one\ntwo")) == "RuntimeError: one"


def test_a_finished_run_stays_one_where_going_on_from_it_is_refused(config, capsys, monkeypatch):
    assert cli.main(["train", str(config)]) == 0
    before = summary(config)
    assert before["status"] == "finished"

    def refuse(self, state):
        raise ValueError("not mine")

    monkeypatch.setattr("jgesr_lightning.aggregators.base.Aggregator.load_state", refuse)
    assert cli.main(["train", str(config), "resume=auto", "rounds=9"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "holds no state that " in last and "(ValueError: not mine)" in last and "start anew without resume" in last
    assert summary(config) == before
