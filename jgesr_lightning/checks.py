"""Checks of values that users give: one clear line that names the value and what would do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

_OTHERS_SAY = {  # what it is called here: what others call it; a hint is given where the former is known
    "local.lr": "learning_rate local_learning_rate client_lr eta step_size lrate",
    "local.batch_size": "batch bs batchsize local_bs local_batch_size",
    "local.epochs": "local_epochs num_epochs local_ep local_steps num_local_iterations",
    "local.optimizer": "optimizer optimiser optim client_optimizer",
    "local.weight_decay": "weight_decay wd l2 decay reg",
    "local.schedule": "schedule scheduler lr_schedule lr_scheduler learning_rate_decay lr_decay",
    "local.schedule_factor": "learning_rate_decay_gamma lr_decay_gamma",
    "local.clip_norm": "clip grad_clip gradient_clipping max_norm",
    "local.proximal_mu": "mu prox_mu fedprox_mu",
    "data.name": "dataset data_set",
    "data.root": "data_dir datadir data_root data_path data_cache_dir",
    "data.kappa": "dirichlet dirichlet_alpha dir_alpha partition_alpha concentration data.alpha data.beta",
    "data.partition": "partitioner partition_method split",
    "data.classes_per_client": "skew_class class_per_client num_shards shards_per_client",
    "data.test_share": "test_size val_share test_split",
    "model.name": "network net arch architecture backbone",
    "aggregator.name": "method algorithm strategy aggregation federated_optimizer",
    "name": "goal run_name experiment exp_name log_file_name",
    "rounds": "num_rounds communication_rounds global_epochs global_rounds global_round comm_round com_round "
    "num_server_rounds central_num_iterations",
    "clients": "num_clients n_clients n_parties num_users num_supernodes num_partitions client_num_in_total",
    "participation": "client_fraction sample_rate sample_fraction fraction_fit fraction_train join_ratio frac "
    "client_num_per_round sample_ratio client_sample_ratio cohort_size client_drop_rate",
    "seed": "random_seed random_state init_seed",
    "channel.noise": "noise_level noise_std snr",
    "channel.missing_rate": "missing drop_rate loss_rate packet_loss",
    "downlink.noise": "downlink.noise_level downlink.noise_std downlink.snr channel.downlink",
    "downlink.missing_rate": "downlink.missing downlink.drop_rate downlink.loss_rate downlink.packet_loss",
    "runtime.devices": "gpu gpus num_gpus n_gpus device_id gpu_id",
    "runtime.accelerator": "device use_gpu using_gpu",
    "runtime.precision": "dtype amp",
    "output_dir": "output out out_dir save_dir save_folder_name logdir",
    "checkpoint.every": "save_every",
    "evaluation.every": "eval_every eval_gap evaluation_frequency frequency_of_the_test",
    "logging.project": "wandb_project",
    "fedavg": "fed_avg mean average",
    "jgesr": "proposed ours pdca joint",
    "cifar10": "cifar",
    "shards": "pat noniid_skew",
    "dirichlet": "dir noniid noniid_labeldir hetero lda",
    "iid": "homo",
    "lenet": "simplecnn",
    "fedavg_cnn": "cnn",
    "accuracy/received": "received accuracy acc",
    "accuracy/trained": "trained",
}
MOST = 100_000  # numbers in one entry of a method's `info`, which each round's record keeps
SYNONYMS = {word: name for name, words in _OTHERS_SAY.items() for word in words.split()}


def plain(name: str, value: Any) -> Any:
    """Return a value as what every file of a run can hold: None, truth values, numbers, texts, and lists and tables.

    NumPy's numbers and arrays, and tensors, become numbers and lists.

    Raises:
        ValueError: something else is in it, or an array of more than `MOST` numbers; the message says where.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(f"{name}[{str(key)!r}]", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        _refuse_long(name, len(value))
        return [plain(f"{name}[{at}]", item) for at, item in enumerate(value)]
    if hasattr(value, "tolist"):  # of NumPy and PyTorch
        _refuse_long(name, math.prod(getattr(value, "shape", ())))
        return plain(name, value.tolist())
    raise ValueError(f"{name} is a {type(value).__name__}; it must be a number, a text, or a list or table of them")


def _refuse_long(name: str, count: int) -> None:
    if count > MOST:
        few = f"a few are meant, {MOST:,} at most"
        raise ValueError(f"{name} has {count:,} numbers, which every round would keep; {few}")


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.51) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known word that means or looks like `word`, or an empty string.

    Args:
        word: what was written.
        known: what there is.
        cutoff: how alike the two must look, from 0, not at all, to 1, where only the case of letters may differ.
    """
    known = list(known)
    meant = SYNONYMS.get(word.lower().replace("-", "_"))
    matches = [meant] if meant in known else []
    if not matches:
        spelt = {name.lower(): name for name in reversed(known)}
        matches = [spelt[near] for near in difflib.get_close_matches(word.lower(), spelt, n=1, cutoff=cutoff)]
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the words in `known`."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} is {value!r}{nearest(str(value), known)}; known: {', '.join(known)}")


def number(
    name: str,
    value: object,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> None:
    """Raise ValueError unless `value` is a finite number within the bounds (booleans are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):  # numpy's, too
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    if value < at_least:
        raise ValueError(f"{name} is {value!r}; it must be at least {at_least:g}")
    if value <= above:
        raise ValueError(f"{name} is {value!r}; it must be above {above:g}")
    if not value <= at_most:
        raise ValueError(f"{name} is {value!r}; it must be at most {at_most:g}")


def whole(name: str, value: object, *, at_least: int = 0) -> None:
    """Raise ValueError unless `value` is an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value < at_least:
        raise ValueError(f"{name} is {value!r}; it must be at least {at_least}")


def is_count(text: str) -> bool:
    """Whether a text is a count: digits, and no more of them than any count has; `int` takes thousands, not all.

    >>> is_count("12"), is_count("-1"), is_count("1" * 5000)
    (True, False, False)
    """
    return text.isascii() and text.isdecimal() and len(text) < 10


def flag(name: str, value: object) -> None:
    """Raise ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
