import csv
import io
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from scipy import stats

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting import words
from jgesr_lightning.reporting.collection import collect
from jgesr_lightning.reporting.paper import departures, is_papers
from jgesr_lightning.reporting.render import all_latex, all_markdown, csv_text, latex, markdown
from jgesr_lightning.reporting.store import store
from jgesr_lightning.reporting.table import main
from jgesr_lightning.reporting.tables import describe, protocol_text, tables_of
from jgesr_lightning.study import load_study
from tests.reporting.synthetic import PAPERS, built, change, make_run, named_study


def study(root, **settings):
    """Two methods, three seeds: fedavg 0.90, 0.91, 0.92; jgesr 0.95, 0.955, 0.97."""
    for seed, (fedavg, jgesr) in enumerate([(0.90, 0.95), (0.91, 0.955), (0.92, 0.97)]):
        make_run(root, f"fedavg_{seed}", fedavg, method="fedavg", seed=seed, **settings)
        make_run(root, f"jgesr_{seed}", jgesr, method="jgesr", seed=seed, **settings)


def cells(text, label):
    """Return the cells of the rows that begin with a label."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row[1:] for row in rows if row[0] == label]


def test_values_deviations_paper_and_bold(tmp_path):
    study(tmp_path, **PAPERS)
    (table,), _ = built([tmp_path])
    text = markdown(table)
    assert cells(text, "method")[0] == ["mnist s=0.1 (%)", "paper", "minus paper"]
    assert cells(text, "fedavg")[0] == ["91.00 ± 1.00 (3)", "90.48", "+0.52"]
    assert cells(text, "jgesr")[0] == ["**95.83 ± 1.04** (3)", "95.17", "+0.66"]
    # differences 5, 4.5, 5: mean 4.8333, deviation 0.288675, half width 4.302653 * 0.288675 / sqrt(3) = 0.717109
    # for one difference alone there is nothing to correct
    assert cells(text, "fedavg")[1] == ["-4.83 [-5.55, -4.12] * (3)", "[-5.55, -4.12] *"]


def test_protocol_stands_above_the_table(tmp_path):
    study(tmp_path)
    (table,), _ = built([tmp_path])
    text = markdown(table)
    above = text[: text.index("| method")]
    for word in (
        "model each client receives",
        "plain mean",
        "last round (2 of 2)",
        "over 3 seeds",
        "shares",
        "batch size 32",
    ):
        assert word in above


def test_settings_that_are_not_the_papers_are_named(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    (table,), _ = built([tmp_path])
    assert any("left out" in line and "rounds 2 (paper: 30)" in line for line in table.protocol)
    assert cells(markdown(table), "fedavg")[0] == ["90.00 (1)"]
    assert departures({"rounds": 30, "data.fraction": 1, "local.batch_size": 7}) == []
    assert departures({"rounds": 30, "data.fraction": 0.1}) == ["data.fraction 0.1 (paper: 1.0)"]
    assert departures({"data.partition": "dirichlet", "local.optimizer": "sgd", "local.clip_norm": None}) == []
    for key, value, paper in (
        ("data.partition", "iid", "dirichlet"),
        ("data.planted", "labels", "none"),
        ("local.optimizer", "adam", "sgd"),
        ("local.weight_decay", 0.1, "0.0"),
        ("local.clip_norm", 1.0, "none"),
        ("local.schedule", "cosine", "constant"),
        ("local.proximal_mu", 0.5, "each method's own"),
    ):
        assert departures({key: value}) == [f"{key} {value} (paper: {paper})"]
        assert not is_papers({key: value})
        assert str(value) in protocol_text({key: value, "clients": 3})
    assert protocol_text({"local.optimizer": "sgd", "local.weight_decay": 0.0, "clients": 3}) == "clients 3"


def test_the_papers_means_do_not_stand_beside_the_worst_client(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg", **PAPERS)
    (mean,), _ = built([tmp_path])
    assert "paper" in cells(markdown(mean), "method")[0]
    change(tmp_path / "a", {"last.accuracy/received_worst": 0.5})
    (worst,), _ = built([tmp_path], "accuracy/received_worst")
    assert cells(markdown(worst), "method")[0] == ["mnist s=0.1 (%)"]
    assert worst.entries["fedavg", ("mnist", 0.1, 0.0)].paper is None


def test_on_part_of_the_data_the_heading_says_that_the_paper_had_all(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg", fraction=0.1, **PAPERS)
    (table,), _ = built([tmp_path])
    assert cells(markdown(table), "method")[0] == ["mnist s=0.1 (%)", "paper, all data", "minus paper"]
    assert cells(markdown(table), "fedavg")[0] == ["90.00 (1)", "90.48", "-0.48"]
    assert any("for other settings: here data.fraction 0.1 (paper: 1.0)" in line for line in table.protocol)


def test_one_seed_has_no_deviation_and_no_interval(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    make_run(tmp_path, "b", 0.95, method="jgesr")
    (table,), _ = built([tmp_path])
    text = markdown(table)
    assert cells(text, "fedavg")[0][0] == "90.00 (1)"
    assert cells(text, "fedavg")[1] == ["-5.00 (1)"]
    assert "one seed has no interval" in text
    assert "**" not in text  # one seed says nothing of chance


def test_what_holds_for_several_tables_is_said_once(tmp_path):
    for rounds in (2, 3):
        for method in ("fedavg", "local"):
            make_run(tmp_path, f"{method}_{rounds}", 0.9, method=method, rounds=rounds)
    tables, collection = built([tmp_path])
    text = all_markdown(tables, collection.notes)
    assert text.count("Dirichlet kappa 0.05") == text.count(": one seed:") == text.count("subtracted from") == 1
    assert [text.count(f"differs from the others in rounds={rounds}") for rounds in (2, 3)] == [1, 1]
    assert text.index("**Table 1**") < text.index("subtracted from") < text.index("**Table 2**")
    assert len(cells(text, "method minus local")) == 2


def test_missing_cells_and_rows_in_the_papers_order(tmp_path):
    make_run(tmp_path, "a", 0.9, method="jgesr", noise=0.1, **PAPERS)
    make_run(tmp_path, "b", 0.8, method="jgesr", noise=0.2, **PAPERS)
    make_run(tmp_path, "c", 0.7, method="jgesr", noise=0.2, fidelity="uniform", **PAPERS)
    make_run(tmp_path, "d", 0.6, method="local", noise=0.1, **PAPERS)
    make_run(tmp_path, "e", 0.6, method="fedavg", noise=0.1, missing=0.05, **PAPERS)
    (table,), _ = built([tmp_path])
    assert table.rows == ["local", "fedavg", "jgesr", "jgesr (uniform)"]
    text = markdown(table)
    titles = ["mnist s=0.1 (%)", "paper", "minus paper", "mnist s=0.1 missing=0.05 (%)", "mnist s=0.2 (%)"]
    assert cells(text, "method")[0][:5] == titles
    assert cells(text, "local")[0] == ["60.00 (1)", "–", "–", "–", "–", "–", "–"]  # noqa: RUF001
    # no number of the paper for a fidelity that it does not use
    assert cells(text, "jgesr (uniform)")[0][5:7] == ["–", "–"]  # noqa: RUF001
    make_run(tmp_path, "f", 0.8, method="fedprox", noise=0.1, **PAPERS)
    make_run(tmp_path, "g", 0.8, method="fedprox", noise=0.1, mu_prox=0.5, **PAPERS)
    (table,), _ = built([tmp_path])
    found = {label: table.entries[label, ("mnist", 0.1, 0.0)].paper for label in ("fedprox", "fedprox (mu_prox=0.5)")}
    assert found == {"fedprox": 90.38, "fedprox (mu_prox=0.5)": None}  # as `score` counts


def test_equal_means_both_lead_and_neither_is_bold(tmp_path):
    make_run(tmp_path, "a", 0.9, method="fedavg")
    make_run(tmp_path, "b", 0.900001, method="local")
    make_run(tmp_path, "c", 0.8, method="cfl")
    (table,), _ = built([tmp_path])
    assert [label for (label, _), entry in table.entries.items() if entry.leads] == ["local", "fedavg"]
    assert "**" not in markdown(table)


def test_of_a_graphs_precision_the_greater_leads(tmp_path):
    for method, value in (("jgesr", 0.9), ("cfl", 0.4)):
        change(make_run(tmp_path, method, 0.5, method=method), {"last.graph/precision": value})
    (table,), _ = built([tmp_path], "graph/precision")
    assert [label for (label, _), entry in table.entries.items() if entry.leads] == ["jgesr"]
    (losses,), _ = built([tmp_path], "loss/train")
    assert losses.unit == ""


def with_last(root, metric, values):
    """Write a run a seed for each method, which ends with these values of a metric."""
    for method, held in values.items():
        for seed, value in enumerate(held):
            folder = make_run(root, f"{method}{seed}", 0.5, method=method, seed=seed, with_files=False)
            change(folder, {f"last.{metric}": value})


def test_small_numbers_without_a_unit_keep_their_digits(tmp_path):
    metric = "aggregator/stationarity_models"
    with_last(tmp_path, metric, {"two_step": [1.234e-4, 1.236e-4, 1.235e-4], "jgesr": [3.1e-7, 3.2e-7, 3.4e-7]})
    (table,), _ = built([tmp_path], metric)
    text = markdown(table)
    assert cells(text, "two_step")[0] == ["0.0001235 ± 1e-07 (3)"]
    assert cells(text, "jgesr")[0] == ["**3.233e-07 ± 1.528e-08** (3)"]  # the less, and by far
    assert cells(text, "two_step")[1][0].startswith("+0.0001232 [+0.0001")
    assert [label for (label, _), entry in table.entries.items() if entry.leads] == ["jgesr"]
    (told,) = words.summary(table)
    assert "jgesr has the best mean, 3.233e-07" in told and "two_step, -0.0001232 [-0.0001" in told


def test_of_a_metric_without_a_good_direction_nothing_leads(tmp_path):
    with_last(tmp_path, "updates/cosine", {"fedavg": [0.1, 0.2, 0.1], "cfl": [0.8, 0.9, 0.8]})
    (table,), _ = built([tmp_path], "updates/cosine")
    assert not any(entry.leads or entry.best for entry in table.entries.values())
    text = markdown(table)
    assert "**" not in text and "bold" not in text and "deviation over 3 seeds" in text
    assert cells(text, "cfl")[0] == ["0.8333 ± 0.05774 (3)"]
    assert words.summary(table) == []


def test_bold_is_better_than_every_other_by_corrected_intervals(tmp_path):
    behind = (3.0, 4.2, 5.4)  # p = 0.026: clear by itself, not as the smallest of two
    assert 0.025 < stats.ttest_1samp(behind, 0).pvalue < 0.05
    for seed, points in enumerate(behind):
        make_run(tmp_path, f"a{seed}", 0.95, method="local", seed=seed)
        make_run(tmp_path, f"b{seed}", 0.95 - points / 100, method="fedavg", seed=seed)
    (table,), _ = built([tmp_path])
    assert cells(markdown(table), "local")[0][0] == "**95.00 ± 0.00** (3)"
    for seed, points in enumerate(behind):
        make_run(tmp_path, f"c{seed}", 0.95 - 2 * points / 100, method="cfl", seed=seed)
    (table,), _ = built([tmp_path])
    ahead = table.against_leader["mnist", 0.1, 0.0]
    assert all(one.clear and not one.clear_of_all for one in ahead.values()) and len(ahead) == 2
    assert "**" not in markdown(table)


def test_the_same_difference_on_two_seeds_is_not_sure(tmp_path):
    for seed, value in enumerate((0.9, 0.8)):
        make_run(tmp_path, f"a{seed}", value, method="jgesr", seed=seed)
        make_run(tmp_path, f"b{seed}", value - 0.05, method="fedavg", seed=seed)
    (table,), _ = built([tmp_path])
    text = markdown(table)
    assert "**" not in text and cells(text, "fedavg")[1] == ["-5.00 (2)"]
    make_run(tmp_path, "c0", 0.3, method="cfl", seed=0)
    make_run(tmp_path, "c1", 0.4, method="cfl", seed=1)
    (table,), _ = built([tmp_path])
    text = markdown(table)
    assert "**" not in text and cells(text, "fedavg")[1] == ["-5.00 (2)", "\u2013"]
    assert "without an interval: the same difference on every seed tells nothing of chance" in text
    (told,) = words.summary(table)
    assert "It differs from fedavg (+5.00) by the same on every seed, which tells nothing of chance" in told


def test_what_was_run_on_one_seed_keeps_the_best_from_being_sure(tmp_path):
    study(tmp_path)
    (table,), _ = built([tmp_path])
    assert "**" in markdown(table)
    make_run(tmp_path, "d", 0.10, method="fedprox", seed=0)  # far behind, but nothing is known of chance
    (table,), _ = built([tmp_path])
    assert "**" not in markdown(table)


def test_failed_and_unfinished_runs_are_named_and_left_out(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "broken_off", 0.99, status="stopped", method="fedavg", seed=7)
    make_run(tmp_path, "gone_wrong", 0.99, status="failed", method="fedavg", seed=8)
    make_run(tmp_path, "torn", 0.99, method="fedavg", seed=9)
    (tmp_path / "torn" / "summary.json").write_text('{"schema": 1, "sta')
    change(make_run(tmp_path, "newer_format", 0.99, method="fedavg", seed=10), schema=2)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("seed: 1\n")
    (table,), collection = built([tmp_path])
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
    (table,), collection = built([tmp_path])
    assert cells(markdown(table), "fedavg")[0][0] == "90.00 (1)"
    assert collection.notes == ["z_old: same settings and seed as a_new, which is newer; left out"]
    os.utime(new / "summary.json", (10, 10))
    (table,), _ = built([tmp_path])
    assert cells(markdown(table), "fedavg")[0][0] == "50.00 (1)"


def test_copies_of_one_name_are_told_by_their_places(tmp_path):
    for place in "ab":
        (tmp_path / place).mkdir()
        os.utime(make_run(tmp_path / place, "run", 0.5, method="fedavg") / "summary.json", (ord(place), ord(place)))
    assert built([tmp_path])[1].notes == [
        f"{tmp_path}/a/run: same settings and seed as {tmp_path}/b/run, which is newer; left out"
    ]


def test_it_is_said_where_the_data_changed_between_runs(tmp_path):
    for name, method, seed, digest in (
        ("a", "fedavg", 0, "1" * 32),
        ("b", "local", 0, "2" * 32),
        ("c", "local", 1, "3" * 32),  # of another seed: shared out otherwise
        ("d", "cfl", 0, "4" * 16),  # of before all inputs counted
    ):
        change(make_run(tmp_path, name, 0.5, method=method, seed=seed), data={"digest": digest})
    assert built([tmp_path])[1].notes == ["b: other samples than a, of equal settings; the data changed in between"]


def test_it_is_said_where_code_changed_between_runs(tmp_path):
    for name, seed, code in (("a", 0, "1"), ("b", 1, "1"), ("c", 2, "2"), ("d", 3, None)):
        more = {} if code is None else {"code": {"aggregator.name": code}}
        change(make_run(tmp_path, name, 0.5, method="/x/mine.py:Mine", seed=seed), more)
    assert built([tmp_path])[1].notes == ["c: /x/mine.py:Mine is another than for a; its file changed in between"]


def test_code_of_a_setting_that_is_none_stops_no_table(tmp_path):
    for seed in (0, 1):
        change(make_run(tmp_path, f"a{seed}", 0.5, seed=seed), code={"no.setting": str(seed), "logging.tags": "1"})
    assert built([tmp_path])[1].notes == ["a1: None is another than for a0; its file changed in between"]


def test_methods_of_one_name_from_two_files_are_said_to_count_together(tmp_path):
    make_run(tmp_path, "a", 0.5, method="/one/mine.py:Mine")
    make_run(tmp_path, "b", 0.9, method="/two/mine.py:Mine")
    (table,), collection = built([tmp_path])
    assert cells(markdown(table), "Mine")[0][0] == "70.00 (1)"
    (note,) = collection.notes
    assert note.startswith("b: same seed as a, and another method of that name (/two/mine.py:Mine); their mean counts")


@pytest.mark.parametrize("data", ["tensors", "/mine.py:blobs"])
def test_data_of_ones_own_from_two_places_make_two_tables(tmp_path, data):
    for place in "ab":
        change(make_run(tmp_path, place, 0.5, method="fedavg", data=data), {"config.data.root": place})
    tables, collection = built([tmp_path])
    assert (len(tables), collection.notes) == (2, [])


def test_a_folder_given_twice_counts_once(tmp_path):
    study(tmp_path)
    (table,), collection = built([tmp_path, tmp_path / "fedavg_0"])
    assert cells(markdown(table), "fedavg")[0][0] == "91.00 ± 1.00 (3)"
    assert not collection.notes


def test_runs_with_other_shared_settings_get_a_table_of_their_own(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "short", 0.3, method="fedavg", rounds=5)
    tables, _ = built([tmp_path])
    assert [len(table.rows) for table in tables] == [2, 1]
    assert "differs from the others in rounds=5" in markdown(tables[1])


def test_another_metric_and_an_unknown_one(tmp_path):
    study(tmp_path)
    make_run(tmp_path, "unmeasured", None, method="local")
    (table,), collection = built([tmp_path], "accuracy/trained")
    assert cells(markdown(table), "fedavg")[0][0] == "92.00 ± 1.00 (3)"
    assert "own model after local training" in markdown(table)
    assert collection.notes == ["unmeasured: accuracy/trained was not measured; left out"]
    for seed in range(1, 7):
        make_run(tmp_path, f"a{seed}", None, method="local", seed=seed)
    _, collection = built([tmp_path], "accuracy/trained")
    (note,) = collection.notes
    assert note.startswith("a") and note.endswith(" and 2 more: accuracy/trained was not measured; left out")
    (table,), _ = built([tmp_path], "loss/train")
    assert table.caption.startswith("loss/train after the last round: ")
    assert cells(markdown(table), "fedavg")[0] == ["0.5 ± 0 (3)"]  # no percent, no number of the paper
    with pytest.raises(ConfigError, match=r"accuracy/recieved.*did you mean .accuracy/received.*known: .*loss/train"):
        tables_of([tmp_path], "accuracy/recieved")
    with pytest.raises(ConfigError, match=r"no run has the metric 'round'"):
        tables_of([tmp_path], "round")


def test_the_mean_over_the_last_evaluations(tmp_path):
    for method, accuracy in (("fedavg", 0.6), ("jgesr", 0.9)):
        make_run(tmp_path / "runs", method, accuracy, method=method, rounds=4)
    store(built([tmp_path / "runs"])[1], tmp_path / "results.json")
    for place in ("runs", "results.json"):
        (found,), _ = built([tmp_path / place], "accuracy/trained@3")
        column = found.columns[0]
        # rounds 2, 3, 4 of a curve that grows by a fifth of the last value in each, from round 0 on
        assert found.entries["jgesr", column].value.mean == pytest.approx(100 * 0.9 * (3 + 4 + 5) / 15)
        assert found.entries["fedavg", column].pair.mean == pytest.approx(-100 * 0.3 * 12 / 15)
        assert "(accuracy/trained@3) as mean over the last 3 evaluations" in found.caption
        assert "as mean over the last 3 evaluations (4 of 4)" in found.protocol[0]
    with pytest.raises(
        ConfigError, match="no run ends with 5 finite evaluations of accuracy/trained; ask for the mean"
    ):
        built([tmp_path / "runs"], "accuracy/trained@5")
    (received,), _ = built([tmp_path / "runs"], "accuracy/received@4")  # the curve's first value is of no round's end
    assert received.entries["jgesr", column].value.mean == pytest.approx(100 * 0.9 * (2 + 3 + 4 + 5) / 20)
    with pytest.raises(ConfigError, match="no run ends with 5 finite evaluations of accuracy/received"):
        built([tmp_path / "runs"], "accuracy/received@5")
    for count in ("0", "x", "", "9" * 5000):
        with pytest.raises(ConfigError, match=f"no run has the metric 'accuracy/trained@{count[:200]}"):
            built([tmp_path / "runs"], f"accuracy/trained@{count}")
    (tmp_path / "runs" / "fedavg" / "metrics.csv").rename(tmp_path / "curves")
    assert built([tmp_path / "runs"], "accuracy/trained@3")[1].notes == [
        "fedavg: no curve of accuracy/trained is kept; left out"
    ]
    (tmp_path / "curves").rename(tmp_path / "runs" / "fedavg" / "metrics.csv")
    (tmp_path / "runs" / "jgesr" / "metrics.csv").write_bytes(b"round,accuracy/trained\n0,0.1\xff\n")
    (found,), collection = built([tmp_path / "runs"], "accuracy/trained@3")
    assert found.rows == ["fedavg"] and "metrics.csv cannot be read" in collection.notes[0]


def rewrite(folder, last, *lines):
    """Give a run other last values and another table of metrics."""
    ends = int("\n".join(lines).splitlines()[-1].split(",")[0])
    change(folder, {"last.round": ends, **{f"last.{key}": value for key, value in last.items()}})
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def test_evaluations_that_diverged_are_no_rounds_without_one(tmp_path):
    head = "round,accuracy/received,loss/received"
    sound = make_run(tmp_path / "runs", "sound", 0.9, method="fedavg")
    rewrite(sound, {"loss/received": 0.25}, head, "0,0.1,1", "1,,", "2,0.5,0.75", "3,,7", "4,0.9,0.25")
    # not finite in its last evaluation; in the one before
    for seed, last, *ends in (1, None, "0.5", ""), (2, 0.25, "inf", "0.25"):
        harmed = make_run(tmp_path / "runs", f"harmed{seed}", 0.9, method="fedavg", seed=seed)
        rows = [f"{2 * place},0.9,{loss}\n{2 * place + 1},," for place, loss in enumerate(["1", "2", *ends])]
        rewrite(harmed, {"loss/received": last}, head, *rows)
    store(built([tmp_path / "runs"])[1], tmp_path / "results.json")
    for place in ("runs", "results.json"):
        (table,), collection = built([tmp_path / place], "loss/received@2")
        (entry,) = table.entries.values()
        assert (entry.value.n, entry.value.mean) == (1, 0.5)
        assert collection.notes == [
            "harmed1: loss/received is not finite; left out",
            "harmed2: not all of the last 2 evaluations have a finite loss/received; left out",
        ]


def test_a_curve_that_is_not_the_runs_is_not_averaged(tmp_path):
    make_run(tmp_path / "runs", "sound", 0.9, method="fedavg")
    head = "round,accuracy/received"
    for name, last, *rows in ("stale", {"round": 4}, "1,0.5", "2,0.6"), ("twice", {}, "1,0.5", "2,0.6", "2,0.6"):
        rewrite(make_run(tmp_path / "runs", name, 0.9, method=name), last, head, *rows)
    (table,), collection = built([tmp_path / "runs"], "accuracy/received@2")
    assert table.rows == ["fedavg"]
    assert collection.notes == [
        "stale: metrics.csv ends at round 2, the run at round 4; left out",
        "twice: metrics.csv cannot be read (ValueError: its rounds do not ascend); left out",
    ]
    assert built([tmp_path / "runs"])[0][0].rows == ["fedavg", "stale", "twice"]  # summaries are enough


def test_a_metric_that_no_run_ends_with_is_known_but_not_finite(tmp_path):
    rewrite(make_run(tmp_path, "harmed", 0.9), {"loss/received": None}, "round,accuracy/received", "0,0.9", "1,0.9")
    for metric in ("loss/received", "loss/received@2"):
        with pytest.raises(ConfigError, match="loss/received is not finite at the end of any run; ask for an accuracy"):
            built([tmp_path], metric)


def test_a_mean_over_evaluations_that_a_stored_file_has_no_curve_for(tmp_path):
    folder = make_run(tmp_path / "runs", "a", 0.9)
    rewrite(folder, {"updates/length": 3.0}, "round,accuracy/received,updates/length", "0,0.1,", "1,0.5,1", "2,0.9,3")
    (table,), _ = built([tmp_path / "runs"], "updates/length@2")
    assert [entry.value.mean for entry in table.entries.values()] == [2]
    store(built([tmp_path / "runs"])[1], tmp_path / "results.json")
    told = r"no curve of updates/length is kept .*; give the runs' folders, or --metric updates/length without @2$"
    with pytest.raises(ConfigError, match=told):
        built([tmp_path / "results.json"], "updates/length@2")
    assert built([tmp_path / "results.json"], "updates/length")[0]


def test_csv_holds_full_numbers(tmp_path):
    study(tmp_path)
    tables, _ = built([tmp_path])
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(csv_text(tables)))}
    assert float(rows["fedavg"]["mean"]) == pytest.approx(91)
    assert float(rows["fedavg"]["std"]) == pytest.approx(1)
    assert rows["fedavg"]["seeds"] == "3"
    assert [rows[name]["best"] for name in ("fedavg", "jgesr")] == ["0", "1"]
    assert float(rows["fedavg"]["ci95_low"]) == pytest.approx(-4.8333333 - 0.7171087, abs=1e-5)
    assert rows["fedavg"]["reference"] == "jgesr"
    assert rows["jgesr"]["method_minus_reference"] == ""


def test_latex_is_balanced_and_escaped(tmp_path):
    study(tmp_path)
    for seed in range(3):
        make_run(tmp_path, f"two{seed}", 0.5 + seed / 100, method="two_step", seed=seed)
    (table,), _ = built([tmp_path])
    text = latex(table)
    assert "in percent" in text and r"measured (\%)" in text and text.count(r"\caption{") == 2
    assert "$-$44.83 [$-$45.55, $-$44.12] *" in text  # 95 - 50, 95.5 - 51, 97 - 52: a true minus
    assert not re.search(r"[^-{]-\d", re.sub(r"%.*|cmidrule\S*|results-1|differences-1", "", text))
    assert r"\textbf{95.83 $\pm$ 1.04}" in text
    assert r"two\_step" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    body = [line for line in text.splitlines() if line.endswith(r"\\") and not line.startswith("%")]
    first = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text).group(1)
    rows = body[1 : 1 + 1 + len(table.rows)]
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 2
    assert all(row.count(" & ") == len(first) - 1 for row in rows)


def test_latex_says_how_many_seeds_once_or_where_they_differ(tmp_path):
    study(tmp_path)
    (table,), _ = built([tmp_path])
    text = latex(table)
    captions = re.findall(r"\\caption\{(.*)\}", text)
    assert captions[0].endswith(r"in percent: mean $\pm$ sample standard deviation over 3 seeds.")
    assert captions[1].startswith("jgesr subtracted from each method on equal seeds (3 each), in")
    assert "fedavg & 91.00 $\\pm$ 1.00 \\" in text and "(3) \\" not in text
    make_run(tmp_path, "more", 0.93, method="fedavg", seed=3)
    change(tmp_path / "jgesr_0", remarks=[{"kind": "diverged", "rounds": [2], "text": "J rose"}])
    for seed in (0, 1):
        make_run(tmp_path, f"cfl{seed}", 0.5 + seed / 100, method="cfl", seed=seed)
    (table,), _ = built([tmp_path])
    text = latex(table)
    captions = re.findall(r"\\caption\{(.*)\}", text)
    assert captions[0].endswith("over seeds, their number in brackets.") and "their number in brackets" in captions[1]
    assert "fedavg & 91.50 $\\pm$ 1.29 (4) \\" in text
    assert r"95.83 $\pm$ 1.04}\textsuperscript{\textdagger{}} (3) " in text
    assert re.search(r"fedavg & .*\] \* \(3\) &", text)
    assert "over seeds, their number in brackets (2 to 4); bold" in text


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
    with pytest.raises(ConfigError, match=r"no folder and no file .*/rums \(did you mean 'runs'\?\)"):
        main([str(tmp_path / "rums")])
    with pytest.raises(ConfigError, match=r"no folder and no file nowhere/at/all$"):
        main(["nowhere/at/all"])
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
    _, collection = built([tmp_path])
    assert [run.folder for run in collection.runs] == [outer]
    assert collection.notes == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("last.accuracy/received", "abc"),
        ("last.accuracy/received", 10**400),
        ("last.accuracy/received", True),
        ("config.aggregator.name", ["jgesr"]),
        ("clients", [1, 2]),
        ("remarks", ["dropped"]),
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
    change(make_run(tmp_path, "harmed", 0.8, seed=1), {place: value})
    (table,), collection = built([tmp_path])
    assert [entry.value.n for entry in table.entries.values()] == [1]
    (note,) = collection.notes
    assert note.startswith("harmed: summary.json cannot be read") and len(note) < 500


def test_runs_that_met_something_are_marked_everywhere(tmp_path):
    study(tmp_path)
    dropped = {"kind": "dropped_uploads", "rounds": [1, 2], "text": "every upload was dropped in 2 rounds"}
    change(tmp_path / "jgesr_1", remarks=[dropped, {"kind": "diverged", "rounds": [2], "text": "J rose <b>"}])
    change(make_run(tmp_path, "older", 0.5, method="cfl"), dropped_uploads={"3": [1]})
    change(make_run(tmp_path, "new kind", 0.5, method="local"), remarks=[{"kind": "odd", "text": None}])
    (table,), _ = built([tmp_path])
    text = markdown(table)
    assert cells(text, "jgesr")[0][0] == "95.83 ± 1.04†‡ (3)"
    assert cells(text, "fedavg")[0][0] == "91.00 ± 1.00 (3)"
    assert cells(text, "cfl")[0][0] == "50.00† (1)"
    assert cells(text, "local")[0][0] == "50.00§ (1)"
    assert "† uploads were dropped: older: uploads were dropped in 1 round; jgesr_1: every upload was dropped" in text
    assert r"‡ the solver diverged: jgesr_1: J rose \<b\>" in text
    assert r"\textsuperscript{\textdagger{}\textdaggerdbl{}}" in latex(table)
    assert r"J rose \textless{}b\textgreater{}" in latex(table)
    (row,) = [row for row in csv.DictReader(io.StringIO(csv_text([table]))) if row["method"] == "cfl"]
    assert "uploads were dropped" in row["remarks"]


def test_the_best_keeps_its_mark(tmp_path):
    study(tmp_path)
    change(tmp_path / "jgesr_1", remarks=[{"kind": "dropped_uploads", "rounds": [1], "text": "1 of 3 dropped"}])
    (table,), _ = built([tmp_path])
    assert cells(markdown(table), "jgesr")[0][0] == "**95.83 ± 1.04**† (3)"


def test_the_reference_is_chosen_the_studys_first_or_jgesr(tmp_path):
    tmp_path = tmp_path / "inner"  # its parent holds nothing of other tests
    tmp_path.mkdir()
    study(tmp_path)
    make_run(tmp_path, "mnist_s0.1_alone_seed0", 0.5, method="local")
    assert built([tmp_path])[0][0].reference == "jgesr"
    assert built([tmp_path], None, "fedavg")[0][0].reference == "fedavg"
    with pytest.raises(
        ConfigError, match=r"no method 'fedavgg' \(did you mean 'fedavg'\?\); known: fedavg, jgesr, local"
    ):
        built([tmp_path], None, "fedavgg")
    (tmp_path / "study.yaml").write_text("base: base\nmethods:\n  alone: {name: local}\n  jgesr: {}\n")
    (table,), collection = built([tmp_path])
    assert table.reference == "local" and collection.order == ["local"]
    assert built([tmp_path.parent])[0][0].reference == "local"  # studies at any depth
    assert built([tmp_path], None, "alone")[0][0].reference == "local"  # by the study's name for it
    (tmp_path / "study.yaml").write_text("[")
    assert built([tmp_path])[0][0].reference == "jgesr"


@pytest.mark.parametrize("name", ["./mine.py:Mine", "mine (tuned, 0.5)", "a/b", "mine"])
def test_a_method_is_found_by_what_the_study_makes_of_its_name_in_folders(tmp_path, name):
    (tmp_path / "tiny.yaml").write_text(
        f"base: mnist_quick\ndata: [synthetic]\nmethods:\n  {name!r}: {{name: fedprox}}\n  local: {{}}\n"
    )
    for cell in load_study(tmp_path / "tiny.yaml")[1]:
        make_run(tmp_path / "tiny", cell.name, 0.5, method=cell.config.aggregator.name, data="synthetic")
    (tmp_path / "tiny" / "study.yaml").write_text((tmp_path / "tiny.yaml").read_text())
    (table,), collection = built([tmp_path / "tiny"])
    assert collection.order == ["fedprox", "local"] and table.reference == "fedprox"
    assert collection.names == {"fedprox": name.removeprefix("./mine.py:")}


def test_a_value_of_a_grid_that_is_called_like_a_method_is_none(tmp_path):
    (tmp_path / "study.yaml").write_text(
        "methods: {alone: {name: local}, cfl: {}, fedavg: {}, my_own: {name: median}}\n"
    )
    for name, method in (("alone", "local"), ("cfl", "cfl"), ("fedavg", "fedavg"), ("my_own", "median")):
        make_run(tmp_path, f"my_cfl_set_s0.1_m0.05_{name}_fedavg_cnn_seed0", 0.5, method=method)
    collection = collect([tmp_path])
    assert collection.order == ["local", "cfl", "fedavg", "median"]
    assert collection.names == {"local": "alone", "median": "my_own"}


def test_the_metric_that_runs_name_leads(tmp_path):
    for seed in (0, 1):
        change(make_run(tmp_path, f"a{seed}", 0.9, seed=seed), {"config.metric": "accuracy/trained"})
    assert built([tmp_path])[0][0].metric == "accuracy/trained"
    assert built([tmp_path], "accuracy/received")[0][0].metric == "accuracy/received"


def test_worst_client_and_worst_decile_stand_beside_the_mean(tmp_path):
    for seed, worst in enumerate((0.5, 0.6)):
        folder = make_run(tmp_path, f"r{seed}", 0.9, method="fedavg", seed=seed)
        worse = {"last.accuracy/received_worst": worst, "last.accuracy/received_worst_decile": worst + 0.1}
        change(folder, worse)
    (table,), _ = built([tmp_path])
    assert cells(markdown(table), "method")[0][-2:] == ["worst client", "worst decile"]
    assert cells(markdown(table), "fedavg")[0][-2:] == ["55.00", "65.00"]
    (row,) = csv.DictReader(io.StringIO(csv_text([table])))
    assert float(row["worst_client"]) == pytest.approx(55)


def test_the_worst_tenth_of_ten_clients_is_the_worst_client(tmp_path):
    folder = make_run(tmp_path, "a", 0.9, method="fedavg", clients=10)
    change(folder, {"last.accuracy/received_worst": 0.5, "last.accuracy/received_worst_decile": 0.5})
    (table,), _ = built([tmp_path])
    assert cells(markdown(table), "method")[0] == ["mnist s=0.1 (%)", "worst client"]
    (row,) = csv.DictReader(io.StringIO(csv_text([table])))
    assert row["worst_decile"] == "50.0"


def test_parts_of_ones_own_are_told_by_their_names_not_their_paths(tmp_path):
    places = ("/home/me/mine.py:Small", "/home/me/mine.py:Large")
    for name, network in zip("ab", places, strict=True):
        folder = make_run(tmp_path, name, 0.5, data="/home/me/mine.py:blobs")
        change(folder, {"config.model.name": network, "config.data.partition": places[0]})
    text = all_markdown(built([tmp_path])[0], [])
    assert "network Small" in text and "differs from the others in model.name=Large" in text
    assert "| method | blobs s=0.1 (%) |" in text and "/home" not in text
    # whose name alone would not tell it from the other
    change(folder, {"config.model.name": "/home/you/mine.py:Small"})
    assert "differs from the others in model.name=/home/you/mine.py:Small" in all_markdown(built([tmp_path])[0], [])


def test_fidelity_weights_as_printed_are_told_of_variants_too(tmp_path):
    make_run(tmp_path, "a", 0.5, method="jgesr", alpha=0.5)
    make_run(tmp_path, "b", 0.5, method="fedavg")
    (table,), _ = built([tmp_path])
    assert any("weigh fidelity as the paper prints it (shares)" in line for line in table.protocol)


def test_latex_says_what_it_needs(tmp_path):
    study(tmp_path)
    tables, collection = built([tmp_path])
    assert all_latex(tables, collection.notes).startswith("% needs \\usepackage{booktabs}\n% local test accuracy")


def test_the_partition_is_named_with_what_it_uses():
    assert "Dirichlet kappa 0.05" in protocol_text(
        {"data.kappa": 0.05, "data.partition": "dirichlet", "data.planted": None}
    )
    shards = {"data.kappa": 0.05, "data.partition": "shards", "data.classes_per_client": 2, "data.groups": 4}
    assert protocol_text(shards) == "partition shards, classes a client 2"
    assert protocol_text({"data.planted": "rotations", "data.groups": 4}) == "planted groups by rotations, groups 4"


def of_partition(root, name, told, partition=None, **settings):
    """Write a run of the paper's settings, whose configuration and summary name a partition."""
    folder = make_run(root, name, 0.9, with_files=False, **PAPERS | {"method": "fedavg"} | settings)
    change(folder, {"config.data.partition": partition}, data={"partition": told})


