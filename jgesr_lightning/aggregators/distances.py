"""The squared distances that a graph is learnt from: of which vectors, with which layers, and how much of it noise.

All are (G, P, P) for G layers (or one for all) and P participants, float64, on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Upload, complete
from jgesr_lightning.aggregators.geometry import summed
from jgesr_lightning.graph import distances_from_gram, gram
from jgesr_lightning.graph.arrays import set_diagonal
from jgesr_lightning.graph.laplacian import pairs

KINDS = ("models", "updates", "directions")
LAYER_WEIGHTS = ("columns", "snr")
_LEAST_NORM = 0.01  # of what arrived: a squared norm below that, its noise taken out, is not told from zero


def widths_of(upload: Upload, layers: Sequence[int] | None) -> list[int]:
    """Return the columns of each layer that this process holds; those of all, where there are no `layers`."""
    return [upload.received.shape[1]] if layers is None else list(layers)


def products(upload: Upload, kind: str, layers: Sequence[int] | None) -> Tensor:
    """Return the Gram matrices of what is compared, (G, P, P), over all processes' columns.

    Args:
        upload: the round.
        kind: "models", relative to the first one; "updates", since the models sent last, a gap counting as unchanged;
            "directions", since the initial model, gaps filled.
        layers: columns of each layer that this process holds, for one matrix a layer; None: one for all.

    Raises:
        ValueError: the models of reference are missing, or what arrived has squares that are not finite.
    """
    reference = {"models": "received", "updates": "previous", "directions": "initial"}[kind]
    minus, mask = getattr(upload, reference), None
    if minus is None:
        raise ValueError(f"distances is {kind!r}, which needs `{reference}`")
    rows = upload.received
    if kind == "updates":
        mask = upload.mask
    elif upload.mask is not None:
        rows = complete(upload)
    if kind == "models":
        minus = rows[0]
    widths = widths_of(upload, layers)
    masks = itertools.repeat(None, len(widths)) if mask is None else mask.split(widths, -1)
    columns = zip(rows.split(widths, -1), minus.split(widths, -1), masks, strict=True)
    parts = [gram(part, minus=less, mask=arrived) for part, less, arrived in columns]
    return summed(torch.stack(parts), upload.reduce)


def noise_shares(upload: Upload, layers: Sequence[int] | None) -> Tensor:
    """Return what noise adds to each client's squared norm on average, (G, P); zero where deviations are not known."""
    widths = widths_of(upload, layers)
    entries = torch.tensor(widths, dtype=torch.float64, device=upload.received.device)[:, None]
    entries = entries.expand(-1, len(upload.clients))
    if upload.noise_std is None:
        return torch.zeros_like(entries)
    if upload.mask is not None:
        entries = torch.stack([part.sum(1) for part in upload.mask.split(widths, 1)]).double()
    return upload.reduce(entries.contiguous()) * upload.noise_std.to(entries.device).square()


def noise_of_pairs(shares: Tensor) -> Tensor:
    """Return what noise adds to each squared distance on average, (G, P, P), from `noise_shares`; zero diagonal."""
    noise: Tensor = set_diagonal(pairs(shares), 0.0)
    return noise


def compared(kind: str, found: Tensor, shares: Tensor) -> Tensor:
    r"""Return squared distances less their noise, (G, P, P), which may be negative then; zero diagonal.

    "directions": of updates brought to one length, :math:`2 r^2 (1 - \cos)`, with :math:`r^2` the mean of their squared
    lengths: the dissimilarity of pFedGraph (Ye et al., ICML 2023) in the unit of squared distances, which it equals
    where all have that length. Noise lengthens updates, and thereby shrinks cosines; products are free of it.

    Args:
        kind: see `products`.
        found: (G, P, P) of `products`.
        shares: (G, P) of `noise_shares` to be taken out; zero: none.
    """
    if kind != "directions":
        distances: Tensor = distances_from_gram(found)
        return distances - noise_of_pairs(shares)
    norms = found.diagonal(dim1=-2, dim2=-1)
    clean = torch.maximum(norms - shares, _LEAST_NORM * norms)
    inverse = torch.where(clean > 0, clean, 1).rsqrt() * (clean > 0)
    cosines = (found * (inverse[:, :, None] * inverse[:, None, :])).clamp(-1, 1)
    apart: Tensor = set_diagonal(2 * clean.mean(-1)[:, None, None] * (1 - cosines), 0.0)
    return apart


def snr_weights(found: Tensor, shares: Tensor) -> Tensor:
    r"""Return weights of layers as their signal-to-noise ratios, (G,), that leave the mean signal as it is.

    Let layer l tell the same distance s of two clients on a scale of its own, :math:`a_l s`, with noise whose variance
    goes with its number of entries, as strong noise's does. The unbiased sum of the layers with the least variance
    weighs each by :math:`a_l` over its entries: by what a pair differs by on average over what it differs by in noise.
    All ones where there is no noise, or no signal.

    Args:
        found: (G, P, P) of `products`.
        shares: (G, P) of `noise_shares`.
    """
    number = max(1, found.shape[-1] * (found.shape[-1] - 1))
    noise = noise_of_pairs(shares).sum((-1, -2)) / number
    signal = (distances_from_gram(found).sum((-1, -2)) / number - noise).clamp_min(0)
    ratio = torch.where(noise > 0, signal / torch.where(noise > 0, noise, 1), 0)
    total = float((ratio * signal).sum())
    return ratio * (signal.sum() / total) if total > 0 else torch.ones_like(ratio)


def remembered(former: Tensor | None, new: Tensor, clients: Tensor, num_clients: int, memory: float) -> Tensor:
    """Return the average over rounds of all pairs' distances, (G, K, K): ``memory * former + (1 - memory) * new``.

    Pairs of which one sat out keep what they have; what a pair has at first is its first round's. NaN: none yet.

    Args:
        former: (G, K, K), or None before the first round.
        new: (G, P, P) of this round's participants.
        clients: (P,) their places among all.
        num_clients: K.
        memory: from 0, which forgets, to below 1.

    Raises:
        ValueError: `former` is of another number of clients or layers.
    """
    shape = (len(new), num_clients, num_clients)
    if former is None:
        former = torch.full(shape, torch.nan, dtype=torch.float64)
    if tuple(former.shape) != shape:
        raise ValueError(f"the distances remembered have the shape {tuple(former.shape)}, not {shape}")
    average = former.clone()
    at = (slice(None), clients[:, None], clients[None, :])
    before = former[at]
    average[at] = torch.where(before.isnan(), new, memory * before + (1 - memory) * new)
    return average
