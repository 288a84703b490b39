"""A toy data set that needs no file: ten smooth random patterns seen through noise."""

from __future__ import annotations

import torch
from torch.nn import functional

from jgesr_lightning.data.dataset import RawDataset, make_dataset

TRAIN, TEST, CLASSES, SIDE = 4000, 1000, 10, 28


def make_synthetic(name: str = "synthetic") -> RawDataset:
    """Return 4,000 training and 1,000 test images, 1 x 28 x 28, of 10 equally frequent classes; always the same ones.

    Each class is one smooth pattern, each image its class's pattern plus white Gaussian noise of the same strength.
    A small network learns it in a few epochs. For tests and first tries; results on it mean nothing.
    """
    rng = torch.Generator().manual_seed(20250511648)
    coarse = torch.randn((CLASSES, 1, 5, 5), generator=rng)
    patterns = functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=True)
    labels = torch.arange(TRAIN + TEST) % CLASSES
    noise = torch.randn((TRAIN + TEST, 1, SIDE, SIDE), generator=rng)
    images = (128 + 40 * (patterns[labels] + noise)).round().clamp(0, 255).to(torch.uint8)
    names = tuple(f"pattern {c}" for c in range(CLASSES))
    return make_dataset(name, (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:]), names)