def test_the_partition_that_was_used_is_told_not_the_usual_one(tmp_path):
    of_partition(tmp_path, "a", "natural")  # of clients' own files
    (table,), _ = built([tmp_path])
    told = "\n".join(table.protocol)
    assert "partition natural" in told and "Dirichlet" not in told
    assert "left out" in told and "data.partition natural (paper: dirichlet)" in told
    assert table.entries["fedavg", ("mnist", 0.1, 0.0)].paper is None


def test_settings_without_a_say_split_no_tables(tmp_path):
    make_run(tmp_path, "older", 0.9, method="local", **PAPERS)  # its summary tells nothing of the data
    of_partition(tmp_path, "a", "dirichlet")
    of_partition(tmp_path, "b", "dirichlet", "dirichlet", method="cfl")
    tables, _ = built([tmp_path])
    assert [table.rows for table in tables] == [["local", "fedavg", "cfl"]]
    of_partition(tmp_path, "c", "iid", "iid", kappa=1)
    of_partition(tmp_path, "d", "iid", "iid", kappa=2, seed=1)
    of_partition(tmp_path, "e", "iid", "iid", kappa=3)
    tables, collection = built([tmp_path])
    assert [len(table.rows) for table in tables] == [3, 1]
    assert [entry.value.n for entry in tables[1].entries.values()] == [2]
    assert "this table differs from the others in data.partition=iid" in tables[1].protocol
    (note,) = collection.notes
    assert "same settings and seed" in note
    for name, kappa in (("f", 1), ("g", 2)):  # a function of one's own is given kappa
        of_partition(tmp_path, name, "mine", "./mine.py:mine", kappa=kappa)
    assert len(built([tmp_path])[0]) == 4


