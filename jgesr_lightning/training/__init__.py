"""Local training: engines that turn the models the clients were sent into the models they upload."""

from jgesr_lightning.training.base import ClientData, Engine
from jgesr_lightning.training.choose import build_engine, choose_engine, precision_remark

__all__ = ["ClientData", "Engine", "build_engine", "choose_engine", "precision_remark"]
