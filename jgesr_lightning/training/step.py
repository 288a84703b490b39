"""One gradient step, or a part of one, of many clients at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jgesr_lightning.client import ClientModule
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.optimizers import RowRule, clip
from jgesr_lightning.regularisers import Proximal, Regulariser
from jgesr_lightning.training.network import Layer, StackedNetwork

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


class Workspace:
    """Weights, gradients and the optimizer's state of a group, and the buffers of its steps.

    Steps of two shapes at most are kept: the whole batch, and the short one that ends an epoch.

    Args:
        layers: of the network.
        layout: order of the columns.
        group: rows.
        dtype: precision of the weights.
        activations: precision of what passes through the network.
        device: where all of it is.
        rule: the optimizer.
    """

    def __init__(
        self,
        layers: list[Layer],
        layout: ParameterLayout,
        group: int,
        dtype: torch.dtype,
        activations: torch.dtype,
        device: torch.device,
        rule: RowRule,
    ) -> None:
        self.layers, self.layout, self.activations, self.rule = layers, layout, activations, rule
        self.weights = torch.zeros(group, layout.size, dtype=dtype, device=device)
        self.sent = torch.zeros_like(self.weights)
        self.grads = torch.zeros_like(self.weights)
        self.sums = torch.zeros_like(self.weights)
        self.moments = [torch.zeros_like(self.weights) for _ in range(rule.moments)]
        self.taken = [0] * group
        self._steps: dict[tuple[int, int, torch.Size], Step] = {}

    def load(self, models: Tensor, anchors: Tensor | None = None) -> None:
        """Start from `models` (members, d), at rest; penalties pull to `anchors`, or to where they start."""
        self.weights[: len(models)] = models
        self.sent[: len(models)] = models if anchors is None else anchors
        self.sums.zero_()
        for moment in self.moments:
            moment.zero_()
        self.taken = [0] * len(self.taken)

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
    """What `active` clients compute on batches of one shape, on buffers of its own."""

    def __init__(self, space: Workspace, active: int, samples: torch.Size) -> None:
        self.space = space
        self.weights, self.sent, self.grads, self.sums, *self.moments = (
            matrix[:active] for matrix in (space.weights, space.sent, space.grads, space.sums, *space.moments)
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

    def train(self, batch: Batch, generators: Sequence[torch.Generator], client: ClientModule, lr: float) -> Tensor:
        """Take the step, or a part of it; return the loss (active,) before it, penalties included where it ends."""
        loss = self._differentiate(batch, generators)
        if batch.counts == batch.totals:
            penalty = self._descend(client, lr, batch.ends, self.weights, self.sent, self.grads, self.moments)
            return loss if penalty is None else loss + penalty
        self.sums.add_(self.grads)
        if batch.ends:
            where = torch.tensor(batch.ends, device=loss.device)
            matrices = self.weights, self.sent, self.sums, *self.moments
            weights, sent, grads, *moments = (matrix[where] for matrix in matrices)
            penalty = self._descend(client, lr, batch.ends, weights, sent, grads, moments)
            self.weights[where] = weights
            self.sums[where] = 0
            for kept, moment in zip(self.moments, moments, strict=True):
                kept[where] = moment
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

    def _descend(
        self,
        client: ClientModule,
        lr: float,
        clients: Sequence[int],
        weights: Tensor,
        sent: Tensor,
        grads: Tensor,
        moments: Sequence[Tensor],
    ) -> Tensor | None:
        """Move the `weights` (rows, d) of `clients` in place; return the penalties (rows,) if there are any."""
        penalty = penalise(client.terms, weights, sent, grads) if client.terms else None
        if client.clip_norm is not None:
            clip(grads, client.clip_norm)
        taken = self.space.taken
        for k in clients:
            taken[k] += 1
        self.space.rule(weights, grads, moments, [taken[k] for k in clients], lr)
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
