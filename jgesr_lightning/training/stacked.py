"""The fast engine: many clients advance together, each network a row of one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torchmetrics.classification import MulticlassStatScores

from jgesr_lightning.client import ClientModule
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.regularisers import Proximal, Regulariser
from jgesr_lightning.seeding import DROPOUT, derive
from jgesr_lightning.training.base import ClientData, Deliver, Engine
from jgesr_lightning.training.batches import BatchSize, part_size, steps_of, visit_orders
from jgesr_lightning.training.network import Layer, StackedNetwork, layers_of, refuse

EVALUATION_BATCH = {"cpu": 128}
"""Samples of a client that are evaluated at once, by kind of device; others: 512. Small enough for the CPU's cache."""

PADDING = -1
"""Label of a sample that only fills up a batch."""


@dataclass(frozen=True)
class Batch:
    """What the first `active` clients of a group compute at once: a step of theirs, or a part of a full one.

    Attributes:
        active: number of clients that take part.
        index: (active, B) positions in the group's samples.
        counts: number of real samples of each; the rest of its row of `index` is padding.
        totals: number of samples of the step that each is in; equal to `counts` where this is the whole step.
        ends: positions of the clients that move after this.
    """

    active: int
    index: Tensor
    counts: list[int]
    totals: list[int]
    ends: list[int]


class StackedEngine(Engine):
    """Trains clients in groups that advance together.

    Args:
        fabric: this and all but the last as for `SequentialEngine`.
        client: the one client slot of this process; it gives the network's structure, the penalties and the settings.
        data: samples of each local client.
        clients: global index of each local client.
        num_classes: number of classes.
        epochs: local epochs a round.
        batch_size: samples a step, or "full".
        seed: seed of the batches.
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

    def __init__(
        self,
        fabric: Fabric,
        client: ClientModule,
        data: Sequence[ClientData],
        clients: Sequence[int],
        num_classes: int,
        epochs: int,
        batch_size: BatchSize,
        seed: int,
        group: int | None = None,
    ) -> None:
        self.layers = layers_of(client.net)
        precision = str(fabric.strategy.precision.precision)
        check_precision(precision)
        fabric.setup_module(client)
        self.fabric = fabric
        self.client = client
        self.layout: ParameterLayout = client.layout
        self.data = data
        self.clients = clients
        self.epochs = epochs
        self.batch_size = batch_size
        self.part = part_size(batch_size, fabric.device.type)
        self.seed = seed
        self.dtype = next(client.parameters()).dtype
        self.activations = torch.bfloat16 if precision == "bf16-mixed" else self.dtype
        on_cpu = fabric.device.type == "cpu"
        self.group = group if group is not None else 1 if on_cpu else max(1, len(clients))
        self.evaluation_batch = EVALUATION_BATCH.get(fabric.device.type, 512)
        self.scores = MulticlassStatScores(
            num_classes,
            average="micro",
            multidim_average="samplewise",
            ignore_index=PADDING,
            validate_args=False,
            sync_on_compute=False,
        ).to(fabric.device)
        self._train = Samples([(d.train_inputs, d.train_labels) for d in data], self.group > 1)
        self._test = Samples([(d.test_inputs, d.test_labels) for d in data], self.group > 1)
        self._workspace = Workspace(self.layers, self.layout, self.group, self.dtype, self.activations, fabric.device)

    def train(
        self,
        round_number: int,
        rows: Sequence[int],
        sent: Tensor,
        deliver: Deliver,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """See `Engine.train`; `stopping` is asked before each batch, and clients not yet done are abandoned."""
        losses = torch.full((len(self.clients),), torch.nan, dtype=torch.float64)
        # clients of like length together; within a group the longest first, so that the active ones are a prefix
        longest_first = sorted(rows, key=lambda row: (-steps_of(self.data[row].size, self.part), row))
        with torch.no_grad():
            for start in range(0, len(longest_first), self.group):
                members = longest_first[start : start + self.group]
                self._train_group(round_number, members, sent, deliver, stopping, losses)
        return losses

    def _train_group(
        self,
        round_number: int,
        members: Sequence[int],
        sent: Tensor,
        deliver: Deliver,
        stopping: Callable[[], bool],
        losses: Tensor,
    ) -> None:
        space = self._workspace
        space.load(sent[list(members)])
        generators = [
            torch.Generator(self.fabric.device).manual_seed(derive(self.seed, DROPOUT, round_number, self.clients[row]))
            for row in members
        ]
        source = self._train.source(members)
        orders = [
            visit_orders(self.data[row].size, self.epochs, self.batch_size, self.seed, round_number, self.clients[row])
            + self._train.offset(row)
            for row in members
        ]
        total = torch.zeros(len(members), dtype=torch.float64, device=self.fabric.device)
        for batch in batches(orders, self.part, self.fabric.device, self.batch_size == "full"):
            if stopping():
                return
            step = space.step(batch.active, batch.index.shape[1], self._train.shape)
            step.receive(*source, batch.index.reshape(-1))
            total[: batch.active] += step.train(batch, generators, self.client)
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
        for start in range(0, len(order), self.group):
            members = order[start : start + self.group]
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
                correct = self.scores(scores.transpose(1, 2), labels)[:, 0]
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
        self.shape = sets[0][0].shape[1:] if sets else torch.Size()
        self.sizes = [len(labels) for _, labels in sets]
        self.pooled = pooled and bool(sets)
        self.sets = list(sets)
        if self.pooled:
            self.sets = [(torch.cat([x for x, _ in sets]), torch.cat([y for _, y in sets]))]

    def source(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels that hold the samples of `members`, a single client unless pooled."""
        return self.sets[0 if self.pooled else members[0]]

    def offset(self, row: int) -> int:
        """Return where the samples of the client in `row` begin in its source."""
        return sum(self.sizes[:row]) if self.pooled else 0


