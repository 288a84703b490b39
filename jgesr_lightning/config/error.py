"""What is raised for settings that cannot be used."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line that names the key, the value and what would do."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))
