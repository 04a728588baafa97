"""Heat maps are drawn before a checkpoint is saved, and never prevent it; a stop
request interrupts samples."""

from types import SimpleNamespace

import pytest

from trainer.observe.records import FIGURE_NAMES, encode_row
from trainer.run.builtin_callbacks import pictures, samples
from trainer.run.callbacks import Interrupted, StepContext


def numerics(layer):
    names = [f"numerics/weights/{layer}/{figure}" for figure in FIGURE_NAMES]
    return encode_row(1, dict.fromkeys(names, 1.0))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (numerics("h.0"), None),
        (b"{not json}\n", "metrics.jsonl:1 is not a row of metrics"),
        (numerics("\ud800"), None),
    ],
)
def test_a_log_that_cannot_be_drawn_is_a_warning(tmp_path, caplog, line, reason):
    (tmp_path / "metrics.jsonl").write_bytes(line)
    drawn = {}
    context = SimpleNamespace(run_dir=tmp_path, step=7, picture=drawn.__setitem__)
    pictures(10, lambda kind, layer: "fp16").run(context)
    assert list(drawn) == ([] if reason else ["numerics/weights/picture"])
    assert ("no heat maps after step 7: " in caplog.text) == bool(reason)
    assert (reason or "") in caplog.text


def test_a_stop_request_interrupts_samples():
    def sample(params, before_window):
        before_window()
        return "never"

    state = SimpleNamespace(params=None)
    stop = lambda doing: doing == "sampling after step 3"
    context = StepContext(3, False, state, None, None, {}, None, stop, None, None)
    with pytest.raises(Interrupted):
        samples(1, sample).run(context)
    assert context.texts == []
