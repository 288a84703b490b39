"""What a run needs of the settings that libraries keep for the whole program, which may be somebody else's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jgesr_lightning.runtime.environment import CPP_LOG_LEVEL

LOGGERS = ("lightning.fabric", "lightning.pytorch")


@contextmanager
def set_for_a_run() -> Iterator[None]:
    """Let weights be drawn in float32 and gradients be had, and Lightning's banners be silent; all is given back."""
    dtype, cpp = torch.get_default_dtype(), os.environ.get(CPP_LOG_LEVEL)
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    torch.set_default_dtype(torch.float32)  # numbers drawn in another are others
    for logger in levels:  # whose banners say what our own first lines say
        logger.setLevel(logging.WARNING)
    try:
        with torch.inference_mode(False):  # which turns gradients on, too
            yield
    finally:
        torch.set_default_dtype(dtype)
        for logger, level in levels.items():
            logger.setLevel(level)
        if cpp is None:
            os.environ.pop(CPP_LOG_LEVEL, None)