def test_tables_do_not_wait_for_torch(tmp_path):
    study(tmp_path)
    lines = "import sys; from jgesr_lightning.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", lines, "table", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0 and "| jgesr |" in done.stdout, done.stderr


def test_what_methods_add_to_the_clients_loss_is_said(tmp_path):
    study(tmp_path)
    change(tmp_path / "jgesr_0", client_terms=["Proximal(mu=1)"])
    for seed in (1, 2):
        change(tmp_path / f"jgesr_{seed}", client_terms=["Proximal(mu=1)"])
    (table,), _ = built([tmp_path])
    assert "added to the clients' loss: jgesr: Proximal(mu=1)" in table.protocol


def test_names_that_are_one_when_shortened_give_way_to_labels(tmp_path):
    study(tmp_path)
    found = collect([tmp_path])
    assert replace(found, names={"jgesr": "x" * 70 + "1", "fedavg": "x" * 70 + "2"}).titles == {}
    assert replace(found, names={"jgesr": "mine", "fedavg": "jgesr"}).titles == {"jgesr": "mine"}


def test_rows_are_called_as_the_study_calls_its_methods(tmp_path):
    named_study(tmp_path / "runs")
    store(built([tmp_path / "runs"])[1], tmp_path / "results.json")
    for place in ("runs", "results.json"):
        (table,), _ = built([tmp_path / place])
        assert table.rows == ["fedavg", "TrimMom (momentum=0.5)", "jgesr (uniform)"]
        text = markdown(table)
        means = [cells(text, label)[0][0] for label in ("my method", "ours", "jgesr (uniform)")]
        assert means == ["86.00 ± 1.41 (2)", "80.50 ± 0.71 (2)", "91.50 ± 2.12 (2)"]
        assert "ours subtracted from each method" in text and cells(text, "method minus ours")
        line = "called as in the study's file: my method: fedavg; ours: TrimMom (momentum=0.5)"
        assert line in table.protocol and text.count("TrimMom") == 1
        tex = latex(table)
        assert "\nours & 80.50" in tex and f"% {line}\n" in tex and tex.count("TrimMom") == 1
        rows = csv.DictReader(io.StringIO(csv_text([table])))
        assert [row["title"] for row in rows] == ["my method", "ours", "jgesr (uniform)"]
        (told,) = words.summary(table)
        assert "ours" in told and "my method" in told and "TrimMom" not in told


def test_a_name_that_is_another_methods_label_stands_for_neither(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "study.yaml").write_text("methods: {fedavg: {name: local}}\n")
    make_run(tmp_path / "a", "mnist_s0.1_fedavg_seed0", 0.5, method="local")
    make_run(tmp_path, "b", 0.9, method="fedavg")
    (table,), _ = built([tmp_path])
    assert [cells(markdown(table), label)[0] for label in ("local", "fedavg")] == [["50.00 (1)"], ["90.00 (1)"]]
