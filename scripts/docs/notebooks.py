"""Execute the notebooks of `examples/`, and write their outputs into them.

    python -m scripts.docs.notebooks [write=no] [NOTEBOOK ...]

Code cells run in one namespace, in an empty directory, and the value of a cell's last
expression is shown. `!scalify-trainer ...` runs the command. A kernel and its protocol,
29 packages, are not needed for that.
"""

import ast
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "!scalify-trainer "


def run_command(line: str) -> str:
    """Run a line that starts with `COMMAND`, and return what it prints."""
    arguments = shlex.split(line.removeprefix(COMMAND))
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{line}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a code cell in a namespace, and return its outputs as a notebook has them."""
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        if source.startswith(COMMAND):
            for line in source.splitlines():
                print(run_command(line), end="")
        else:
            tree = ast.parse(source)
            last = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
            exec(compile(tree, "<cell>", "exec"), names)
            if last is not None:
                value = eval(compile(last, "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        # The directory is temporary: paths in it are shown relative to it.
        relative = printed.getvalue().replace(f"{Path.cwd()}/", "")
        text = relative.splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = [value._repr_html_()]
        outputs.append(
            {
                "output_type": "execute_result",
                "execution_count": None,
                "metadata": {},
                "data": data,
            }
        )
    return outputs


def execute(path: Path) -> dict[str, Any]:
    """Run the code cells of a notebook in the working directory; return it whole."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        cell["outputs"] = run_cell("".join(cell["source"]), names)
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = count
    return notebook


def main(argv: Sequence[str]) -> None:
    """Execute the named notebooks, or all; `write=no` leaves their files alone."""
    paths = [Path(name).resolve() for name in argv if "=" not in name]
    for path in paths or sorted((ROOT / "examples").glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            notebook = execute(path)
        if "write=no" not in argv:
            path.write_text(json.dumps(notebook, indent=1) + "\n")
        print(f"{path.name}: {len(notebook['cells'])} cells")


if __name__ == "__main__":
    main(sys.argv[1:])
