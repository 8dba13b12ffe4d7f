"""Progress and tables in a terminal: with rich where it is installed, else as plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

Report = Callable[[float, str], None]
"""Called with how much is done, between 0 and 1, and what is being done."""

_EVERY = 10.0  # seconds between plain lines


@contextlib.contextmanager
def progress(title: str) -> Iterator[Report]:
    """Show how far something is on stderr while the context lasts.

    with progress("calibrating") as report:
        report(0.5, "half of it")
    """
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        yield _plain(title)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(title)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda fraction, message: bar.update(task, completed=fraction, description=f"{title}: {message}")


def _plain(title: str) -> Report:
    shown = [-_EVERY]

    def report(fraction: float, message: str) -> None:
        now = time.monotonic()
        if now - shown[0] >= _EVERY:
            shown[0] = now
            print(f"{title} {fraction:4.0%}  {message}", file=sys.stderr, flush=True)

    return report


def note(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        print(title)
        for cells in (columns, *rows):
            first, *others = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            print("  ".join([first, *others]).rstrip())
        return
    shown = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    console = Console(markup=False)  # names may hold brackets
    if not console.is_terminal:  # a file or a pipe has no width: nothing may be folded there
        console = Console(markup=False, width=200)
    console.print(shown)
