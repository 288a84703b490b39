"""What a run can be told, and reading it from YAML files and ``key=value`` arguments.

`written` is what stands in files and arguments, `section` makes models of it, `schema` holds every key of a run,
`methods` the aggregation methods' settings, `loading` merges the layers of a run, and `shipped` finds the files that
come with the package. None imports torch before a part from outside, or a method's setting that is not its default, has
to be looked at.
"""

from jgesr_lightning.config.error import ConfigError
from jgesr_lightning.config.loading import completed, in_full, load_config, parse_overrides, to_dict, to_yaml
from jgesr_lightning.config.schema import KEYS, SECTIONS, Config
from jgesr_lightning.config.section import Read, Section, read_yaml
from jgesr_lightning.config.shipped import CONFIGS, SHIPPED, copy_configs, find_config, folders
from jgesr_lightning.config.written import Setting, Settings, as_argument, written

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
    "as_argument",
    "completed",
    "copy_configs",
    "find_config",
    "folders",
    "in_full",
    "load_config",
    "parse_overrides",
    "read_yaml",
    "to_dict",
    "to_yaml",
    "written",
]
