"""A data set in memory, as it was published: whole numbers, no normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class DataError(ValueError):
    """Data that is missing or damaged; its message is one line that says what to do."""


@dataclass(frozen=True)
class RawDataset:
    """Images, labels and the statistics that normalise them. Build it with `make_dataset`, which checks and measures.

    Attributes:
        name: name in the registry.
        train_images: (n, C, H, W) uint8.
        train_labels: (n,) int64, 0 to len(classes) - 1.
        test_images: (m, C, H, W) uint8.
        test_labels: (m,) int64.
        classes: name of each class.
        mean: (C,) float64, mean of the training pixels divided by 255.
        std: (C,) float64, their standard deviation (over n, not n - 1).

    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (images / 255 - mean) / std of uint8 images (n, C, H, W), computed on the device where they are."""
        mean, std = (x.to(images.device, dtype).view(1, -1, 1, 1) for x in (255 * self.mean, 255 * self.std))
        return images.to(dtype, copy=True).sub_(mean).div_(std).contiguous()


def make_dataset(
    name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: tuple[str, ...]
) -> RawDataset:
    """Check (images, labels) of both splits, measure the training pixels and return the data set.

    Raises:
        DataError: images are not uint8 (n, C, H, W) of one shape, or labels do not fit images and classes.

    """
    for split, (images, labels) in (("train", train), ("test", test)):
        if images.dtype != torch.uint8 or images.ndim != 4 or len(images) == 0:
            raise DataError(f"{name}: {split} images are {images.dtype} {tuple(images.shape)}, not uint8 (n, C, H, W)")
        if labels.shape != (len(images),):
            raise DataError(f"{name}: {len(images)} {split} images but {labels.numel()} labels")
        if int(labels.min()) < 0 or int(labels.max()) >= len(classes):
            raise DataError(f"{name}: {split} labels reach {int(labels.max())}, but there are {len(classes)} classes")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(f"{name}: training images are {tuple(train[0].shape[1:])}, test {tuple(test[0].shape[1:])}")
    mean, std = pixel_statistics(train[0])
    return RawDataset(name, train[0], train[1].long(), test[0], test[1].long(), tuple(classes), mean, std)


def pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation per channel of uint8 images (n, C, H, W) on the scale 0 to 1, both (C,) float64.

    Exact, from a histogram. A channel of one single value has deviation 1, so that normalising it gives zeros.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])])
    share = counts.double() / counts.sum(dim=1, keepdim=True)
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(dim=1)
    return mean, torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt()
