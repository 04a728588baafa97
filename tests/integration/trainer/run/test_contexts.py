"""A context is a limit: weights of a run are taken into a shorter one.

Those of Hugging Face's files: unit/trainer/models/test_family.py.
"""

from pathlib import Path

import pytest

from trainer.assembly.build import build_state, build_workload
from trainer.config.composition import compose_config
from trainer.errors import UserError

GIVEN = ["model=from_init", "model.dropout=0", "init_from=A", "train.batch_tokens=64"]
GIVEN += ["compile_cache=null", "parallel.data=1", "run_dir=new"]


def first_state(context):
    """The workload and the state before step 0, in a context."""
    c = compose_config([*GIVEN, f"model.context={context}"])
    w = build_workload(c)
    return w, build_state(c, w, print)


def test_weights_are_taken_into_a_shorter_context(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("A").symlink_to(finished_run[0] / "A")
    w, state = first_state(8)
    with pytest.raises(UserError, match="learned positions for 32 tokens"):
        first_state(64)
    assert state.params["wpe"]["embedding"].shape == (8, 32)
    assert w.model.spec.context == 8
