"""``python -m jgesr_lightning``."""

import sys

try:
    from jgesr_lightning.cli import main

    status = main()
except KeyboardInterrupt:  # while Python was still reading the program
    status = 130
sys.exit(status)
