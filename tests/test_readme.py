"""The README's example runs as it stands, and learns."""

import re
from pathlib import Path

import numpy as np

README = Path(__file__).resolve().parent.parent / "README.md"


def test_scalify_on_ones_own_model_runs_and_learns(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    first = code.replace("range(50)", "range(1)")
    exec(first, {})  # the loss of the first step, before any update
    before = float(capsys.readouterr().out)
    exec(code, names)
    after = float(capsys.readouterr().out)
    assert np.isfinite(after)
    assert after < 0.5 * before
    assert names["params"]["params"]["layers_0"]["kernel"].dtype == np.float16
