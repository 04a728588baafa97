"""docs/metrics.md explains every key of metrics.jsonl."""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

from trainer.data.mixture import Mixture
from trainer.observe.numerics import CLASS_TITLES
from trainer.observe.records import FIGURE_NAMES
from trainer.precision.blocks import BLOCK_FIGURES
from trainer.run import loop

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
TABLE = PAGE.partition("\n## metrics.jsonl\n")[2]
KEY = re.compile(r"[a-z]+(/\S+)+")


def documented():
    """Patterns of the keys in the first column; capitals stand for any name."""
    cells = re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE)
    keys = re.findall(r"`([^`]+)`", " ".join(cells))
    return [re.sub(r"[A-Z]+", "[^/]+", key) for key in keys]


def text_of(node):
    """The string that an expression makes, with X for each of its parts; or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [text_of(part) or "X" for part in node.values]
        return "".join(parts)
    return None


def written_keys(tree):
    """Return the keys that code puts into dicts."""
    keys = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys += [text_of(key) for key in node.keys if key is not None]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(text_of(node.slice))
    return [key for key in keys if key]


def test_every_key_that_the_trainer_writes_is_in_the_table():
    patterns = documented()
    step_row = ast.parse(textwrap.dedent(inspect.getsource(loop.step_row)))
    written = set(written_keys(step_row))  # with or without a slash
    for room in ("observe", "run", "step", "assembly"):
        for path in (ROOT / "trainer" / room).rglob("*.py"):
            keys = written_keys(ast.parse(path.read_text()))
            written.update(key for key in keys if KEY.fullmatch(key))
    one = SimpleNamespace(sources={"X": SimpleNamespace(windows=1)})
    sources = {f"data/X/{figure}" for figure in Mixture.source_progress(one, [1])["X"]}
    names = (*FIGURE_NAMES, *BLOCK_FIGURES)
    layers = {f"numerics/{kind}/X/{name}" for kind in CLASS_TITLES for name in names}
    # Loops write these, and their last parts are not in the code as text.
    written = {key for key in written if not key.startswith(("numerics/X", "data/X"))}
    written |= layers | sources
    missing = {
        key for key in written if not any(re.fullmatch(p, key) for p in patterns)
    }
    assert not missing
