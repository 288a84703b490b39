"""Whether a network can be trained on the data at hand: asked before any round, answered in one line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy


def check_network(name: str, net: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Raise ValueError unless `net` has trainable weights and gives class scores for inputs of `input_shape`.

    Tried on two samples of zeros, in training and in evaluation; the network's buffers and the global random state stay
    as they are. The weights of lazy layers are made by that.
    """
    inputs = torch.zeros(2, *input_shape)
    with torch.random.fork_rng(devices=[]):
        if any(is_lazy(tensor) for tensor in (*net.parameters(), *net.buffers())):
            _scores(name, net.eval(), inputs, num_classes)
        odd = [key for key, p in net.named_parameters() if not p.is_floating_point()]
        if odd:
            raise ValueError(f"model.name={name}: the parameter {odd[0]!r} is {net.get_parameter(odd[0]).dtype}")
        if not any(p.requires_grad and p.numel() for p in net.parameters()):
            state = "all parameters frozen" if any(p.numel() for p in net.parameters()) else "no parameters"
            raise ValueError(f"model.name={name} has {state}; there is nothing to train")
        kept = [(buffer, buffer.clone()) for buffer in net.buffers()]
        for training in (False, True):
            _scores(name, net.train(training), inputs, num_classes)
        for buffer, value in kept:  # training moved running statistics
            buffer.copy_(value)


def _scores(name: str, net: nn.Module, inputs: Tensor, num_classes: int) -> None:
    given = f"inputs of shape {tuple(inputs.shape[1:])}"
    try:
        with torch.no_grad():
            scores = net(inputs)
    except Exception as error:  # whatever the forward of somebody's network raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"model.name={name} cannot take {given}: {reason}") from error
    wanted = f"a score for each of {num_classes} classes, (samples, {num_classes})"
    if not isinstance(scores, Tensor):
        raise ValueError(f"model.name={name} returns a {type(scores).__name__} for {given}; it must return {wanted}")
    if scores.shape != (len(inputs), num_classes):
        found = ", ".join(("samples", *map(str, scores.shape[1:]))) if scores.shape[:1] == (2,) else None
        raise ValueError(
            f"model.name={name} returns ({found or ', '.join(map(str, scores.shape))}) for {given}; "
            f"it must return {wanted}"
        )


def batch_normalisation(net: nn.Module) -> str | None:
    """Return the name of the first layer that needs two samples to train on, or None."""
    return next((name for name, m in net.named_modules() if isinstance(m, _BatchNorm)), None)


def check_sizes(net: nn.Module, batch_size: object, sizes: Mapping[int, int]) -> None:
    """Raise ValueError where a client would have to train batch normalisation on a single sample.

    Args:
        net: the clients' network.
        batch_size: samples a step, or "full".
        sizes: client -> its training samples.
    """
    layer = batch_normalisation(net)
    if layer is None:
        return
    needs = f"the batch normalisation {layer!r} needs at least 2 samples at once"
    if batch_size == 1:
        raise ValueError(f"local.batch_size is 1; {needs}")
    alone = [client for client, size in sizes.items() if size < 2]
    if alone:
        raise ValueError(f"client {alone[0]} has fewer than 2 training samples; {needs}: raise data.min_samples")
