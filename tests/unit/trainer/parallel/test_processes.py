"""How a process joins the others of its run."""

import pytest

from trainer.errors import UserError
from trainer.parallel.processes import start_processes


def test_a_number_of_processes_without_an_index_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.delenv("JAX_PROCESS_ID", raising=False)
    with pytest.raises(UserError, match="only one of JAX_NUM_PROCESSES and JAX_PROC"):
        start_processes({})
