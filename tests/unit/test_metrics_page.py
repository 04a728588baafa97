"""docs/metrics.md explains every key of metrics.jsonl and every field of the console."""

import ast
import inspect
import io
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

from trainer.data.mixture import Mixture
from trainer.observe.display import Display, Output
from trainer.observe.numerics import CLASSES
from trainer.observe.probe import FIGURES
from trainer.observe.records import without_layers
from trainer.precision.blocks import BLOCK_FIGURES
from trainer.run import loop

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
CONSOLE, TABLE = PAGE.split("\n## metrics.jsonl\n")
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


def written_keys(path):
    """The keys that a module's code puts into dicts, and that look like metrics."""
    keys = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict):
            keys += [text_of(key) for key in node.keys if key is not None]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(text_of(node.slice))
    return [key for key in keys if key and KEY.fullmatch(key)]


def keys_of_every_step():
    """The keys of the row that the loop makes after a step, with or without a slash."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(loop.step_row)))
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    return [text_of(key) for node in dicts for key in node.keys]


def test_every_key_that_the_trainer_writes_is_in_the_table():
    patterns = documented()
    written = set()
    for room in ("observe", "run", "step", "assembly"):
        for path in (ROOT / "trainer" / room).rglob("*.py"):
            written.update(written_keys(path))
    written.update(keys_of_every_step())
    one = SimpleNamespace(parts={"X": SimpleNamespace(windows=1)})
    sources = {f"data/X/{figure}" for figure in Mixture.source_progress(one, [1])["X"]}
    names = (*FIGURES, *BLOCK_FIGURES)
    layers = {f"numerics/{kind}/X/{name}" for kind in CLASSES for name in names}
    # Loops write these, and their last parts are not in the code as text.
    written = {key for key in written if not key.startswith(("numerics/X", "data/X"))}
    written |= layers | sources
    missing = {
        key for key in written if not any(re.fullmatch(p, key) for p in patterns)
    }
    assert not missing
    stale = {
        pattern
        for pattern in patterns
        if not any(re.fullmatch(pattern, key) for key in written)
    }
    assert stale == {"step", "event"} | {
        f"val/[^/]+/{name}" for name in ("loss", "perplexity", "bits_per_byte")
    }  # written by the log, and renamed from `val/loss`
    short = without_layers(dict.fromkeys(layers, 1.0))
    assert {f"`{re.sub('/[a-z_]+/', '/CLASS/', key)}`" for key in short} == set(
        re.findall(r"`numerics/CLASS/\w+`", TABLE)
    )


def test_every_field_of_the_console_line_is_explained():
    out = io.StringIO()
    row = {"train/loss": 2.0, "val/loss": 2.0, "lr": 1e-3, "grad_norm": 1.0}
    row |= {"watchdog/skipped": 1, "memory/host_peak_gib": 1.0}
    row |= {"perf/step_ms": 9.0, "perf/tokens_per_s": 1e5, "perf/mfu": 0.3}
    display = Display(9, console=Output(file=out, soft_wrap=True))
    for step in (8, 9):
        display.update(step, row)
    [example] = re.findall(r"```text\n(.*?)\n```", CONSOLE, re.DOTALL)
    words = [
        re.findall(r"[A-Za-z/]{3,}", re.sub(r"\S*\d\S*", "", line))
        for line in (example, out.getvalue().splitlines()[-1])
    ]
    assert words[0] == words[1]
    fields = re.findall(r"^\| `(.*?)` \|", CONSOLE, re.MULTILINE)
    explained = {word for field in fields for word in field.split()}
    assert set(words[1]) - {"steps"} <= explained
