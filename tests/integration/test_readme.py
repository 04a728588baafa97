"""The documents' examples run as they stand, and learn; commands and links of all
documents are valid."""

import ast
import importlib
import os
import re
import shlex
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from scalify_core.array.scaled_array import is_scaled_array
from trainer.cli.commands import KEY_GROUPS
from trainer.cli.train import SIGNAL_EXIT_CODES
from trainer.cli.training_keys import split_arguments
from trainer.config.composition import (
    Sweep,
    compose_config,
    expand_arguments,
    is_sweep,
)
from trainer.errors import UserError
from trainer.run.shutdown import HUNG_EXIT_CODE, SIGNALS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def shell_lines(document):
    """The lines of a document's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)
    return "\n".join(blocks).replace("\\\n", " ").splitlines()


def test_the_commands_of_all_documents_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("tokenizers/mine", "runs/tables"):  # else they are ids of the hub
        Path(path).mkdir(parents=True)
    checked = set()
    for document in DOCUMENTS:
        for line in shell_lines(document):
            if line.startswith("python -m trainer"):
                # the directory of model=from_init is not here
                words = shlex.split(line, comments=True)[3:]
                left_out = ("model=from_init", "--cfg", "job")
                checked.add(tuple(word for word in words if word not in left_out))
    for arguments in map(list, checked):
        if is_sweep(arguments):
            line = expand_arguments(arguments)
            assert Sweep.parse(line.overrides).problems(line) == []
        else:
            compose_config(arguments)
    assert len(checked) > 15


def test_the_other_commands_of_all_documents_have_valid_keys():
    checked = set()
    for document in DOCUMENTS:
        for line in shell_lines(document):
            program, _, rest = line.partition(" ")
            if program != "scalify-trainer" or "--help" in line:
                continue
            name, *arguments = shlex.split(rest, comments=True)
            module = importlib.import_module(f"trainer.cli.{name.replace('-', '_')}")
            split_arguments(module.Arguments, arguments, KEY_GROUPS.get(name))
            checked.add(name)
    assert len(checked) > 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        path, _, heading = link.partition("#")
        if path.startswith("http"):
            continue
        target = document.parent / path if path else document
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^a-z0-9 -]", "", title.lower()) for title in titles]
        assert not heading or heading in [a.replace(" ", "-") for a in anchors], link
    name = f"docs/{document.name}"
    is_in_docs = document.parent.name == "docs" and document.name != "README.md"
    assert not is_in_docs or name in README.read_text()


def constant_exit_codes(path):
    """The integers that a program's main functions return, or that it exits with."""
    for node in ast.walk(ast.parse(path.read_text())):
        codes = []
        name = node.name if isinstance(node, ast.FunctionDef) else None
        if name in ("main", "run", "run_command_line"):
            codes = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else None
        if called in ("sys.exit", "os._exit", "SystemExit"):
            codes = node.args
        for code in codes:
            if isinstance(code, ast.Constant) and type(code.value) is int:
                yield code.value


def test_every_exit_code_is_documented():
    text = (ROOT / "docs" / "exit_codes.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) ", text, re.MULTILINE)}
    signals = {128 + number for number in (*SIGNALS, signal.SIGPIPE)}
    actual = {0, 1, HUNG_EXIT_CODE, *SIGNAL_EXIT_CODES, *signals}
    actual |= {error.exit_code for error in (UserError, *UserError.__subclasses__())}
    for path in [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        actual |= set(constant_exit_codes(path))
    assert listed == actual


def blocks(document):
    """The Python programs of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.slow  # trainer/test_library.py does
def test_the_trainer_is_used_from_python_as_its_page_does(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code = next(block for block in blocks("docs/python.md") if "CausalModel" in block)
    assert len(code.splitlines()) <= 40
    cached = code.replace(
        '"tracker=jsonl"',
        f'"tracker=jsonl", "compile_cache={os.environ["SCALIFY_TEST_CACHE"]}"',
    )
    for steps in (60, 65):  # the second goes on from the first
        exec(cached.replace("train.steps=60", f"train.steps={steps}"), {})
        step, loss, rms, told, run_dir = capsys.readouterr().out.split()[-5:]
        assert (int(step), int(told), run_dir) == (steps, steps, "runs/walk")
        assert float(loss) < 0.5 * np.log(64)  # that of a guess among 64 ids
        assert 0.01 < float(rms) < 1


def test_the_loop_of_the_readme_runs_and_learns(capsys):
    (code,) = blocks("README.md")
    names: dict = {}
    exec(code, names)
    # the same program in FP32 throughout ends at 0.1855
    assert 0.18 < float(capsys.readouterr().out) < 0.19
    arrays = jax.tree.leaves(names["w"], is_leaf=is_scaled_array)
    assert {x.dtype for x in arrays} == {np.dtype(np.float16)}


# The page has the same model from NNX and from Linen.
@pytest.mark.slow  # scalify_core/test_flax_models.py has such models
@pytest.mark.parametrize("number", [0, 1], ids=["nnx", "linen"])
def test_scalify_on_ones_own_model_runs_and_learns(number, capsys):
    programs = [block for block in blocks("docs/own_model.md") if "import" in block]
    code = [block for block in programs if "scalify(" in block][number]
    names: dict = {}
    with jax.numpy_rank_promotion("allow"):  # Flax's own layers promote ranks
        exec(code, names)
    loss = float(capsys.readouterr().out)
    # that of a guess among 64 tokens, which the untrained model makes
    assert loss < 0.5 * np.log(64)
    arrays = jax.tree.leaves(names["params"], is_leaf=is_scaled_array)
    assert {x.dtype for x in arrays} == {np.dtype(np.float16)}
    # those that began as zeros, too
    moved = [float(abs(x.unscale()).max()) for x in arrays]
    assert min(moved) > 1e-4
    arguments = [names[name] for name in ("params", "state", "tokens")]
    text = str(jax.make_jaxpr(names["step"])(*arguments, 0))
    assert "f8_e4m3fn" in text
    assert "f8_e5m2" in text
