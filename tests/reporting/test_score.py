"""The distance of runs from the paper's numbers."""

import pytest

from jgesr_lightning.config import ConfigError
from jgesr_lightning.reporting.collection import collect
from jgesr_lightning.reporting.score import main, means_of, readings, score
from tests.reporting.synthetic import PAPERS, make_run
from tests.study.studies import ROOT


def test_the_distance_by_hand(tmp_path):
    make_run(tmp_path, "a", 0.8848, method="fedavg")  # two points below 90.48
    make_run(tmp_path, "b", 0.90, method="fedavg", data="cifar10", noise=0.2, seed=0)  # these two: 5.2 above 74.80
    make_run(tmp_path, "c", 0.70, method="fedavg", data="cifar10", noise=0.2, seed=1)
    make_run(tmp_path, "d", 0.8948, method="fedavg", noise=0.2, missing=0.05)  # the paper has no such number
    make_run(tmp_path, "e", 0.96, method="jgesr", fidelity="uniform")  # not as published
    runs = collect([tmp_path]).runs
    means = means_of(runs, "accuracy/received")
    found = score(means, ("fedavg", "fedprox"))
    assert found.distance == pytest.approx(((2**2 + 5.2**2) / 2) ** 0.5)
    assert (found.numbers, found.of) == (2, 8)
    assert score(means, ("jgesr",)).distance is None


def test_a_reading_is_what_differs_between_runs_of_one_data_set(tmp_path):
    for data, fraction in (("mnist", 0.1), ("cifar10", 0.05)):
        for clients in (10, 20):
            make_run(tmp_path, f"{data}_{clients}", 0.9, "finished", method="fedavg", data=data, fraction=fraction,
                     clients=clients)  # fmt: skip
    found = readings(collect([tmp_path]).runs)
    assert {name: len(runs) for name, runs in found.items()} == {"clients 10": 2, "clients 20": 2}


def test_the_command_prints_the_table_of_the_readings(capsys):
    assert main([str(ROOT / "docs" / "results" / "readings_small.json")]) == 0
    text = capsys.readouterr().out
    assert "| batch size full, network lenet | 39.24 | 40.96 | 4.70 | **1.57** |" in text
    assert "| batch size 128, network lenet | 37.08 | 36.76 | 6.52 | 4.83 |" in text
    assert "| batch size full, network fedavg_cnn | 37.92 | 38.13 | 5.31 | 2.84 |" in text
    assert "other" not in text  # of the other methods there is no run


def test_incomplete_rows_say_so_and_are_not_the_best(tmp_path, capsys):
    def run(name, value, fraction=0.2, **settings):
        make_run(tmp_path, name, value, with_files=False, fraction=fraction, **(PAPERS | settings))

    for noise, value in ((0.1, 0.95), (0.2, 0.92)):
        run(f"a{noise}", value, method="jgesr", noise=noise)
    run("b", 0.9048, method="fedavg", fraction=0.1)
    run("c", 0.95, method="fedavg")
    run("d", 0.95, method="fedavg", noise=0.2)
    assert main([str(tmp_path)]) == 0
    text, notes = capsys.readouterr()
    assert "| part of the training data 0.1 | 0.00 (1 of 8) |" in text
    assert "| part of the training data 0.2 | **4.79** (2 of 8) |" in text  # 4.52 and 5.04
    assert "from the other 20 numbers" in text and "0.50 (2 of 20)" in text  # 0.17 and 0.68 below
    assert notes == ""
    for noise, value in ((0.1, 0.90), (0.2, 0.90)):  # nearer, and another experiment
        run(f"e{noise}", value, method="fedavg", noise=noise, kappa=10)
    assert main([str(tmp_path)]) == 0
    text, notes = capsys.readouterr()
    assert "**4.79** (2 of 8)" in text and "data 0.2, Dirichlet kappa 10 | 0.34 (2 of 8)" in text
    assert "kappa 10: not the paper's experiment, and never chosen: data.kappa 10" in notes


def test_runs_that_the_paper_has_no_number_for(tmp_path):
    make_run(tmp_path, "a", 0.9, method="local")
    with pytest.raises(ConfigError, match="none of the runs"):
        main([str(tmp_path)])
