"""A federation small enough to run many rounds of in a test: linear classifiers on a few points."""

import torch
from lightning.fabric import Fabric
from torch import nn

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.channel import Uplink
from jgesr_lightning.client import ClientModule
from jgesr_lightning.federation import Federation
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.orchestrator import RoundOrchestrator
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.runtime.sharding import Sharding
from jgesr_lightning.training import ClientData, build_engine

SIZES = (12, 5, 9, 7)


def linear_net():
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.2, -0.1]]))
        net.bias.copy_(torch.tensor([0.05, -0.05]))
    return net


def client_data(sizes=SIZES):
    draw = torch.Generator().manual_seed(7)
    data = []
    for k, size in enumerate(sizes):
        inputs = torch.randn(size + 4, 3, generator=draw)
        labels = (inputs[:, k % 3] > 0).long()
        data.append(ClientData(inputs[:size], labels[:size], inputs[size:], labels[size:]))
    return data


def small_federation(
    callbacks=(), *, method="fedavg", settings=None, noise=0.01, missing_rate=0.0, rounds=3, lr=0.1, net=None, **options
):
    """Return a federation of four linear classifiers (or copies of `net`) in this process."""
    net = linear_net() if net is None else net
    layout = ParameterLayout.of(net)
    initial = layout.flatten(net.state_dict())
    orchestrator = RoundOrchestrator(layout, callbacks)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[orchestrator, *callbacks])
    fabric.launch()
    aggregator = build_aggregator(method, **(settings or {}))
    client = ClientModule(net, lr=lr, terms=aggregator.client_terms())
    data = client_data()
    clients = list(range(len(data)))
    engine, _ = build_engine("sequential", fabric, client, data, clients, 2, 2, 4, seed=0)
    plan = RoundPlan(
        fabric=fabric,
        collector=orchestrator,
        engine=engine,
        uplink=Uplink(noise, missing_rate, seed=0),
        aggregator=aggregator,
        sharding=Sharding([clients], layout.size, 0, fabric.device),
        layout=layout,
        initial=initial,
        weights=torch.tensor([d.size for d in data], dtype=torch.float64),
        test_weights=torch.tensor([len(d.test_labels) for d in data], dtype=torch.float64),
        rounds=rounds,
        **options,
    )
    return Federation(plan)
