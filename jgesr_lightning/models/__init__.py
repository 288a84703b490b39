"""The networks that clients train. To add one, write a function and name it in `jgesr_lightning.names`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from jgesr_lightning import names
from jgesr_lightning.models.fitness import check_network, check_sizes
from jgesr_lightning.models.plain import Size, sides
from jgesr_lightning.models.vision import PREFIX, torchvision_network
from jgesr_lightning.seeding import INIT, derive, drawing_from

__all__ = ["ModelFactory", "Size", "build_model", "check_sizes", "shape_arguments"]

ModelFactory = Callable[[int, Size, int], nn.Module]
"""(channels of an input, or its number of features; its size; number of classes) -> network on (B, channels, *size)."""


def shape_arguments(input_shape: Sequence[int]) -> tuple[int, Size]:
    """Return the first two arguments of a factory for samples of `input_shape` ((C, H, W) or (features,))."""
    channels, *rest = input_shape
    square = len(rest) == 2 and rest[0] == rest[1]
    return channels, rest[0] if square else tuple(rest) or None


def build_model(name: str, in_channels: int, image_size: Size, num_classes: int, seed: int = 0) -> nn.Module:
    """Return the named network with its own initialisation drawn from `seed`; global random state is kept.

    Args:
        name: a name of `jgesr_lightning.names`, or ``torchvision:`` and a classification network of torchvision.
        in_channels: channels of an image, or the number of plain features.
        image_size: side of a square image, (height, width), or None for plain features.
        num_classes: number of classes.
        seed: of the initial weights.

    Raises:
        ValueError: unknown name (the known ones are listed), or a network that cannot take such inputs, does not give
            such scores, or has nothing to train.
    """
    with drawing_from(derive(seed, INIT)):
        net = _made(name, in_channels, image_size, num_classes)
        check_network(name, net, (in_channels, *sides(image_size)), num_classes)
    return net


def _made(name: str, in_channels: int, size: Size, num_classes: int) -> nn.Module:
    make: ModelFactory | None = None if name.startswith(PREFIX) else names.find("models", name)
    try:
        if make is None:
            return torchvision_network(name.removeprefix(PREFIX), in_channels, size, num_classes)
        net = make(in_channels, size, num_classes)
    except Exception as error:  # whatever somebody's function raises
        reason = str(error).strip().splitlines()[:1]
        if not reason or isinstance(error, LookupError):  # a key alone says nothing
            reason.insert(0, type(error).__name__)
        raise ValueError(f"model.name={name}: {': '.join(reason)}") from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"model.name={name} returns a {type(net).__name__}; it must return a torch.nn.Module")
    return net
