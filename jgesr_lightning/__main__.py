"""``python -m jgesr_lightning``."""

import sys

from jgesr_lightning.cli import main

sys.exit(main())
