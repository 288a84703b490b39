"""The uplink: what the clients send arrives noisy and with entries missing; so may what they are sent (`Downlink`).

The channel of arXiv 2505.11648: ``received = M * X + N`` with ``N_kj ~ N(0, sigma_k^2)`` and ``M`` in {0, 1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jgesr_lightning import checks, names, seeding
from jgesr_lightning.links import GIVEN, link_function
from jgesr_lightning.signatures import arguments

MISSING = f"{seeding.CHANNEL}: missing"  # a stream of its own: the noise is the same at every missing rate


def noise_std_for(initial: Tensor, noise: float) -> float:
    """Return the deviation ``sigma = noise * mean|initial|`` that noise level `noise` means for the initial model.

    Args:
        initial: parameters of the model of round 0, any shape.
        noise: noise level s >= 0, relative to the mean magnitude of the parameters.

    """
    checks.number("channel.noise", noise, at_least=0)
    return noise * float(initial.detach().abs().double().mean())


class Uplink:
    """Send local models to the server: add white Gaussian noise and lose entries.

    Every client's row comes from its own generators, keyed by (seed, round, client): a row is the same whichever
    process computes it and whichever other rows are sent with it. Noise and losses have separate streams, and an entry
    is lost where a uniform number lies below the rate: at one seed, runs at several missing rates see the same noise,
    and what is lost at one rate is lost at every higher one.

    Args:
        noise_std: standard deviation (not variance) of the noise, for all clients or one a client, shape (K,); >= 0.
        missing_rate: probability that an entry does not arrive, in [0, 1).
        seed: seed of the channel.

    """

    def __init__(self, noise_std: float | Sequence[float] | Tensor, missing_rate: float = 0.0, seed: int = 0) -> None:
        sigma = torch.as_tensor(noise_std, dtype=torch.float64).detach().cpu().clone()
        if sigma.ndim > 1:
            raise ValueError(f"noise_std has shape {tuple(sigma.shape)}; it must be a number or one number a client")
        if not bool((torch.isfinite(sigma) & (sigma >= 0)).all()):
            raise ValueError(f"noise_std is {noise_std!r}; every entry must be a finite number of at least 0")
        checks.number("missing_rate", missing_rate, at_least=0)
        if missing_rate >= 1:
            raise ValueError(f"missing_rate is {missing_rate!r}; it must be below 1")
        self.noise_std = sigma
        self.missing_rate = float(missing_rate)
        self.seed = int(seed)

    def known_noise(self, num_clients: int) -> Tensor | None:
        """Return the deviation of the noise on each client's entries, (K,) float64, for methods that ask for it."""
        return self.noise_std.expand(num_clients)

    @torch.no_grad()
    def __call__(
        self, models: Tensor, round: int, clients: Sequence[int] | None = None, previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what arrives of `models` in round `round`, and which entries did.

        Noise is there also where nothing arrived. It is drawn on the CPU, in float64 for float64 models and in float32
        for all others (these are two different draws), then moved to the models' device.

        Args:
            models: (K, d) floating-point, one row a client, any device; never modified.
            round: round number; every round has fresh noise and fresh losses.
            clients: global numbers of the clients whose rows these are; 0 to K - 1 if left out.
            previous: (K, d) what each was sent last, which this channel has no use for.

        Returns:
            received: (K, d), own memory, dtype and device of `models`.
            mask: (K, d) bool, True where the entry arrived. When the missing rate is 0 it is one True seen K x d times
                (an expanded view that costs no memory; clone it before writing to it).

        """
        ids = self._clients(models, clients)
        K, d = models.shape
        sigma = self.noise_std.expand(max(ids, default=0) + 1) if self.noise_std.ndim == 0 else self.noise_std
        precision = torch.float64 if models.dtype == torch.float64 else torch.float32
        received = models.clone(memory_format=torch.contiguous_format)
        mask = torch.ones((1, 1), dtype=torch.bool, device=models.device).expand(K, d)
        if self.missing_rate > 0:
            mask = torch.empty((K, d), dtype=torch.bool, device=models.device)
            for row, client in enumerate(ids):
                stream = seeding.generator(self.seed, MISSING, round, client)
                drawn = torch.rand(d, generator=stream, dtype=torch.float32)
                mask[row] = (drawn >= self.missing_rate).to(models.device)
            received.masked_fill_(~mask, 0)  # not a product: what was lost may be infinite or not a number
        for row, client in enumerate(ids):
            if sigma[client] > 0:
                stream = seeding.generator(self.seed, seeding.CHANNEL, round, client)
                noise = torch.randn(d, generator=stream, dtype=precision).mul_(float(sigma[client]))
                received[row] += noise.to(models.device)
        return received, mask

    def _clients(self, models: Tensor, clients: Sequence[int] | None) -> list[int]:
        """Return the number of the client of each row."""
        if models.ndim != 2 or not models.is_floating_point():
            raise ValueError(f"models is {models.dtype}, shape {tuple(models.shape)}; it must be floating-point (K, d)")
        K = len(models)
        ids = list(range(K)) if clients is None else [int(client) for client in clients]
        if len(ids) != K:
            raise ValueError(f"clients names {len(ids)} clients, but models has {K} rows")
        if any(client < 0 for client in ids):
            raise ValueError(f"clients is {ids}; client numbers start at 0")
        if self.noise_std.ndim == 1 and any(client >= len(self.noise_std) for client in ids):
            raise ValueError(f"client {max(ids)} sent its model, but noise_std has {len(self.noise_std)} entries")
        return ids


class Downlink:
    """Bring the clients what the server sends: the same channel the other way, with draws of its own.

    Args:
        noise_std: standard deviation of the noise, one for all clients; >= 0.
        missing_rate: probability that an entry does not arrive, in [0, 1).
        seed: seed of the channel.
    """

    def __init__(self, noise_std: float = 0.0, missing_rate: float = 0.0, seed: int = 0) -> None:
        self._channel = Uplink(noise_std, missing_rate, seeding.derive(seed, seeding.DOWNLINK))
        self.is_perfect = noise_std == 0 and missing_rate == 0

    def __call__(self, sent: Tensor, held: Tensor, round: int, clients: Sequence[int]) -> Tensor:
        """Return what the clients have of `sent` after round `round`: a lost entry stays as they hold it.

        Args:
            sent: (K, d), one row a client; never modified.
            held: (K, d) what each has until then.
            round: round number.
            clients: global numbers of the clients whose rows these are.
        """
        arrived, mask = self._channel(sent, round, clients)
        return torch.where(mask, arrived, held)


class OwnUplink(Uplink):
    """A link of somebody's own under the same call: a function of one client's model.

    What the function draws from PyTorch, NumPy or Python follows (seed, round, client), so that its numbers, too, are
    the same whichever process computes them.

    Args:
        name: of the function, see `jgesr_lightning.names`: ``(model (d,), ...) -> received (d,)``, or that and a mask
            (d,), True where an entry arrived. Of `jgesr_lightning.links.GIVEN` it gets what it names; `previous` (d,)
            is what the client was sent last. Models come on the CPU, as copies. It is a function of what it is given
            and of what it draws: what it remembered would be lost when a run is resumed.
        settings: its other arguments.
        noise_std: deviation of the noise that it is to make, which methods are told, too.
        missing_rate: share of entries that it is to lose.
        seed: seed of the channel.

    Raises:
        ValueError: there is no such function, or what it returns is no model; the message says so in one line.

    """

    def __init__(
        self, name: str, settings: dict[str, Any], noise_std: float, missing_rate: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__(noise_std, missing_rate, seed)
        self.name = name
        self.function = link_function(name)
        self.settings = dict(settings)
        self.named = [key for key in GIVEN if key in arguments(self.function)]
        self._head = f"channel.name is {name!r}; {names.label(name)}"

    def known_noise(self, num_clients: int) -> Tensor | None:
        """Return what `noise_std` says, or None: nobody knows the noise of a function that does not ask for it."""
        return super().known_noise(num_clients) if "noise_std" in self.named else None

    def try_out(self, initial: Tensor, num_clients: int) -> None:
        """Let each client's upload of an unchanged model (d,) go through, as if it were round 1.

        Raises:
            ValueError: what comes out is no model.
        """
        for client in range(num_clients):  # one by one: all at once may be more than a process can hold
            received, mask = self(initial[None], 1, [client], initial[None])
            if not bool(torch.isfinite(received[mask]).all()):
                raise ValueError(f"{self._head} makes the initial model NaN or infinite")

    @torch.no_grad()
    def __call__(
        self, models: Tensor, round: int, clients: Sequence[int] | None = None, previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what arrives of `models`, and which entries did; see `Uplink`. What was sent is 0 if left out."""
        ids = self._clients(models, clients)
        received = torch.empty_like(models, memory_format=torch.contiguous_format)
        mask = torch.empty(models.shape, dtype=torch.bool, device=models.device)
        for row, client in enumerate(ids):
            model = models[row].cpu().clone()
            sent = torch.zeros_like(model) if previous is None else previous[row].cpu().clone()
            given = {
                "previous": sent,
                "round": round,
                "client": client,
                "noise_std": float(self.noise_std),
                "missing_rate": self.missing_rate,
            }
            with seeding.drawing_from(seeding.derive(self.seed, seeding.CHANNEL, round, client), models.device):
                try:
                    found = self.function(model, **{key: given[key] for key in self.named}, **self.settings)
                except (Exception, SystemExit) as error:  # whatever somebody's function raises
                    raise ValueError(f"{self._head} failed: {names.cause(error)}") from error
            received[row], mask[row] = self._checked(found, models.shape[1])
        return received.masked_fill_(~mask, 0), mask

    def _checked(self, found: Any, d: int) -> tuple[Tensor, Tensor]:
        """Return what the function gave as a model and a mask of d entries each."""
        model, mask = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        mask = torch.ones(d, dtype=torch.bool) if mask is None else mask
        for what, part, kind in (("received", model, "real numbers"), ("mask", mask, "True or False")):
            gave = f"a {type(part).__name__}"
            if isinstance(part, Tensor):
                right = part.is_floating_point() if what == "received" else part.dtype == torch.bool
                if right and part.shape == (d,) and part.layout == torch.strided:
                    continue
                gave = f"{part.dtype}, shape {tuple(part.shape)}"
                gave += "" if part.layout == torch.strided else f", {part.layout}"
            raise ValueError(f"{self._head} gave {gave} for {what}; it must be a tensor of {kind}, shape ({d},)")
        return model, mask


def build_uplink(name: str, settings: dict[str, Any], noise_std: float, missing_rate: float, seed: int) -> Uplink:
    """Return the channel of a name, ours or somebody's; see `OwnUplink`."""
    if name == "gaussian":
        return Uplink(noise_std, missing_rate, seed)
    return OwnUplink(name, settings, noise_std, missing_rate, seed)
