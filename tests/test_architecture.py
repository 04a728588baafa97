"""Imports point one way: scalify_core knows nothing of the trainer, and each heavy library has one home."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOMES = {
    "hydra": {"trainer/__main__.py", "trainer/composition.py"},
    "wandb": {"trainer/tracking.py"},
    "orbax": {"trainer/checkpoint.py"},
    "datasets": {"trainer/data/corpus.py"},
    "matplotlib": {"trainer/heatmap.py", "scripts/bench_cases.py", "scripts/parity_picture.py"},
}
# In this order: a module may import those before it, never one after it.
CORE_ORDER = ["formats", "array", "registry", "rules", "interpreter"]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of all imports of a file, those inside functions too; `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_level(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", modules("scalify_core"), ids=lambda p: str(p.relative_to(ROOT)))
def test_scalify_core_needs_jax_numpy_and_ml_dtypes_only(path):
    allowed = {"jax", "numpy", "ml_dtypes", "scalify_core"} | sys.stdlib_module_names
    if path.name == "optim.py":
        allowed |= {"optax"}
    assert top_level(imports(path)) <= allowed


@pytest.mark.parametrize("path", modules("scalify_core"), ids=lambda p: str(p.relative_to(ROOT)))
def test_scalify_core_imports_point_one_way(path):
    part = path.relative_to(ROOT / "scalify_core").parts[0].removesuffix(".py")
    if part in CORE_ORDER:
        later = {f"scalify_core.{name}" for name in CORE_ORDER[CORE_ORDER.index(part) + 1 :]}
        assert not imports(path) & later


@pytest.mark.parametrize("library", HOMES)
def test_each_heavy_library_is_imported_in_one_place(library):
    found = {
        str(p.relative_to(ROOT)) for p in modules("trainer") + modules("scripts") if library in top_level(imports(p))
    }
    assert found <= HOMES[library]


def test_only_parallel_starts_the_processes():
    found = {p.name for p in modules("trainer") if "jax.distributed.initialize" in p.read_text()}
    assert found == {"parallel.py"}


@pytest.mark.parametrize(
    ("package", "absent"),
    [("trainer.config", {"jax", "wandb", "datasets", "orbax"}), ("trainer.build.run", {"wandb", "datasets"})],
)
def test_importing_does_not_load_what_is_not_used_yet(package, absent):
    code = f"import sys, {package}; print(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
