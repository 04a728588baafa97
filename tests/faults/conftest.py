"""The helpers of the trainer's tests that run whole trainers are these tests' too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "trainer"))
