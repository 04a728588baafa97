"""Imports point one way: scalify_core knows nothing of the trainer, and each heavy library has one home."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOMES = {
    "hydra": {"trainer/__main__.py", "trainer/config/composition.py"},
    "wandb": {"trainer/observe/trackers/wandb.py", "trainer/observe/trackers/wandb_files.py"},
    "tensorboardX": {"trainer/observe/trackers/tensorboard.py"},
    "orbax": {"trainer/run/checkpoint.py"},
    "datasets": {"trainer/data/corpus.py"},
    "matplotlib": {
        "trainer/observe/heatmap.py",
        "scripts/bench/contest.py",
        "scripts/studies/adaptation_picture.py",
        "scripts/studies/parity_picture.py",
        "scripts/studies/stability_picture.py",
    },
}
# In this order: a module may import those before it, never one after it.
CORE_ORDER = ["formats", "array", "registry", "rules", "interpreter"]
# The rooms of the trainer, likewise; names without a folder are single modules.
ROOMS = [
    "errors",
    "text",
    "bounds",
    "data",
    "precision",
    "models",
    "step",
    "parallel",
    "workload",
    "tasks",
    "compiled",
    "config",
    "observe",
    "plan",
    "run",
    "report",
    "assembly",
    "__main__",
]


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


@pytest.mark.parametrize("package", ["scalify_core", "trainer", "scripts", "tests"])
def test_no_file_is_longer_than_400_lines(package):
    assert [str(path.relative_to(ROOT)) for path in modules(package) if len(path.read_text().splitlines()) > 400] == []


@pytest.mark.parametrize("path", modules("trainer"), ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_of_the_trainer_import_those_before_them_only(path):
    room = path.relative_to(ROOT / "trainer").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in ROOMS, f"trainer/{room} has no place in the order of rooms"
    later = ROOMS[ROOMS.index(room) + 1 :]
    assert not [
        name
        for name in imports(path)
        if name.split(".")[0] == "trainer" and name.split(".")[1:2] in [[r] for r in later]
    ]


@pytest.mark.parametrize(
    "room", [p.name for p in (ROOT / "trainer").iterdir() if p.is_dir() and p.name != "__pycache__"]
)
def test_a_room_says_in_three_lines_what_it_is_for(room):
    said = ast.get_docstring(ast.parse((ROOT / "trainer" / room / "__init__.py").read_text()))
    assert said is not None
    assert len(said.splitlines()) >= 3


@pytest.mark.parametrize("path", modules("trainer") + modules("scripts"), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_outside_of_precision_compares_the_name_of_a_scaling_method(path):
    """Its entry in trainer/precision/methods.py says what is its own; others ask `policy.method`."""
    if "precision" in path.relative_to(ROOT).parts:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        compared += [node.subject] if isinstance(node, ast.Match) else []
        words = {n.value for part in compared for n in ast.walk(part) if isinstance(n, ast.Constant)}
        assert not words & {"propagate", "loss_scale", "delayed"}, f"line {getattr(node, 'lineno', '')}"
        names = {getattr(part, "attr", getattr(part, "id", "")) for part in compared}
        assert "scaling" not in names or not any(isinstance(w, str) for w in words), f"line {node.lineno}"


@pytest.mark.parametrize("library", HOMES)
def test_each_heavy_library_is_imported_in_one_place(library):
    found = {
        str(p.relative_to(ROOT)) for p in modules("trainer") + modules("scripts") if library in top_level(imports(p))
    }
    assert found <= HOMES[library]


def test_only_parallel_starts_the_processes():
    found = {p.name for p in modules("trainer") if "jax.distributed.initialize" in p.read_text()}
    assert found == {"processes.py"}


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("trainer.config.schema", {"jax", "wandb", "datasets", "orbax"}),
        ("trainer.models.specs", {"jax", "safetensors"}),
        ("trainer.assembly.run", {"wandb", "datasets"}),
    ],
)
def test_importing_does_not_load_what_is_not_used_yet(package, absent):
    code = f"import sys, {package}; print(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
