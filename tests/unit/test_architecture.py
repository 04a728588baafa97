"""The rules of the code that no linter has; the directions of imports are contracts in
pyproject.toml."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
SCALING_METHODS = {"propagate", "loss_scale", "delayed"}


def modules(*packages):
    return [
        path for package in packages for path in sorted((ROOT / package).rglob("*.py"))
    ]


def shown(path):
    return str(path.relative_to(ROOT))


def test_contracts_of_imports_hold():
    # In a process of its own: the linter's console keeps the stderr that it found when
    # it was imported.
    lint = (
        "from importlinter.cli import lint_imports; raise"
        " SystemExit(lint_imports(no_cache=True, no_logo=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_scalify_core_needs_jax_numpy_and_ml_dtypes_only():
    graph = grimp.build_graph(
        "scalify_core", include_external_packages=True, cache_dir=None
    )
    external = {
        name for name in graph.modules if graph.is_module_squashed(name)
    } - sys.stdlib_module_names
    assert external <= {"jax", "numpy", "ml_dtypes", "optax"}
    assert graph.find_modules_that_directly_import("optax") == {
        "scalify_core.optim.scaled_optimizer"
    }


def test_only_parallel_starts_the_processes():
    actual = [
        shown(path)
        for path in modules("trainer")
        if "jax.distributed.initialize" in path.read_text()
    ]
    assert actual == ["trainer/parallel/processes.py"]


def test_files_are_short_and_rooms_say_what_they_are_for():
    long = [
        path
        for path in modules("scalify_core", "trainer", "scripts", "tests")
        if path.read_text().count("\n") > 600
    ]
    assert [shown(path) for path in long] == []
    rooms = [path for path in modules("trainer") if path.name == "__init__.py"]
    short = [
        path
        for path in rooms
        if len((ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()) < 3
    ]
    assert [shown(path) for path in short] == []


def compares_scaling(node):
    """Return whether a comparison or a match names a scaling method, or compares a
    field `scaling` with a string."""
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    else:
        parts = [node.subject] if isinstance(node, ast.Match) else []
    words = {
        n.value for part in parts for n in ast.walk(part) if isinstance(n, ast.Constant)
    }
    is_scaling = any(
        "scaling" in (getattr(part, "attr", ""), getattr(part, "id", ""))
        for part in parts
    )
    return bool(words & SCALING_METHODS) or (
        is_scaling and any(isinstance(word, str) for word in words)
    )


def test_no_file_outside_of_precision_compares_the_name_of_a_scaling_method():
    """Its entry in trainer/precision/methods.py says where it differs; others ask
    `policy.method`."""
    actual = [
        f"{shown(path)}:{node.lineno}"
        for path in modules("trainer", "scripts")
        if "precision" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if compares_scaling(node)
    ]
    assert actual == []
