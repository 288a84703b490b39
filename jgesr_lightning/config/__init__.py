"""What a run can be told, and reading it from YAML files and ``key=value`` arguments.

`schema` holds every key, `loading` merges the layers of a run, `nodes` and `reading` read every YAML file, `methods`
gives the aggregation methods' settings, `shipped` finds the files that come with the package. None imports torch before
a part from outside, or a method's setting that is not its default, has to be looked at.
"""

from jgesr_lightning.config.loading import completed, from_dict, load_config, parse_overrides, to_dict, to_yaml
from jgesr_lightning.config.methods import method_settings
from jgesr_lightning.config.nodes import Setting, Settings
from jgesr_lightning.config.reading import Read, read_yaml
from jgesr_lightning.config.schema import KEYS, SECTIONS, Config
from jgesr_lightning.config.section import ConfigError, Section
from jgesr_lightning.config.shipped import CONFIGS, SHIPPED, copy_configs, find_config, folders

__all__ = [
    "CONFIGS",
    "KEYS",
    "SECTIONS",
    "SHIPPED",
    "Config",
    "ConfigError",
    "Read",
    "Section",
    "Setting",
    "Settings",
    "completed",
    "copy_configs",
    "find_config",
    "folders",
    "from_dict",
    "load_config",
    "method_settings",
    "parse_overrides",
    "read_yaml",
    "to_dict",
    "to_yaml",
]
