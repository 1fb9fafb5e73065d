"""Progress of a long measurement on stderr: a bar where rich and a terminal are there, else a line per run."""

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Counts work, not runs, so that the remaining time is a fair guess when runs differ in length.

    with Progress(total_work) as progress:
        progress.begin("what runs now")
        progress.done(work, "how it went")
    """

    def __init__(self, total: float) -> None:
        self.total, self.finished = max(total, 1e-9), 0.0
        self._spent = 0.0  # seconds inside runs: starting engines says nothing about the remaining runs
        self._since = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as RichProgress
            except ModuleNotFoundError:
                return self
            columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def begin(self, text: str) -> None:
        """A run begins."""
        self._since = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description=f"{text}{self._left()}")

    def done(self, work: float, text: str) -> None:
        """The run is over and was `work` of the total."""
        self.finished += work
        self._spent += time.monotonic() - self._since
        if self._bar is not None:
            self._bar.update(self._task, completed=self.finished)
        else:
            self.say(f"[{min(1.0, self.finished / self.total):4.0%}] {text}{self._left()}")

    def _left(self) -> str:
        if not self.finished:
            return ""
        seconds = self._spent * max(0.0, self.total / self.finished - 1)
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"
