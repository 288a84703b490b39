"""Groups of clients that are known beforehand: to see whether a method finds them, and a learned graph joins them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning import checks, seeding

KINDS = ("labels", "rotations")
PURPOSE = "planted groups"
TURNS = 4  # quarter turns that differ

Transform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def transforms(kind: str, groups: int, classes: int, input_shape: tuple[int, ...], seed: int = 0) -> list[Transform]:
    """Return what is done to the (inputs, labels) of each group's clients; group 0 keeps its data as they are.

    "labels": each group names the classes by a random permutation of its own (Sattler et al., Clustered Federated
    Learning, IEEE TNNLS 2021): what one group learns is wrong for another. "rotations": each group sees the images
    turned by a multiple of 90 degrees (Ghosh et al., IFCA, NeurIPS 2020, with four groups): groups differ less.

    Args:
        kind: "labels" or "rotations".
        groups: number of groups, at least 2; at most 4 with rotations.
        classes: number of classes.
        input_shape: shape of one sample.
        seed: seed of the permutations.

    Raises:
        ValueError: unknown kind, or more groups than the kind can tell apart.

    """
    checks.one_of("data.planted", kind, KINDS)
    checks.whole("data.groups", groups, at_least=2)
    if kind == "rotations":
        if groups > TURNS:
            raise ValueError(f"data.groups is {groups}; there are {TURNS} rotations by a multiple of 90 degrees")
        if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
            raise ValueError(f"data.planted=rotations needs square images; a sample here has the shape {input_shape}")
        return [_turned(turns * TURNS // groups if TURNS % groups == 0 else turns) for turns in range(groups)]
    return [_renamed(permutation) for permutation in _permutations(groups, classes, seed)]


def _permutations(groups: int, classes: int, seed: int) -> list[Tensor]:
    """Return permutations that all differ, the first of them the identity."""
    rng = np.random.default_rng(seeding.derive(seed, PURPOSE))
    found = {tuple(range(classes)): None}  # in the order in which they were drawn
    for _ in range(100 * groups):
        if len(found) == groups:
            return [torch.tensor(permutation) for permutation in found]
        found[tuple(rng.permutation(classes).tolist())] = None
    raise ValueError(f"data.groups is {groups}; {classes} classes cannot be renamed in so many ways")


def _renamed(permutation: Tensor) -> Transform:
    return lambda inputs, labels: (inputs, permutation.to(labels.device)[labels])


def _turned(turns: int) -> Transform:
    return lambda inputs, labels: (torch.rot90(inputs, turns, (-2, -1)).contiguous(), labels)
