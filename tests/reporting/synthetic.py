"""Run folders with chosen numbers, in the formats that a training run writes."""

import csv
import json

import numpy as np

from jgesr_lightning.reporting.tables import tables_of

PAPERS = {"rounds": 30, "clients": 20}  # as in the paper's experiment
CLASSES = ["zero", "one", "two"]


def built(roots, *arguments, **settings):
    """Return tables and the collection that they come from."""
    found = tables_of(roots, *arguments, **settings)
    return found.tables, found.collection


def config_of(
    method="jgesr", seed=0, noise=0.1, data="mnist", missing=0.0, rounds=2, clients=3, kappa=0.05, fraction=1.0,
    **settings,
):  # fmt: skip
    return {
        "name": "run",
        "seed": seed,
        "rounds": rounds,
        "clients": clients,
        "participation": 1.0,
        "output_dir": "runs",
        "data": {"name": data, "root": None, "kappa": kappa, "fraction": fraction},
        "model": {"name": "lenet"},
        "local": {"epochs": 5, "batch_size": 32, "lr": 0.01},
        "channel": {"noise": noise, "missing_rate": missing},
        "aggregator": {"name": method, **settings},
        "logging": {"tags": []},
        "seeds": {"partition": None, "channel": None},
    }


def make_run(root, name, accuracy, status="finished", with_files=True, **settings):
    """Write a run whose last `accuracy/received` is `accuracy`; None leaves it unmeasured."""
    config = config_of(**settings)
    folder = root / name
    folder.mkdir(parents=True)
    last = {"round": config["rounds"], "loss/train": 0.5}
    if accuracy is not None:
        last |= {"accuracy/received": accuracy, "accuracy/trained": min(1.0, accuracy + 0.01)}
    summary = {
        "schema": 1,
        "name": name,
        "status": status,
        "reason": "" if status == "finished" else "SIGTERM",
        "rounds": config["rounds"],
        "rounds_done": config["rounds"] if status == "finished" else 1,
        "method": config["aggregator"]["name"],
        "last": last,
        "best": {"round": 1, "accuracy/received": 0.99},
        "aggregation": {"objective": [3.0, 2.0, 1.5, 1.4], "iterations": 3, "converged": True},
        "config": config,
    }
    (folder / "config.yaml").write_text("name: run\n")
    (folder / "summary.json").write_text(json.dumps(summary))
    if with_files and accuracy is not None:
        write_files(folder, accuracy, config)
    return folder


def change(folder, inner=None, **values):
    """Give a run other values in its summary, `inner` ones under dotted keys such as ``last.accuracy/received``."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    for key, value in {**(inner or {}), **values}.items():
        *parents, last = key.split(".")
        part = summary
        for parent in parents:
            part = part[parent]
        part[last] = value
    path.write_text(json.dumps(summary))


def named_study(root):
    """Three methods and two seeds of a study that names them; one name says no more than the settings."""
    methods = {
        "ours": {"method": "/home/me/mine.py:TrimMom", "momentum": 0.5},
        "my method": {"method": "fedavg"},
        "jgesr_uniform": {"method": "jgesr", "fidelity": "uniform"},
    }
    root.mkdir()
    (root / "study.yaml").write_text(json.dumps({"methods": {name: {} for name in methods}}))
    for place, (name, settings) in enumerate(methods.items()):
        for seed in range(2):
            accuracy = 0.8 + place / 20 + seed * (place + 1) / 100
            make_run(root, f"mnist_s0.1_{name.replace(' ', '-')}_seed{seed}", accuracy, seed=seed, **settings)


def write_files(folder, accuracy, config):
    rounds = config["rounds"]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", "accuracy/received", "accuracy/trained"])
        for number in range(rounds + 1):
            value = repr(accuracy * (number + 1) / (rounds + 1))
            writer.writerow([number, value, value if number else ""])
    (folder / "partition.csv").write_text(
        ",".join(["client", "train", "test", *CLASSES]) + "\n0,6,2,8,0,0\n1,6,2,4,4,0\n2,3,1,0,0,4\n"
    )
    graph = np.array([[0, 1, 0.0], [1, 0, 0.1], [0, 0.1, 0]])
    np.savez(folder / "graphs.npz", round_00001=graph / 2, round_00002=graph)
