"""A context is a limit: weights of a run and of Hugging Face's files, by a preset and
by `model=from_init`, are taken into a shorter one."""

from pathlib import Path

import pytest
from command import TINY

from trainer.assembly.build import build_state, build_workload
from trainer.cli.commands import run
from trainer.config.composition import compose_config
from trainer.errors import UserError

SIZES = [key for key in TINY if key.startswith("model.") and "context" not in key]
FROM_INIT = ["model=from_init", "model.dropout=0"]
OTHER = ["compile_cache=null", "parallel.data=1", "run_dir=new"]


def first_state(given, model, context):
    """The workload and the state before step 0, in a context."""
    sizes = [f"model.context={context}", "train.batch_tokens=64", f"init_from={given}"]
    c = compose_config([*model, *sizes, *OTHER])
    w = build_workload(c)
    return w, build_state(c, w, print)


@pytest.mark.parametrize("kind", ["run", "Hugging Face"])
def test_weights_are_taken_into_a_shorter_context(
    finished_run, tmp_path, monkeypatch, kind
):
    monkeypatch.chdir(tmp_path)
    Path("A").symlink_to(finished_run[0] / "A")
    if kind == "run":
        given, model = "A", FROM_INIT
    else:
        given, model = "exported", SIZES
        assert run("export", ["run_dir=A", f"out={given}"]) == 0
    w, state = first_state(given, model, 8)
    with pytest.raises(UserError, match="learned positions for 32 tokens"):
        first_state(given, model, 64)
    assert state.params["wpe"]["embedding"].shape == (8, 32)
    assert w.model.spec.context == 8
