"""How far the preparation of a corpus is, for whoever waits for it.

Whatever takes long calls a `Progress` with (done bytes, total bytes, what it is doing); `rich_progress` shows
it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

type Progress = Callable[[int, int, str], None]
"""Called with (done_bytes, total_bytes, what); each stage, named by `what`, counts from 0 to its total."""

READING, SCANNING, TRAINING, TOKENIZING = (
    "reading the corpus",
    "finding documents",
    "training the tokenizer",
    "tokenizing",
)


PATIENCE_SECONDS = 3.0


def silent(done_bytes: int, total_bytes: int, what: str) -> None:
    """A `Progress` that shows nothing."""


@contextmanager
def rich_progress() -> Iterator[Progress]:
    """Show progress on standard error: bars on a terminal, one plain line in a log.

    A corpus that is already prepared is only read, so it leaves no line in a log and no bar on a terminal.

    Returns:
        A context manager that gives the `Progress` to hand to `store.prepare`.
    """
    from rich.console import Console  # a tenth of a second to import: not for those who only train
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _one_line()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        tasks = {}

        def show(done_bytes: int, total_bytes: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done_bytes, total=total_bytes)

        yield show


def _one_line() -> Progress:
    """One line once it has taken a while: what is quick, or refused at once, is not worth one."""
    started, announced = time.monotonic(), False

    def announce(done_bytes: int, total_bytes: int, what: str) -> None:
        nonlocal announced
        if what != READING and not announced and time.monotonic() - started > PATIENCE_SECONDS:
            announced = True
            print(f"preparing the corpus, once: {what}", file=sys.stderr)

    return announce
