"""The fast engine: many clients advance together, each network a row of one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassStatScores

from jgesr_lightning.optimizers import row_rule
from jgesr_lightning.training.base import Deliver, Engine, answers
from jgesr_lightning.training.batches import steps_of
from jgesr_lightning.training.network import layers_of, refuse
from jgesr_lightning.training.step import PADDING, Batch, Workspace

EVALUATION_BATCH = {"cpu": 128}
"""Samples of a client that are evaluated at once, by kind of device; others: 512. Small enough for the CPU's cache."""


@dataclass(eq=False, repr=False)
class StackedEngine(Engine):
    """Trains clients in groups that advance together; see `Engine`.

    Args:
        group: clients that advance together; None: all of this process on an accelerator, where the many small
            operations of one client leave the device idle, and one on a CPU, where the buffers of one client fill the
            cache and those of several do not fit (measured).

    Results equal those of the sequential engine up to rounding. Gradients are the chain rule written out (see
    `stages`): they are those of autograd. With mixed precision, activations and products are in the low precision,
    weights, gradients and loss in float32.

    Raises:
        ValueError: the network has a layer that cannot be stacked, or the precision needs loss scaling.
    """

    name = "stacked"

    group: InitVar[int | None] = None

    def __post_init__(self, group: int | None) -> None:
        fabric, client, data = self.fabric, self.client, self.data
        layers = layers_of(client.net)
        precision = str(fabric.strategy.precision.precision)
        check_precision(precision)
        fabric.setup_module(client)
        dtype = next(client.parameters()).dtype
        activations = torch.bfloat16 if precision == "bf16-mixed" else dtype
        on_cpu = fabric.device.type == "cpu"
        self._group = group if group is not None else 1 if on_cpu else len(data)
        self.evaluation_batch = EVALUATION_BATCH.get(fabric.device.type, 512)
        self.scores = MulticlassStatScores(
            self.num_classes,
            average="micro",
            multidim_average="samplewise",
            ignore_index=PADDING,
            validate_args=False,
            sync_on_compute=False,
        ).to(fabric.device)
        self._train = Samples([(d.train_inputs, d.train_labels) for d in data], self._group > 1)
        self._test = Samples([(d.test_inputs, d.test_labels) for d in data], self._group > 1)
        rule = row_rule(client.optimizer, client.momentum, client.weight_decay)
        self._workspace = Workspace(layers, client.layout, self._group, dtype, activations, fabric.device, rule)

    def train(
        self,
        round_number: int,
        rows: Sequence[int],
        sent: Tensor,
        deliver: Deliver,
        stopping: Callable[[], bool] = lambda: False,
        anchors: Tensor | None = None,
    ) -> Tensor:
        """See `Engine.train`; `stopping` is asked before each batch, and clients not yet done are abandoned."""
        losses = torch.full((len(self.clients),), torch.nan, dtype=torch.float64)
        # clients of like length together; within a group the longest first, so that the active ones are a prefix
        longest_first = sorted(rows, key=lambda row: (-steps_of(self.data[row].size, self.part), row))
        with torch.no_grad():
            for start in range(0, len(longest_first), self._group):
                members = longest_first[start : start + self._group]
                self._train_group(round_number, members, sent, anchors, deliver, stopping, losses)
        return losses

    def _train_group(
        self,
        round_number: int,
        members: list[int],
        sent: Tensor,
        anchors: Tensor | None,
        deliver: Deliver,
        stopping: Callable[[], bool],
        losses: Tensor,
    ) -> None:
        space = self._workspace
        space.load(sent[members], None if anchors is None else anchors[members])
        generators = [
            torch.Generator(self.fabric.device).manual_seed(self.dropout_seed(round_number, row)) for row in members
        ]
        source = self._train.source(members)
        orders = [self.orders(round_number, row) + self._train.offset(row) for row in members]
        total = torch.zeros(len(members), dtype=torch.float64, device=self.fabric.device)
        lr = self.client.rate(round_number)
        for batch in batches(orders, self.part, self.fabric.device, self.batch_size == "full"):
            if stopping():
                return
            step = space.step(batch.active, batch.index.shape[1], self._train.shape)
            step.receive(*source, batch.index.reshape(-1))
            total[: batch.active] += step.train(batch, generators, self.client, lr)
        for position, (row, loss) in enumerate(zip(members, total.tolist(), strict=True)):
            losses[row] = loss / (self.epochs * steps_of(self.data[row].size, self.batch_size))
            deliver(row, space.weights[position])

    @torch.no_grad()
    def evaluate(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """See `Engine.evaluate`."""
        accuracy = torch.zeros(len(self.clients), dtype=torch.float64)
        loss = torch.zeros_like(accuracy)
        order = sorted(range(len(self.data)), key=lambda row: (-len(self.data[row].test_labels), row))
        space = self._workspace
        for start in range(0, len(order), self._group):
            members = order[start : start + self._group]
            space.load(models[members])
            total = torch.zeros(len(members), 2, dtype=torch.float64, device=self.fabric.device)
            source = self._test.source(members)
            plain = [
                torch.arange(len(self.data[row].test_labels)).unsqueeze(0) + self._test.offset(row) for row in members
            ]
            for batch in batches(plain, self.evaluation_batch, self.fabric.device):
                step = space.step(batch.active, batch.index.shape[1], self._test.shape)
                step.receive(*source, batch.index.reshape(-1))
                nll, scores, labels = step.evaluate(batch.counts)
                correct = self.scores(answers(scores, labels).transpose(1, 2), labels)[:, 0]
                self.scores.reset()
                total[: batch.active] += torch.stack([correct, nll], 1)
            for row, (right, nll) in zip(members, total.tolist(), strict=True):
                accuracy[row] = right / len(self.data[row].test_labels)
                loss[row] = nll / len(self.data[row].test_labels)
        return accuracy, loss


def check_precision(precision: str) -> None:
    """Raise ValueError for a precision (Fabric's name) that scales its loss."""
    if precision == "16-mixed":
        raise refuse("in 16-mixed precision, which scales its loss")


def batches(orders: Sequence[Tensor], size: int, device: torch.device, full: bool = False) -> Iterator[Batch]:
    """Yield the batches of clients whose samples come in `orders` ((epochs, n_k) each), longest first.

    A single client has a short last batch in each epoch; several are padded to `size` with some sample. With `full` an
    epoch is one step, in parts of `size`.
    """
    if len(orders) == 1:
        for order in orders[0].to(device, non_blocking=True):
            parts = order.split(size)
            for number, part in enumerate(parts, 1):
                ends = [0] if not full or number == len(parts) else []
                yield Batch(1, part.unsqueeze(0), [len(part)], [len(order) if full else len(part)], ends)
        return
    lengths = [-(-order.shape[1] // size) for order in orders]
    steps = [len(order) * length for order, length in zip(orders, lengths, strict=True)]
    table = torch.zeros(steps[0], len(orders), size, dtype=torch.long)
    counts = torch.zeros(steps[0], len(orders), dtype=torch.long)
    for k, (order, number) in enumerate(zip(orders, steps, strict=True)):
        epochs, n = order.shape
        filled = -(-n // size) * size
        table[:number, k] = torch.nn.functional.pad(order, (0, filled - n)).view(number, size)
        counts[:number, k] = (n - torch.arange(0, n, size)).clamp_max(size).repeat(epochs)
    active = (counts > 0).sum(1).tolist()
    real = counts.tolist()
    for t, index in enumerate(table.to(device, non_blocking=True)):
        present = range(active[t])
        counted = real[t][: active[t]]
        totals = [orders[k].shape[1] for k in present] if full else counted
        ends = [k for k in present if (t + 1) % lengths[k] == 0] if full else list(present)
        yield Batch(active[t], index[: active[t]], counted, totals, ends)


class Samples:
    """The samples of the clients of a process, and how batches are gathered from them.

    Args:
        sets: inputs and labels of each client.
        pooled: keep all in one tensor, so that one call gathers for several clients; else each where it is.
    """

    def __init__(self, sets: Sequence[tuple[Tensor, Tensor]], pooled: bool) -> None:
        self.shape = sets[0][0].shape[1:]
        self.sizes = [len(labels) for _, labels in sets]
        self.pooled = pooled
        self.sets = list(sets)
        if self.pooled:
            self.sets = [(torch.cat([x for x, _ in sets]), torch.cat([y for _, y in sets]))]

    def source(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels that hold the samples of `members`, a single client unless pooled."""
        return self.sets[0 if self.pooled else members[0]]

    def offset(self, row: int) -> int:
        """Return where the samples of the client in `row` begin in its source."""
        return sum(self.sizes[:row]) if self.pooled else 0
