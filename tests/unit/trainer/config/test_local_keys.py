"""Keys of local steps: null without replicas, all there with them, and what cannot be is refused in a line."""

import re

import pytest

from trainer.assembly.objects import build_local, build_workload
from trainer.config import schema
from trainer.config.composition import compose_config
from trainer.config.fields import from_saved, to_tree
from trainer.errors import UserError


def test_without_replicas_there_is_none_of_it():
    c = compose_config([])
    assert build_local(c) is None
    assert all(value is None for key, value in to_tree(c)["parallel"].items() if "local" in key)


def test_a_run_that_was_saved_before_has_none_of_it():
    tree = to_tree(compose_config([]))
    tree["parallel"] = {key: value for key, value in tree["parallel"].items() if "local" not in key}
    assert build_local(from_saved(schema.Config, tree)) is None


def test_the_preset_has_values_for_all_and_fp32_needs_no_feedback():
    local = build_local(compose_config(["parallel=local"]))
    assert (local.replicas, local.steps, local.format, local.feedback) == (4, 32, "fp8", True)
    assert local.participants == 4
    assert not build_local(compose_config(["parallel=local", "parallel.local_reduce=fp32"])).feedback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.local_steps=8"], "parallel.local_steps=8 would be ignored: parallel.local, the number"),
        (["parallel.local=4"], "parallel.local_steps, parallel.local_reduce, .* is null; choose parallel=local"),
        (["parallel=local", "parallel.local_steps=4", "parallel.local_fragments=5"], "is more than .*local_steps=4"),
        (["parallel=local", "parallel.local_participants=5"], "there are parallel.local=4; choose fewer"),
        (["parallel=local", "parallel.local_participants=2", "parallel.local_fragments=2"], "choose one of them"),
        (["parallel=local", "parallel.local=3"], "cannot be split over parallel.local=3 replicas; choose"),
        (["parallel=local", "parallel.local_data=sources"], "gives each of parallel.local=4 replicas a source"),
        (
            [
                *("parallel=local", "parallel.local=2", "parallel.local_data=sources"),
                *("data=mix", "data.sources=[a,b]", "data.weights=[0.9,0.1]"),
            ],
            r"takes as much of every source, and data.weights=\[0.9, 0.1\], data.stages=\[\] ask for other shares",
        ),
        (["parallel=local", "train.phases=[{until:9},{}]"], "train.phases changes .* parallel.local=4 replicas"),
        (["parallel=local", "resume.convert=true"], "resume.convert=true changes .* parallel.local=4 replicas"),
        (["parallel=local", "parallel.local_quorum=5"], "parallel.local=4 is less than parallel.local_quorum=5"),
        (["parallel=local", "parallel.local_gbps=0"], "parallel.local_gbps=0: expected gigabits a second"),
        (["parallel=local", "parallel.local_reduce=int4"], "parallel.local_reduce"),
        (["parallel=local", "parallel.local_momentum=1"], "parallel.local_momentum"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments, message):
    with pytest.raises(UserError, match=message) as refusal:
        compose_config(arguments)
    assert not re.search(r"\n", str(refusal.value))


def test_a_fragment_without_a_parameter_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["parallel=local", "model.n_layer=1", "model.d_model=32", "model.n_head=2", "model.context=32"]
    with pytest.raises(UserError, match=r"local_fragments=17: there are 16 arrays of parameters.*valid: 1\.\.16"):
        build_workload(compose_config([*words, "parallel.local_fragments=17"]))
