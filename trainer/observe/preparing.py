"""Progress of a data preparation: a live line, or plain lines without a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from trainer.data.preparation import Progress
from trainer.observe.display import PLAIN_SECONDS, Output
from trainer.text import plural


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a callback for `prepare(progress=...)`, which shows the progress.

    Data that is prepared already shows nothing.
    """
    # On standard error, so that standard output has results alone; unfolded, as in
    # `Display`.
    console = Output(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield lambda progress: live.update(Text(line(progress)))
        return
    # A preparation that is over in seconds prints nothing.
    due = time.monotonic() + PLAIN_SECONDS

    def show(progress: Progress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + PLAIN_SECONDS
            console.print(line(progress))

    yield show


def line(progress: Progress) -> str:
    """Format progress: the share if it is known, counts, and rate."""
    share = "" if progress.fraction is None else f"{progress.fraction:.0%}, "
    # The first report may come within the resolution of the clock.
    rate = progress.new_tokens / max(progress.seconds, 1e-9)
    return (
        f"preparing data, so far: {share}{plural(progress.documents, 'document')},"
        f" {progress.tokens:,} tokens, {progress.bytes / 1e6:,.1f} MB,"
        f" {rate / 1e6:.2f}M tokens/s"
    )