class Workspace:
    """Weights, gradients and velocities of a group, and the buffers of its steps.

    Steps of two shapes at most are kept: the whole batch, and the short one that ends an epoch.
    """

    def __init__(
        self,
        layers: list[Layer],
        layout: ParameterLayout,
        group: int,
        dtype: torch.dtype,
        activations: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.layout, self.activations = layers, layout, activations
        self.weights = torch.zeros(group, layout.size, dtype=dtype, device=device)
        self.sent = torch.zeros_like(self.weights)
        self.grads = torch.zeros_like(self.weights)
        self.sums = torch.zeros_like(self.weights)
        self.velocities = torch.zeros_like(self.weights)
        self._steps: dict[tuple[int, int, torch.Size], Step] = {}

    def load(self, models: Tensor) -> None:
        """Start from `models` (members, d), at rest."""
        self.weights[: len(models)] = models
        self.sent[: len(models)] = models
        self.sums.zero_()
        self.velocities.zero_()

    def step(self, active: int, samples: int, shape: torch.Size) -> Step:
        """Return the step of `active` clients on batches of `samples` samples."""
        key = (active, samples, shape)
        step = self._steps.pop(key, None)
        if step is None:
            while len(self._steps) > 1:
                del self._steps[next(iter(self._steps))]
            step = Step(self, active, torch.Size((samples, *shape)))
        self._steps[key] = step  # the latest last
        return step


class Step:
    """SGD of `active` clients on batches of one shape, on buffers of its own."""

    def __init__(self, space: Workspace, active: int, samples: torch.Size) -> None:
        part = slice(0, active)
        self.weights, self.sent, self.grads, self.sums, self.velocities = (
            matrix[part] for matrix in (space.weights, space.sent, space.grads, space.sums, space.velocities)
        )
        self.network = StackedNetwork(space.layers, space.layout, self.weights, self.grads, samples, space.activations)
        device = self.weights.device
        size = samples[0]
        # gathered here where the network's first buffer is laid out otherwise
        inputs = self.network.inputs
        direct = inputs.is_contiguous()
        self._gathered = inputs if direct else torch.empty(inputs.shape, dtype=inputs.dtype, device=device)
        self._gathered_rows = self._gathered.view(-1, *samples[1:])
        self.labels = torch.empty(active, size, dtype=torch.long, device=device)
        self._label_rows = self.labels.view(-1)
        precise = torch.promote_types(space.weights.dtype, torch.float32)
        self.precision = precise
        self._places = torch.arange(size, device=device)
        self._share = torch.full((active, size), 1.0 / size, dtype=precise, device=device)
        self._minus_one = torch.full((active, size, 1), -1.0, dtype=precise, device=device)
        self._counted = [size] * active, [size] * active

    def receive(self, inputs: Tensor, labels: Tensor, index: Tensor) -> None:
        """Gather the batch from the samples `inputs`, `labels` at `index` (active * B,)."""
        torch.index_select(labels, 0, index, out=self._label_rows)
        if inputs.dtype == self._gathered.dtype:
            torch.index_select(inputs, 0, index, out=self._gathered_rows)
        else:
            self._gathered_rows.copy_(inputs[index])
        if self._gathered is not self.network.inputs:
            self.network.inputs.copy_(self._gathered)

    def _count(self, counts: list[int], totals: list[int]) -> None:
        """Give each real sample its share of its client's mean over `totals`; padding has none."""
        if (counts, totals) != self._counted:
            real, total = (
                torch.tensor(numbers, dtype=self.precision, device=self.labels.device).unsqueeze(1)
                for numbers in (counts, totals)
            )
            torch.div(self._places < real, total, out=self._share)
            self._counted = counts, totals

    def train(self, batch: Batch, generators: Sequence[torch.Generator], client: ClientModule) -> Tensor:
        """Take the step, or a part of it; return the loss (active,) before it, penalties included where it ends."""
        loss = self._differentiate(batch, generators)
        if batch.counts == batch.totals:
            penalty = self._descend(client, self.weights, self.sent, self.grads, self.velocities)
            return loss if penalty is None else loss + penalty
        self.sums.add_(self.grads)
        if batch.ends:
            where = torch.tensor(batch.ends, device=loss.device)
            weights, sent, grads, velocities = (m[where] for m in (self.weights, self.sent, self.sums, self.velocities))
            penalty = self._descend(client, weights, sent, grads, velocities)
            self.weights[where], self.velocities[where] = weights, velocities
            self.sums[where] = 0
            if penalty is not None:
                loss[where] += penalty.to(loss.dtype)
        return loss

    def _differentiate(self, batch: Batch, generators: Sequence[torch.Generator]) -> Tensor:
        """Write the gradients; return the loss (active,): the sum over the batch's samples over the step's number."""
        self._count(batch.counts, batch.totals)
        network = self.network
        network.context.training = True
        network.context.counts = batch.counts
        network.context.generators = generators[: batch.active]
        scores = network.forward()
        log_p = torch.log_softmax(scores, -1, dtype=self.precision)
        labels = self.labels.unsqueeze(-1)
        loss: Tensor = torch.linalg.vecdot(log_p.gather(-1, labels).squeeze(-1), self._share).neg_()
        # d loss / d scores = share (softmax - one at the label)
        grad = log_p.exp_().scatter_add_(-1, labels, self._minus_one).mul_(self._share.unsqueeze(-1))
        network.backward(grad)
        return loss

    @staticmethod
    def _descend(
        client: ClientModule, weights: Tensor, sent: Tensor, grads: Tensor, velocities: Tensor
    ) -> Tensor | None:
        """Move `weights` (rows, d) in place against `grads` and the penalties'; return the penalties (rows,) if any."""
        penalty = penalise(client.terms, weights, sent, grads) if client.terms else None
        direction = grads
        if client.momentum:
            direction = velocities.mul_(client.momentum).add_(grads)
        weights.add_(direction, alpha=-client.lr)
        return penalty

    def evaluate(self, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the summed loss (active,), the class scores and the labels, padding labelled `PADDING`."""
        self._count(counts, counts)
        self.network.context.training = False
        scores = self.network.forward()
        log_p = torch.log_softmax(scores, -1, dtype=self.precision)
        picked = log_p.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)
        real = self._share > 0
        return -(picked * real).sum(-1), scores, self.labels.masked_fill(~real, PADDING)


def penalise(terms: Sequence[Regulariser], weights: Tensor, sent: Tensor, grads: Tensor) -> Tensor:
    """Return the penalties (rows,) of `weights` (rows, d) and add their gradients to `grads` in place."""
    penalty = torch.zeros((), dtype=weights.dtype, device=weights.device)
    others = []
    for term in terms:
        if type(term) is Proximal:  # so common, and so simple, that autograd's fixed cost is saved
            drift = weights - sent
            penalty = penalty + 0.5 * term.mu * torch.linalg.vecdot(drift, drift)
            grads.add_(drift, alpha=term.mu)
        else:
            others.append(term)
    if others:
        with torch.enable_grad():
            x = weights.detach().requires_grad_()
            values = torch.stack([term(x, sent) for term in others]).sum(0)
            (grad,) = torch.autograd.grad(values.sum(), x)
        penalty = penalty + values.detach()
        grads.add_(grad)
    return penalty
