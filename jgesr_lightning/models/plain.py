"""The networks of this package: convolutions for images, a perceptron for features and images alike."""

from __future__ import annotations

from math import prod

from torch import nn

Size = int | tuple[int, ...] | None
"""Of an input besides its channels: the side of a square image, (height, width), or None for plain features."""


def sides(size: Size) -> tuple[int, ...]:
    """Return all dimensions of an input besides its channels."""
    return () if size is None else (size, size) if isinstance(size, int) else tuple(size)


def image_sides(in_channels: int, size: Size) -> tuple[int, int]:
    """Return height and width of the inputs; ValueError where they are no images."""
    lengths = sides(size)
    if len(lengths) != 2:
        raise ValueError(f"it takes images; the inputs have the shape {(in_channels, *lengths)}, which mlp would take")
    return lengths[0], lengths[1]


def _two_conv_two_linear(
    in_channels: int, size: Size, num_classes: int, conv: tuple[int, int], hidden: int
) -> nn.Module:
    lengths = image_sides(in_channels, size)
    left = [((length - 4) // 2 - 4) // 2 for length in lengths]  # two unpadded 5x5 convolutions, 2x2 pooling after each
    if min(left) < 1:
        raise ValueError(f"images of {min(lengths)} pixels a side are too small for two 5x5 convolutions with pooling")
    first, second = conv
    return nn.Sequential(
        nn.Conv2d(in_channels, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * prod(left), hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )


def lenet(in_channels: int, size: Size, num_classes: int) -> nn.Module:
    """Return a LeNet-like network: 5x5 convolutions of 6 and 16 channels, linear layers of 120 and `num_classes`."""
    return _two_conv_two_linear(in_channels, size, num_classes, (6, 16), 120)


def fedavg_cnn(in_channels: int, size: Size, num_classes: int) -> nn.Module:
    """Return the CNN of FedAvg (McMahan et al., 2017): 5x5 convolutions of 32 and 64 channels, linear layer of 512."""
    return _two_conv_two_linear(in_channels, size, num_classes, (32, 64), 512)


def mlp(in_channels: int, size: Size, num_classes: int) -> nn.Module:
    """Return a perceptron with one hidden layer of 64, for features or for images of any shape."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(in_channels * prod(sides(size)), 64), nn.ReLU(), nn.Linear(64, num_classes)
    )
