"""The networks that clients train. To add one, write a function and name it in `MODELS`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from jgesr_lightning.checks import one_of
from jgesr_lightning.seeding import INIT, derive

ModelFactory = Callable[[int, int, int], nn.Module]
"""(input channels, image side in pixels, number of classes) -> network on (B, channels, side, side) images."""


def _two_conv_two_linear(
    in_channels: int, image_size: int, num_classes: int, conv: tuple[int, int], hidden: int
) -> nn.Module:
    side = ((image_size - 4) // 2 - 4) // 2  # two unpadded 5x5 convolutions, each followed by 2x2 pooling
    if side < 1:
        raise ValueError(f"images of {image_size} pixels a side are too small for two 5x5 convolutions with pooling")
    first, second = conv
    return nn.Sequential(
        nn.Conv2d(in_channels, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * side * side, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )


def lenet(in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Return a LeNet-like network: 5x5 convolutions of 6 and 16 channels, linear layers of 120 and `num_classes`."""
    return _two_conv_two_linear(in_channels, image_size, num_classes, (6, 16), 120)


def fedavg_cnn(in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Return the CNN of FedAvg (McMahan et al., 2017): 5x5 convolutions of 32 and 64 channels, linear layer of 512."""
    return _two_conv_two_linear(in_channels, image_size, num_classes, (32, 64), 512)


MODELS: dict[str, ModelFactory] = {"lenet": lenet, "fedavg_cnn": fedavg_cnn}


def build_model(name: str, in_channels: int, image_size: int, num_classes: int, seed: int = 0) -> nn.Module:
    """Return the named network with PyTorch's default initialisation drawn from `seed`; global random state is kept.

    Raises:
        ValueError: unknown name (the known ones are listed), or images too small for the network.
    """
    one_of("model.name", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, INIT))
        return MODELS[name](in_channels, image_size, num_classes)
