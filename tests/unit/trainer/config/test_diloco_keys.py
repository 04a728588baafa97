"""Keys of DiLoCo: null without replicas, all there with them."""

import pytest
from configurations import configured

from trainer.assembly.build import build_diloco, build_workload
from trainer.config import schema
from trainer.config.composition import compose_config
from trainer.config.fields import from_saved, to_tree
from trainer.errors import UserError


def test_without_replicas_there_is_none_of_it_and_an_older_run_had_none():
    c = compose_config([])
    assert build_diloco(c) is None
    tree = to_tree(c)
    assert set(tree.pop("diloco").values()) == {None}
    assert build_diloco(from_saved(schema.Config, tree)) is None


def test_the_preset_has_values_for_all_and_fp32_needs_no_feedback():
    diloco = build_diloco(compose_config(["parallel=diloco"]))
    actual = diloco.num_replicas, diloco.participants, diloco.sync_every, diloco.format
    assert actual == (4, 4, 32, "fp8")
    assert diloco.feedback
    in_fp32 = compose_config(["parallel=diloco", "diloco.outer_grad=fp32"])
    assert not build_diloco(in_fp32).feedback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["diloco.sync_every=8"],
            "diloco.sync_every=8 has no effect without diloco.replicas; add parallel=d",
        ),
        (
            ["diloco.replicas=4"],
            "but null: diloco.sync_every, diloco.outer_grad, .*; add parallel=diloco",
        ),
        (
            ["parallel=diloco", "diloco.sync_every=4", "diloco.fragments=5"],
            "is more than .*sync_every=4",
        ),
        (
            ["parallel=diloco", "diloco.participants=5"],
            "participants=5 exceeds diloco.replicas=4; valid: 1..4",
        ),
        (
            ["parallel=diloco", "diloco.replicas=2", "diloco.quorum=3"],
            r"diloco.quorum=3 exceeds diloco.replicas=2; valid: quorum 1\.\.2",
        ),
        (
            ["parallel=diloco", "diloco.participants=2", "diloco.fragments=2"],
            "needs diloco.fragments=1, this is 2",
        ),
        (
            ["parallel=diloco", "diloco.replicas=3"],
            "cannot be split over diloco.replicas=3 replicas; choose",
        ),
        (
            ["parallel=diloco", "diloco.data=sources"],
            "gives each of diloco.replicas=4 replicas its own",
        ),
        (
            [
                *("parallel=diloco", "diloco.replicas=2", "diloco.data=sources"),
                *("data=mix", "data.sources=[a,b]", "data.weights=[0.9,0.1]"),
            ],
            r"uses all sources equally; leave out data.weights and data.st",
        ),
        (
            ["parallel=diloco", "train.phases=[{until:9},{}]"],
            "train.phases is not supported with diloco.replicas=4",
        ),
        (
            ["parallel=diloco", "resume.convert=true"],
            "resume.convert=true is not supported with diloco.replicas=4",
        ),
    ],
)
def test_settings_of_replicas_that_cannot_be_are_refused_in_a_line(arguments, message):
    with pytest.raises(UserError, match=message) as refusal:
        configured(*arguments)
    assert "\n" not in str(refusal.value)


def test_a_fragment_without_a_parameter_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"n_layer": 1, "d_model": 32, "n_head": 2, "context": 32}
    model = [f"model.{key}={size}" for key, size in sizes.items()]
    c = compose_config(["parallel=diloco", "diloco.fragments=17", *model])
    message = r"fragments=17: there are 16 arrays of parameters.*valid: 1\.\.16"
    with pytest.raises(UserError, match=message):
        build_workload(c)
