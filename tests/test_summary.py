"""Reading summary.json, sound or damaged."""

import json

import pytest

from jgesr_lightning.records import RoundRecord, best_of
from jgesr_lightning.summary import DamagedSummaryError, read_summary

SOUND = {"status": "finished", "config": {"seed": 1}, "last": {"accuracy/received": 0.5}}


def test_sound_and_missing_ones(tmp_path):
    assert read_summary(tmp_path) == {}
    assert read_summary(tmp_path / "nowhere") == {}
    for summary in (SOUND, {"status": "running"}):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert read_summary(tmp_path) == summary


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "3", "[" * 100_000, '{"a":' * 100_000, "{}", '{"status": "done"}',
        '{"status": ["finished"]}', '{"status": "finished"}', '{"status": "finished", "config": {}, "last": null}',
        '{"status": "finished", "config": {}, "last": {"accuracy/received": 0.5}}',
        '{"status": "running", "config": []}', "\udcff",
    ],
)  # fmt: skip
def test_damaged_ones_are_named_in_one_line(tmp_path, text):
    (tmp_path / "summary.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedSummaryError, match=r"^summary\.json") as caught:
        read_summary(tmp_path)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_a_folder_in_its_place_is_damage_too(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(DamagedSummaryError, match="Is a directory"):
        read_summary(tmp_path)


def test_the_best_round_has_the_greatest_accuracy_and_the_least_spread():
    values = {1: (0.5, 0.3), 2: (0.7, 0.2), 3: (0.6, 0.1), 4: (0.7, 0.1)}
    records = [RoundRecord(0, {"accuracy/trained": 0.9, "accuracy/trained_std": 0.0})] + [
        RoundRecord(number, {"accuracy/trained": mean, "accuracy/trained_std": spread})
        for number, (mean, spread) in values.items()
    ]
    assert best_of(records, "accuracy/trained").round == 2
    assert best_of(records, "accuracy/trained_std").round == 3
    assert best_of(records, "accuracy/received") is None
