"""`python -m scripts.bench`: see `speed`."""

import sys

from scripts.arguments import run
from scripts.bench import speed

sys.exit(run(speed.Arguments, "bench", speed.__doc__ or "", speed.main))
