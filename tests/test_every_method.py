"""Every method through the command line, on a small part of the real MNIST."""

import csv
import json

import numpy as np
import pytest

from jgesr_lightning import cli
from jgesr_lightning.aggregators import aggregator_class, aggregator_names


@pytest.mark.data
@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("method", aggregator_names())
def test_two_rounds_of_every_method_with_half_the_clients(method, missing, tmp_path, data_root):
    small = ["clients=6", "rounds=2", "participation=0.5", "local.epochs=1", "data.fraction=0.02", "runtime.devices=1"]
    settings = ["aggregator.max_iter=50"] if method in ("two_step", "jgesr") else []
    status = cli.main(
        [
            *("train", "mnist_s01", f"output_dir={tmp_path}", "name=run", "logging.wandb=false"),
            *(f"data.root={data_root('mnist')}", f"aggregator.name={method}", f"channel.missing_rate={missing}"),
            *small,
            *settings,
        ]
    )
    assert status == 0
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (summary["method"], summary["missing_rate"], summary["rounds_done"]) == (method, missing, 2)
    assert summary["last"]["participants"] == 3
    assert 0 <= summary["last"]["accuracy/received"] <= 1
    with open(folder / "clients.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 6
    before, after = (
        {row["client"]: row["accuracy/received"] for row in rows if row["round"] == str(number)} for number in (1, 2)
    )
    absent = [row["client"] for row in rows if row["round"] == "2" and row["participated"] == "0"]
    assert len(absent) == 3
    assert all(before[client] == after[client] for client in absent)
    graph = np.load(folder / "graphs.npz")["round_00002"]
    assert graph.shape == (6, 6)
    others = [int(row["client"]) for row in rows if row["round"] == "2" and row["participated"] == "1"]
    absent = [int(client) for client in absent]
    assert not graph[np.ix_(others, absent)].any()  # nobody listens to those who sat out
    if aggregator_class(method).mixing:
        np.testing.assert_allclose(graph.sum(1), 1, atol=1e-9)
    else:
        np.testing.assert_array_equal(graph, graph.T)
