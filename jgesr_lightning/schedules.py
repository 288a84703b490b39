"""Learning rates over rounds, and which settings an optimizer has. Without torch: configurations are read with it."""

from __future__ import annotations

import math

from jgesr_lightning.checks import number, one_of, whole

FACTOR = 0.1
"""The factor of a schedule that none is named for."""


class Schedule:
    """The part of the learning rate that is in force in a round: a function of the round's number and nothing else.

    - constant: all of it;
    - cosine: from all of it in round 1 down to `factor` of it in round `rounds`, half a cosine; it stays there;
    - step: times `factor` after every `rounds` rounds.

    It does not depend on how many rounds a run has, so that a run that is resumed with more of them is the same run.

    Args:
        name: one of the above.
        rounds: see above; needed by cosine (at least 2) and step.
        factor: see above, from 0 to 1.

    Raises:
        ValueError: a setting out of range, with its name.
    """

    def __init__(self, name: str = "constant", rounds: int | None = None, factor: float = FACTOR) -> None:
        one_of("local.schedule", name, ("constant", "cosine", "step"))
        number("local.schedule_factor", factor, at_least=0, at_most=1)
        if rounds is not None:
            whole("local.schedule_rounds", rounds, at_least=2 if name == "cosine" else 1)
        elif name != "constant":
            raise ValueError(f"local.schedule is {name!r}; it needs local.schedule_rounds, such as the run's rounds")
        if rounds is not None and name == "constant":
            raise ValueError(f"local.schedule_rounds is {rounds}, which a constant schedule has no use for")
        if factor != FACTOR and name == "constant":
            raise ValueError(f"local.schedule_factor is {factor:g}, which a constant schedule has no use for")
        self.name, self.rounds, self.factor = name, rounds, factor

    def __call__(self, round_number: int) -> float:
        """Return the part (0 to 1) in round `round_number`, which counts from 1."""
        if self.rounds is None or self.name == "constant":
            return 1.0
        if self.name == "step":
            return float(self.factor ** ((round_number - 1) // self.rounds))
        passed = min(1.0, (round_number - 1) / (self.rounds - 1))
        return self.factor + (1 - self.factor) * (1 + math.cos(math.pi * passed)) / 2


def check_optimizer(name: str, momentum: float, weight_decay: float, clip_norm: float | None) -> None:
    """Raise ValueError, with its name, for a setting out of range or one that the optimizer `name` does not have."""
    one_of("local.optimizer", name, ("sgd", "adam", "adamw"))
    number("local.momentum", momentum, at_least=0)
    number("local.weight_decay", weight_decay, at_least=0)
    if clip_norm is not None:
        number("local.clip_norm", clip_norm, above=0)
    if momentum and name != "sgd":
        raise ValueError(f"local.momentum is {momentum:g}; {name} has moments of its own: leave it at 0")
