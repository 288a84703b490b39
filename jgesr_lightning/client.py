"""A client: a network, its local loss, and the frozen copy of the model it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from jgesr_lightning.checks import number
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.regularisers import Proximal, Regulariser


class ClientModule(LightningModule):
    """Local training problem of one client: ``cross entropy + mu/2 ||x - x_sent||^2 + what the method adds``.

    `x_sent` is a copy taken when a model is received (`receive`, or loading a state dict into the network; at first the
    network's own initial weights). It never changes while the client trains.

    One module serves many clients in turn: `receive` loads a client's row, and `configure_optimizers` gives the fresh
    optimizer of that visit. `tie` lays parameters and gradients out as two flat vectors, so that one optimizer step,
    one penalty and one upload are single vector operations; everything works untied as well.

    Args:
        net: network whose forward maps a batch of inputs to class scores.
        proximal_mu: weight mu of the proximal term; 0 leaves it out altogether.
        lr: learning rate of SGD.
        momentum: momentum of SGD.
        terms: further penalties of the aggregation method.
    """

    sent: Tensor

    def __init__(
        self,
        net: nn.Module,
        proximal_mu: float = 0.0,
        lr: float = 0.01,
        momentum: float = 0.0,
        terms: Sequence[Regulariser] = (),
    ) -> None:
        super().__init__()
        number("proximal_mu", proximal_mu, at_least=0)
        number("lr", lr, at_least=0)
        number("momentum", momentum, at_least=0)
        self.net = net
        self.lr = lr
        self.momentum = momentum
        self.terms: tuple[Regulariser, ...] = (*((Proximal(proximal_mu),) if proximal_mu else ()), *terms)
        self.layout = ParameterLayout.of(net)
        self._row: Tensor | None = None
        self._flat: Tensor | None = None
        self._first_grad: Tensor | None = None
        self.register_buffer("sent", torch.empty(0), persistent=False)
        self.anchor()
        net.register_load_state_dict_post_hook(lambda *_: self.anchor())

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (B, classes) of inputs (B, ...)."""
        scores: Tensor = self.net(x)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        """Return the local loss of a batch of inputs and labels, penalties included."""
        inputs, labels = batch
        loss = cross_entropy(self.net(inputs), labels)
        if self.terms:
            x = self.vector()
            for term in self.terms:
                loss = loss + term(x, self.sent)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a fresh SGD: no state crosses from one client or round to the next."""
        parameters: list[Any] = [self._flat] if self._tied() else list(self.net.parameters())
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Zero the gradients (Lightning's hook), in place where they are one flat vector."""
        optimizer.zero_grad(set_to_none=not self._tied())

    @torch.no_grad()
    def anchor(self) -> None:
        """Take the present parameters as the model that was sent, in memory of its own."""
        present = torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])
        if self.sent.shape == present.shape and self.sent.dtype == present.dtype and self.sent.device == present.device:
            self.sent.copy_(present)
        else:
            self.sent = present

    @torch.no_grad()
    def receive(self, row: Tensor) -> None:
        """Load the model `row` (d,) the server sent; it becomes the anchor of the penalties. `row` is copied."""
        if self._tied():
            assert self._row is not None
            self._row.copy_(row)
            self.sent.copy_(row[: self.layout.num_parameters])
        else:
            self.net.load_state_dict(self.layout.restore(row), strict=False)

    def vector(self) -> Tensor:
        """Return the trained parameters as one vector through which gradients flow."""
        if self._tied():
            assert self._flat is not None
            return self._flat
        return torch.cat([p.reshape(-1) for p in self.net.parameters()])

    @torch.no_grad()
    def tie(self) -> None:
        """Make every communicated tensor, and every gradient, a view of one vector. To be called after moving."""
        tensors = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        row = self.layout.flatten(tensors)
        flat = row[: self.layout.num_parameters].detach().requires_grad_()
        grad = torch.zeros_like(flat)
        offset = 0
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            part = slice(offset, offset + shape.numel())
            tensors[name].data = row[part].view(shape)
            if offset < self.layout.num_parameters:
                tensors[name].grad = grad[part].view(shape)
            offset = part.stop
        flat.grad = grad
        self._row, self._flat = row, flat
        self._first_grad = next(self.net.parameters()).grad

    def _tied(self) -> bool:
        """Whether `tie` still holds: somebody may have dropped the gradients (zero_grad) since."""
        if self._flat is None or self._flat.grad is None:
            return False
        return next(self.net.parameters()).grad is self._first_grad

    def _apply(self, fn: Any, recurse: bool = True) -> ClientModule:
        # moving or converting gives every tensor new memory: the views are gone, to be tied anew
        self._row = self._flat = self._first_grad = None
        super()._apply(fn, recurse)
        return self
