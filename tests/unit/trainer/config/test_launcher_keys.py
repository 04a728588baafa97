"""Keys of launchers: null without one, and numbers of workers with which a run could not
go on are refused in a line."""

import re

import pytest

from trainer.config.combinations import with_workers
from trainer.config.composition import compose_config
from trainer.errors import UserError

RAY = ["launcher=ray", "run_dir=A"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["launcher.workers=[1,2]"],
            "launcher.workers=[1,2] has no effect without a launcher; add launcher=ray",
        ),
        ([*RAY, "launcher.workers=[4,2]"], "workers=[4,2]: expected the minimum"),
        (
            [*RAY, "launcher.workers=[2,4]"],
            "16 sequences cannot be split over each of 2, 3, 4 devices",
        ),
        (
            [*RAY, "launcher.workers=[1,2]", "parallel.tensor=2"],
            "launcher.workers allows 1 device, which is not a multiple of parallel.data"
            " x fsdp x tensor = 2",
        ),
        (
            [*RAY, "launcher.workers=[1,3]", "parallel=diloco"],
            "diloco.replicas=4 is not a multiple of launcher.workers[1]=3; nearest"
            " valid: 3",
        ),
        (
            [*RAY, "launcher.workers=[1,2]", "parallel=diloco"],
            "could continue with 2 of 4 replicas, but diloco.quorum is 4; choose"
            " launcher.workers=[2,2], or diloco.quorum=2",
        ),
        (
            [
                *RAY,
                "launcher.workers=[1,2]",
                "parallel=diloco",
                "diloco.quorum=2",
                "diloco.participants=3",
            ],
            "could continue with 2 of 4 replicas, but diloco.participants is 3; choose"
            " at most 2",
        ),
        (
            [*RAY, "launcher.workers=[3,4]", "parallel=diloco", "diloco.quorum=3"],
            "cannot be split over diloco.replicas=3 replicas",
        ),
    ],
)
def test_workers_with_which_a_run_could_not_go_on_are_refused(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        compose_config(words)


def test_each_worker_has_its_share_of_the_replicas():
    words = ["parallel=diloco", "diloco.quorum=2", "launcher.workers=[1,2]"]
    config = compose_config([*RAY, *words])
    assert with_workers(config, 2) == config
    assert with_workers(config, 1).diloco.replicas == 2
    plain = compose_config([*RAY, "launcher.workers=[1,2]", "parallel=fsdp"])
    assert with_workers(plain, 1) == plain
