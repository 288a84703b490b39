import csv
import io
import json
import os
import re

import pytest

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting.paper import departures
from jgesr_lightning.reporting.table import csv_text, describe, latex, main, markdown, tables_of
from tests.reporting.synthetic import make_run


def study(root):
    """Two methods, three seeds: fedavg 0.90, 0.91, 0.92; jgesr 0.95, 0.955, 0.97."""
    for seed, (fedavg, jgesr) in enumerate([(0.90, 0.95), (0.91, 0.955), (0.92, 0.97)]):
        make_run(root, f"fedavg_{seed}", fedavg, method="fedavg", seed=seed)
        make_run(root, f"jgesr_{seed}", jgesr, method="jgesr", seed=seed)


def cells(text, label):
    """Return the cells of the rows that begin with a label."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row[1:] for row in rows if row[0] == label]


def test_values_deviations_paper_and_bold(tmp_path):
    study(tmp_path)
    (table,), _ = tables_of([tmp_path])
    text = markdown(table)
    assert cells(text, "method")[0] == ["mnist s=0.1 (%)", "paper", "difference"]
    assert cells(text, "fedavg")[0] == ["91.00 ± 1.00 (3)", "90.48", "+0.52"]
    assert cells(text, "jgesr")[0] == ["**95.83 ± 1.04** (3)", "95.17", "+0.66"]
    # differences 5, 4.5, 5: mean 4.8333, deviation 0.288675, half width 4.302653 * 0.288675 / sqrt(3) = 0.717109
    assert cells(text, "fedavg")[1] == ["+4.83 [+4.12, +5.55] (3) *"]


def test_protocol_stands_above_the_table(tmp_path):
    study(tmp_path)
    (table,), _ = tables_of([tmp_path])
    text = markdown(table)
    above = text[: text.index("| method")]
    for word in ("model each client receives", "plain mean", "last round (2 of 2)", "(3)", "shares", "batch size 32"):
        assert word in above


def test_settings_that_are_not_the_papers_are_named(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    (table,), _ = tables_of([tmp_path])
    assert any("rounds 2 (paper: 30)" in line for line in table.protocol)
    assert departures({"rounds": 30, "data.fraction": 1, "local.batch_size": 7}) == []
    assert departures({"rounds": 30, "data.fraction": 0.1}) == ["data.fraction 0.1 (paper: 1.0)"]


def test_the_papers_means_do_not_stand_beside_the_worst_client(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    (mean,), _ = tables_of([tmp_path])
    assert "paper" in cells(markdown(mean), "method")[0]
    summary = tmp_path / "a" / "summary.json"
    content = json.loads(summary.read_text())
    content["last"]["accuracy/received_worst"] = 0.5
    summary.write_text(json.dumps(content))
    (worst,), _ = tables_of([tmp_path], "accuracy/received_worst")
    assert cells(markdown(worst), "method")[0] == ["mnist s=0.1 (%)"]
    assert worst.entries["fedavg", ("mnist", 0.1, 0.0)].paper is None


def test_one_seed_has_no_deviation_and_no_interval(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    make_run(tmp_path, "b", 0.95, method="jgesr")
    (table,), _ = tables_of([tmp_path])
    text = markdown(table)
    assert cells(text, "fedavg")[0][0] == "90.00 (1)"
    assert cells(text, "fedavg")[1] == ["+5.00 (1)"]


def test_missing_cells_and_rows_in_the_papers_order(tmp_path):
    make_run(tmp_path, "a", 0.9, method="jgesr", noise=0.1)
    make_run(tmp_path, "b", 0.8, method="jgesr", noise=0.2)
    make_run(tmp_path, "c", 0.7, method="jgesr", noise=0.2, fidelity="uniform")
    make_run(tmp_path, "d", 0.6, method="local", noise=0.1)
    make_run(tmp_path, "e", 0.6, method="fedavg", noise=0.1, missing=0.05)
    (table,), _ = tables_of([tmp_path])
    assert table.rows == ["local", "fedavg", "jgesr", "jgesr (uniform)"]
    text = markdown(table)
    titles = ["mnist s=0.1 (%)", "paper", "difference", "mnist s=0.1 missing=0.05 (%)", "mnist s=0.2 (%)"]
    assert cells(text, "method")[0][:5] == titles
    assert cells(text, "local")[0] == ["60.00 (1)", "–", "–", "–", "–", "–", "–"]  # noqa: RUF001
    # no number of the paper for a fidelity that it does not use
    assert cells(text, "jgesr (uniform)")[0][5:7] == ["–", "–"]  # noqa: RUF001


def test_equal_means_are_both_bold(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    make_run(tmp_path, "b", 0.900001, method="local")
    (table,), _ = tables_of([tmp_path])
    assert markdown(table).count("**90.00**") == 2


def test_failed_and_unfinished_runs_are_named_and_left_out(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "broken_off", 0.99, status="stopped", method="fedavg", seed=7)
    make_run(tmp_path, "gone_wrong", 0.99, status="failed", method="fedavg", seed=8)
    make_run(tmp_path, "torn", 0.99, method="fedavg", seed=9)
    (tmp_path / "torn" / "summary.json").write_text('{"schema": 1, "sta')
    make_run(tmp_path, "newer_format", 0.99, method="fedavg", seed=10)
    summary = json.loads((tmp_path / "newer_format" / "summary.json").read_text())
    (tmp_path / "newer_format" / "summary.json").write_text(json.dumps(summary | {"schema": 2}))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("seed: 1\n")
    (table,), collection = tables_of([tmp_path])
    assert cells(markdown(table), "fedavg")[0][0] == "91.00 ± 1.00 (3)"
    notes = "\n".join(collection.notes)
    assert "broken_off: stopped (SIGTERM) after round 1 of 2" in notes
    for name in (
        "gone_wrong: failed",
        "torn: summary.json cannot be read",
        "newer_format: summary",
        "begun: not finished",
    ):
        assert name in notes


def test_of_equal_settings_and_seed_the_newest_counts(tmp_path):
    old, new = make_run(tmp_path, "z_old", 0.5, method="fedavg"), make_run(tmp_path, "a_new", 0.9, method="fedavg")
    os.utime(old / "summary.json", (1000, 1000))
    (table,), collection = tables_of([tmp_path])
    assert cells(markdown(table), "fedavg")[0][0] == "90.00 (1)"
    assert collection.notes == ["z_old: same settings and seed as a_new, which is newer; left out"]
    os.utime(new / "summary.json", (10, 10))
    (table,), _ = tables_of([tmp_path])
    assert cells(markdown(table), "fedavg")[0][0] == "50.00 (1)"


def test_a_folder_given_twice_counts_once(tmp_path):
    study(tmp_path)
    (table,), collection = tables_of([tmp_path, tmp_path / "fedavg_0"])
    assert cells(markdown(table), "fedavg")[0][0] == "91.00 ± 1.00 (3)"
    assert not collection.notes


def test_runs_with_other_shared_settings_get_a_table_of_their_own(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "short", 0.3, method="fedavg", rounds=5)
    tables, _ = tables_of([tmp_path])
    assert [len(table.rows) for table in tables] == [2, 1]
    assert "differs from the others in rounds=5" in markdown(tables[1])


def test_another_metric_and_an_unknown_one(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "unmeasured", None, method="local")
    (table,), collection = tables_of([tmp_path], "accuracy/trained")
    assert cells(markdown(table), "fedavg")[0][0] == "92.00 ± 1.00 (3)"
    assert "own model after local training" in markdown(table)
    assert collection.notes == ["unmeasured: accuracy/trained was not measured; left out"]
    (table,), _ = tables_of([tmp_path], "loss/train")
    assert cells(markdown(table), "fedavg")[0] == ["**0.50 ± 0.00** (3)"]  # no percent, no number of the paper
    with pytest.raises(ConfigError, match=r"accuracy/recieved.*did you mean .accuracy/received.*known: .*loss/train"):
        tables_of([tmp_path], "accuracy/recieved")


def test_csv_holds_full_numbers(tmp_path):
    study(tmp_path)
    tables, _ = tables_of([tmp_path])
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(csv_text(tables)))}
    assert float(rows["fedavg"]["mean"]) == pytest.approx(91)
    assert float(rows["fedavg"]["std"]) == pytest.approx(1)
    assert rows["fedavg"]["seeds"] == "3"
    assert [rows[name]["best"] for name in ("fedavg", "jgesr")] == ["0", "1"]
    assert float(rows["fedavg"]["ci95_low"]) == pytest.approx(4.8333333 - 0.7171087, abs=1e-5)
    assert rows["jgesr"]["jgesr_minus_method"] == ""


def test_latex_is_balanced_and_escaped(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "two", 0.5, method="two_step")
    (table,), _ = tables_of([tmp_path])
    text = latex(table)
    assert r"\textbf{95.83 $\pm$ 1.04}" in text
    assert r"two\_step" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    body = [line for line in text.splitlines() if line.endswith(r"\\") and not line.startswith("%")]
    first = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text).group(1)
    rows = body[1 : 1 + 1 + len(table.rows)]
    assert all(row.count(" & ") == len(first) - 1 for row in rows)


def test_command_prints_writes_and_fails_clearly(tmp_path, capsys):
    study(tmp_path / "runs")
    make_run(tmp_path / "runs", "lost", 0.9, status="failed")
    assert main([str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    assert "| jgesr |" in printed
    assert "lost: failed" in printed
    assert main([str(tmp_path / "runs"), "--format", "all", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["table.csv", "table.md", "table.tex"]
    assert "lost: failed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no folder"):
        main([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no finished run"):
        main([str(tmp_path / "empty")])


def test_metrics_in_words():
    assert describe("accuracy/trained_worst") == (
        "local test accuracy of each client's own model after local training, worst client"
    )
    assert describe("seconds/train") == "seconds/train"


@pytest.mark.parametrize("name", ["media", "checkpoint", "figures", "wandb"])
def test_a_run_may_be_named_like_a_folder_inside_a_run(tmp_path, name):
    outer = make_run(tmp_path, name, 0.9, method="fedavg")
    make_run(outer, name, 0.5, method="local")  # what lies so named inside a run is the run's own
    _, collection = tables_of([tmp_path])
    assert [run.folder for run in collection.runs] == [outer]
    assert collection.notes == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("last.accuracy/received", "abc"),
        ("last.accuracy/received", 10**400),
        ("last.round", "2"),
        ("config.seed", {}),
        ("config.seeds", {"channel": []}),
        ("aggregation.objective", [1.0, "x"]),
        ("aggregation", None),
        ("seconds", None),
        ("seconds", {"total": "x"}),
    ],
)
def test_a_damaged_summary_is_named_and_left_out(tmp_path, place, value):
    make_run(tmp_path, "sound", 0.9)
    path = make_run(tmp_path, "harmed", 0.8, seed=1) / "summary.json"
    summary = json.loads(path.read_text())
    *parents, key = place.split(".")
    inner = summary
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    path.write_text(json.dumps(summary))
    (table,), collection = tables_of([tmp_path])
    assert [entry.value.n for entry in table.entries.values()] == [1]
    (note,) = collection.notes
    assert note.startswith("harmed: summary.json cannot be read") and len(note) < 500
