"""What summary.json says of a run's rounds."""

import json
from types import SimpleNamespace

import pytest

from jgesr_lightning.callbacks.files import ResultFiles
from jgesr_lightning.records import RoundRecord


def summary_of(folder, values, **settings):
    """Return the summary of rounds with (received, trained) accuracies, None where not measured."""
    names = ("accuracy/received", "accuracy/trained")
    records = [
        RoundRecord(number, {name: value for name, value in zip(names, pair, strict=True) if value is not None})
        for number, pair in enumerate(values)
    ]
    files = ResultFiles(folder, {}, write_csv=False, **settings)
    files.write_summary(3, SimpleNamespace(records=records, round=len(records) - 1), "finished", "")
    return json.loads((folder / "summary.json").read_text())


ROUNDS = [(0.99, None), (0.6, 0.7), (0.5, 0.9), (0.4, 0.8)]


@pytest.mark.parametrize(("metric", "number"), [("accuracy/received", 1), ("accuracy/trained", 2)])
def test_the_best_round_is_so_by_the_metric_that_leads(tmp_path, metric, number):
    found = summary_of(tmp_path, ROUNDS, metric=metric)
    best = found["best"]
    assert (best["round"], best["metric"]) == (number, metric)
    received, trained = ROUNDS[number]
    assert best["accuracy/received"] == received
    assert best.get("accuracy/trained") == (trained if metric == "accuracy/trained" else None)
    assert metric in best["note"] and "not a result" in best["note"]
    assert found["last"]["round"] == 3


def test_without_a_round_that_measured_it_the_last_stands_for_the_best(tmp_path):
    best = summary_of(tmp_path, [(0.2, None)], metric="accuracy/trained")["best"]
    assert (best["round"], best["accuracy/trained"], best["accuracy/received"]) == (0, None, 0.2)
