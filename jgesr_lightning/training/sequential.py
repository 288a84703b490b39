"""The reference engine: one client after another through one Fabric-wrapped module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lightning.fabric.wrappers import _FabricOptimizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from jgesr_lightning.models.fitness import batch_normalisation, check_sizes
from jgesr_lightning.training.base import Deliver, Engine, answers
from jgesr_lightning.training.batches import split

EVALUATION_BATCH = 512


@dataclass(eq=False, repr=False)
class SequentialEngine(Engine):
    """Trains the clients of this process one at a time; see `Engine`.

    Raises:
        ValueError: batch normalisation would have to train on a single sample.
    """

    name = "sequential"

    def __post_init__(self) -> None:
        fabric, net = self.fabric, self.client.net
        # a batch of one sample has no variance: it joins the batch before it
        self.least = 2 if batch_normalisation(net) is not None else 1
        check_sizes(net, self.batch_size, {k: own.size for k, own in zip(self.clients, self.data, strict=True)})
        self.module = fabric.setup_module(self.client)
        self._convert = fabric.strategy.precision.convert_input
        if fabric.device.type == "cpu" and all(p.ndim != 5 for p in net.parameters()):
            # the library's convolutions are up to 1.4 times as fast with channels innermost; state dicts are the same
            net.to(memory_format=torch.channels_last)
        # each process measures its own clients: by default `compute` would pool the counts of all processes
        self.accuracy = MulticlassAccuracy(
            self.num_classes, average="micro", validate_args=False, sync_on_compute=False
        ).to(fabric.device)

    @torch.enable_grad()
    def train(
        self,
        round_number: int,
        rows: Sequence[int],
        sent: Tensor,
        deliver: Deliver,
        stopping: Callable[[], bool] = lambda: False,
        anchors: Tensor | None = None,
    ) -> Tensor:
        """See `Engine.train`."""
        losses = torch.full((len(self.clients),), torch.nan, dtype=torch.float64)
        self.module.train()
        with torch.random.fork_rng():
            for row in rows:
                if stopping():
                    break
                torch.manual_seed(self.dropout_seed(round_number, row))
                self.client.receive(sent[row], None if anchors is None else anchors[row])
                losses[row] = self._visit(round_number, row)
                deliver(row, self.client.layout.flatten(self.client.net.state_dict()))
        return losses

    def _visit(self, round_number: int, row: int) -> float:
        data = self.data[row]
        optimizer = self.fabric.setup_optimizers(self.client.fresh_optimizer(round_number))
        assert isinstance(optimizer, _FabricOptimizer)  # one went in
        total = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        taken = 0
        for order in self.orders(round_number, row).to(self.fabric.device, non_blocking=True):
            steps = [order] if self.batch_size == "full" else split(order, self.batch_size, self.least)
            taken += len(steps)
            for step in steps:
                parts = split(step, self.part, self.least) if self.batch_size == "full" else [step]
                for number, index in enumerate(parts, 1):
                    batch = data.train_inputs.index_select(0, index), data.train_labels.index_select(0, index)
                    loss = self._loss(batch, len(index) / len(step), number == len(parts))
                    self.fabric.backward(loss)
                    total += loss.detach()
                if self.client.clip_norm is not None:
                    # a gradient that is not finite makes an upload that is not; the round loop decides about that
                    self.fabric.clip_gradients(
                        self.module, optimizer, max_norm=self.client.clip_norm, error_if_nonfinite=False
                    )
                optimizer.step()
                optimizer.zero_grad()
        return float(total) / taken

    def _loss(self, batch: tuple[Tensor, Tensor], share: float, penalised: bool) -> Tensor:
        # where the strategy leaves the module unwrapped, Fabric's wrapper applies no precision to its methods
        with self.fabric.autocast():
            return self.client.loss(self._convert(batch), share, penalised)

    @torch.inference_mode()
    def evaluate(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """See `Engine.evaluate`."""
        accuracy = torch.zeros(len(self.clients), dtype=torch.float64)
        loss = torch.zeros_like(accuracy)
        self.module.eval()
        for row, data in enumerate(self.data):
            self.client.receive(models[row])
            self.accuracy.reset()
            total = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
            batches = zip(
                data.test_inputs.split(EVALUATION_BATCH), data.test_labels.split(EVALUATION_BATCH), strict=True
            )
            for inputs, labels in batches:
                with self.fabric.autocast():
                    scores = self.client(self._convert(inputs))
                self.accuracy.update(answers(scores, labels), labels)
                total += cross_entropy(scores.to(total.dtype), labels, reduction="sum")
            accuracy[row] = self.accuracy.compute()
            loss[row] = total / len(data.test_labels)
        return accuracy, loss
