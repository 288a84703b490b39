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
from jgesr_lightning.optimizers import torch_optimizer
from jgesr_lightning.regularisers import Proximal, Regulariser
from jgesr_lightning.schedules import Schedule, check_optimizer


class ClientModule(LightningModule):
    """Local training problem of one client: ``cross entropy + mu/2 ||x - x_sent||^2 + what the method adds``.

    `x_sent` is a copy taken when a model is received (`receive`, or loading a state dict into this module or into the
    network; at first the network's own initial weights). It never changes while the client trains. A state dict holds
    the network alone; Lightning's checkpoints hold `x_sent` too, so that an interrupted training keeps its anchor.

    One module serves many clients in turn: `receive` loads a client's row, and `fresh_optimizer` gives the optimizer of
    that visit, at the rate of its round (`configure_optimizers`, for Lightning's Trainer: that of round 1).

    Args:
        net: network whose forward maps a batch of inputs to class scores.
        proximal_mu: weight mu of the proximal term; 0 leaves it out altogether.
        lr: learning rate.
        momentum: momentum of SGD; the others have none to set.
        terms: further penalties of the aggregation method.
        optimizer: "sgd", "adam" or "adamw".
        weight_decay: of the optimizer: times the weights, added to the gradient; under AdamW, taken off the weights.
        clip_norm: largest Euclidean norm of a step's gradient, penalties included, weight decay not; None: any.
        schedule: part of `lr` that is in force in each round; None: all of it.

    Raises:
        ValueError: a negative or non-finite number, an unknown optimizer, or momentum for one that has none.
    """

    sent: Tensor

    def __init__(
        self,
        net: nn.Module,
        proximal_mu: float = 0.0,
        lr: float = 0.01,
        momentum: float = 0.0,
        terms: Sequence[Regulariser] = (),
        optimizer: str = "sgd",
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        number("proximal_mu", proximal_mu, at_least=0)
        number("lr", lr, at_least=0)
        check_optimizer(optimizer, momentum, weight_decay, clip_norm)
        self.net = net
        self.lr = lr
        self.momentum = momentum
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
        self.schedule = schedule if schedule is not None else Schedule()
        self.terms: tuple[Regulariser, ...] = (*((Proximal(proximal_mu),) if proximal_mu else ()), *terms)
        self.layout = ParameterLayout.of(net)
        self._trained = [name in self.layout.names for name, _ in net.named_parameters()]
        # counters and the like begin anew at each visit, so that nothing of one client reaches the next
        self._fresh = {name: b.clone() for name, b in net.named_buffers() if name not in self.layout.names}
        self._loose = self._fresh.keys() - net.state_dict().keys()  # which no state dict loads
        self._resumed: Tensor | None = None
        self.register_buffer("sent", torch.empty(0), persistent=False)
        self.anchor()
        # a bound method, not a closure: a deep copy of this module must anchor itself, not the original
        net.register_load_state_dict_post_hook(self._loaded)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (B, classes) of inputs (B, ...)."""
        scores: Tensor = self.net(x)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        """Return the local loss of a batch of inputs and labels, penalties included."""
        return self.loss(batch)

    def loss(self, batch: tuple[Tensor, Tensor], share: float = 1.0, penalised: bool = True) -> Tensor:
        """Return what a batch adds to the loss of a step that it is the `share` of.

        The losses of a step's parts add up to the loss of the step, if one of them alone is `penalised`.
        """
        inputs, labels = batch
        loss = cross_entropy(self.net(inputs), labels)
        if share != 1:
            loss = share * loss
        if penalised and self.terms:
            x = self.vector()
            for term in self.terms:
                loss = loss + term(x, self.sent)
        return loss

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round, which counts from 1."""
        return self.lr * self.schedule(round_number)

    def fresh_optimizer(self, round_number: int) -> torch.optim.Optimizer:
        """Return the optimizer of one visit, at rest: no state crosses from one client or round to the next."""
        return torch_optimizer(
            self.optimizer, self.net.parameters(), self.rate(round_number), self.momentum, self.weight_decay
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of a training without rounds (Lightning's hook)."""
        return self.fresh_optimizer(1)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
        """Clip the gradient (Lightning's hook)."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip_norm)

    @torch.no_grad()
    def anchor(self) -> None:
        """Take the present parameters as the model that was sent, in memory of its own."""
        with torch.inference_mode(False):  # training may follow an evaluation, on the same memory
            present = self.vector().detach()
        if self.sent.shape == present.shape and self.sent.dtype == present.dtype and self.sent.device == present.device:
            self.sent.copy_(present)
        else:
            self.sent = present

    def receive(self, row: Tensor, anchor: Tensor | None = None) -> None:
        """Load the model `row` (d,) to train from; the penalties pull to it, or to `anchor` (d,). Both are copied.

        Buffers that do not travel (see `ParameterLayout`) are as in the network that this module was made with.
        """
        self.net.load_state_dict(self.layout.restore(row.detach()) | self._fresh, strict=False)
        for name in self._loose:
            owner, _, leaf = name.rpartition(".")
            setattr(self.net.get_submodule(owner), leaf, self._fresh[name].to(self.sent.device, copy=True))
        if anchor is not None:
            self.sent.copy_(anchor[: self.layout.num_parameters])

    def vector(self) -> Tensor:
        """Return the trained parameters as one new vector, through which gradients flow."""
        pairs = zip(self.net.parameters(), self._trained, strict=True)
        return torch.cat([p.reshape(-1) for p, trained in pairs if trained])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the anchor beside the weights (Lightning's hook)."""
        checkpoint["sent"] = self.sent.clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the anchor up again once the weights are loaded (Lightning's hook, called before that)."""
        self._resumed = checkpoint.get("sent")

    def _loaded(self, *_: object) -> None:
        self.anchor()
        if self._resumed is not None:
            self.sent = self._resumed.to(self.sent)
            self._resumed = None
