"""The models that a run leaves: read, exported, applied to new data, and handed to a client that comes later."""

from jgesr_lightning.trained.source import ClientModel, Trained, load_client, open_trained

__all__ = ["ClientModel", "Trained", "load_client", "open_trained"]
