"""What the published files are known to be: each is checked once, when it is decoded, before anything else reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from jgesr_lightning.data.dataset import DataError

# MD5 sums of the four published idx files, unpacked.
MNIST = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}

# MD5 sums of the six pickles of CIFAR-10, as torchvision lists them.
CIFAR10_BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

# Number of images and `image_digest` of each split of CIFAR-10: what holds however its archives were compressed.
CIFAR10_IMAGES = {
    "train": (50_000, "55a61f79a40ece2ceda9fb5f9f7078f6ea2fc4952489cef56682bcf92cfcc260"),
    "test": (10_000, "325704b01eb92e1e2a6215ae6a916bb7db7de054af0c496be1c7be2e0fcfbf5f"),
}

REMEDY = "put a good copy there, or set data.verify=false if it is meant to differ"


def check_file(where: Path | str, content: bytes | memoryview, md5: str) -> None:
    """Raise DataError unless the content of the file `where` has the published MD5 sum."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(f"{where} is damaged or not the published file (its MD5 sum is {found}, not {md5}); {REMEDY}")


def check_images(where: Path | str, splits: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise DataError unless the (images, labels) of each split of CIFAR-10 are the published ones."""
    for split, (images, labels) in splits.items():
        number, digest = CIFAR10_IMAGES[split]
        if len(images) != number:
            raise DataError(f"{where} holds {len(images)} {split} images, {number} were published; {REMEDY}")
        if image_digest(images, labels) != digest:
            raise DataError(f"{where}: its {split} images or their classes are not the published ones; {REMEDY}")


def image_digest(images: Tensor, labels: Tensor) -> str:
    """Return a SHA-256 sum of labelled uint8 images that depends on neither their order nor their files' names."""
    pixels = images.numpy()
    single = [hashlib.sha256(bytes([k]) + pixels[i].tobytes()).digest() for i, k in enumerate(labels.tolist())]
    return hashlib.sha256(b"".join(sorted(single))).hexdigest()
