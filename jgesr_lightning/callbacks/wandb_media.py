"""Tables, curves and pictures for W&B, and the artifact of a run's models: from a run's records to what W&B logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.records import RoundRecord

MAX_ROWS = 10_000  # of a table that W&B shows
CURVES = ("accuracy/received", "accuracy/trained", "loss/train")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Return a W&B table."""
    import wandb

    return wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)


def client_order(class_table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None, clients: int) -> list[int]:
    """Return the order of the clients in all pictures of a run: those that hold like classes are neighbours.

    It comes from the data alone, so that it is the same in every round and after a resume, and moving through rounds
    shows what changed. Without a class table: as numbered.

    Args:
        class_table: columns and rows of ``partition.csv``: client, train, test, then the samples of each class.
        clients: K.
    """
    if class_table is None:
        return list(range(clients))
    from jgesr_lightning.reporting import plots

    counts = np.array([row[3:] for row in class_table[1]], dtype=np.float64).reshape(clients, -1)
    shares = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-300)
    return plots.cluster_order(shares @ shares.T)


def graph_media(
    graph: Tensor, layers: Tensor | None, order: Sequence[int], label: str, title: str, number: int
) -> dict[str, Any]:
    """Return the graph of a round as an image and as a table of values; those of single layers too, if there.

    Args:
        graph: (K, K).
        layers: (layers, K, K), or None.
        order: of the clients in the pictures.
        label: what the weights are.
        title: above the picture.
        number: the round.
    """
    import wandb

    from jgesr_lightning.reporting import plots

    names = [str(client) for client in range(len(graph))]
    figure = plots.graph_heatmap(graph.numpy(), order, title, label)
    logged = {
        "graph/picture": wandb.Image(plots.to_pixels(figure)),
        "graph/values": table(["client", *names], [[k, *row] for k, row in enumerate(graph.tolist())]),
    }
    if layers is not None:
        figures = [
            plots.graph_heatmap(one.numpy(), order, f"layer {at}, round {number}", label)
            for at, one in enumerate(layers)
        ]
        logged["graph/layers"] = [wandb.Image(plots.to_pixels(figure)) for figure in figures]
        rows = [[at, k, *row] for at, one in enumerate(layers.tolist()) for k, row in enumerate(one)]
        logged["graph/layer_values"] = table(["layer", "client", *names], rows)
    return logged


def client_curves(records: Sequence[RoundRecord]) -> dict[str, Any]:
    """Return each client's accuracies and losses per round, as one table and as a plot with a line a client."""
    import wandb

    measured = [record for record in records if CURVES[0] in record.clients]
    if not measured:
        return {}
    clients = len(measured[0].clients[CURVES[0]])
    every = -(-len(measured) * clients // MAX_ROWS)
    kept = measured[::-every][::-1]  # from the last one back
    names = [name for name in CURVES if any(name in record.clients for record in kept)]
    rows = [
        [record.round, f"{k:03d}", *(record.clients[name][k] if name in record.clients else None for name in names)]
        for record in kept
        for k in range(clients)
    ]
    curves = table(["round", "client", *names], rows)
    plot = wandb.plot.line(curves, "round", CURVES[0], stroke="client", title="accuracy of each client")
    return {"clients/rounds": curves, "clients/accuracy": plot}


def models_artifact(
    name: str, models: Tensor, layout: ParameterLayout, graph: Tensor | None, metadata: Mapping[str, Any]
) -> Any:
    """Return the artifact of the models that the clients were sent last, and of the last graph.

    It holds ``models.pt`` (`torch.load` gives name -> (K, ...) tensor, one row a client, for `load_state_dict`) and
    ``graph.npy`` (K, K).

    Args:
        name: of the artifact.
        models: (K, d).
        layout: of the columns.
        graph: (K, K), or None.
        metadata: shown beside it.
    """
    import wandb

    artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
    with artifact.new_file("models.pt", mode="wb") as file:
        torch.save({key: value.clone() for key, value in layout.restore(models).items()}, file)
    if graph is not None:
        with artifact.new_file("graph.npy", mode="wb") as file:
            np.save(file, graph.numpy())
    return artifact
