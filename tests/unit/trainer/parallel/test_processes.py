"""How a process joins the others of its run."""

import numpy as np
import pytest
from jax.experimental import multihost_utils

from trainer.errors import UserError
from trainer.parallel.processes import compare_processes, start_processes


def test_processes_tell_values_of_the_same_crc32_apart(monkeypatch):
    hashes = []

    def gather(of_this_process):
        hashes.append(of_this_process)
        return np.stack([hashes[0], of_this_process])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    assert compare_processes({"x": 1, "word": "plumless"}) == ([], 0)
    assert compare_processes({"x": 1, "word": "buckeroo"}) == (["word"], 1)


def test_a_number_of_processes_without_an_index_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.delenv("JAX_PROCESS_ID", raising=False)
    with pytest.raises(UserError, match="only one of JAX_NUM_PROCESSES and JAX_PROC"):
        start_processes({})
