"""`python -m scripts.bench`: see `speed`."""

import sys

from scripts.bench import speed
from trainer.cli.arguments import run_script

sys.exit(run_script(speed.Arguments, "bench", speed.__doc__ or "", speed.main))
