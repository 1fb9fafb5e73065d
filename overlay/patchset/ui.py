"""Talking to people: stderr only, readable without colour, progress where there is a terminal for it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Tick(Protocol):
    """Reports progress: `amount` done since the last call, and what it is about."""

    def __call__(self, amount: float, note: str = "") -> None: ...


def say(text: str) -> None:
    """One line for people."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: float | None, unit: str = "") -> Iterator[Tick]:
    """A progress bar (a spinner where `total` is None). Without a terminal or without rich: plain lines."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        with _plain(title, total, unit) as tick:
            yield tick
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        with _plain(title, total, unit) as tick:
            yield tick
        return
    middle = [BarColumn(), TextColumn("{task.percentage:>3.0f}%")] if total else [SpinnerColumn()]
    columns = [
        TextColumn("{task.description}"),
        *middle,
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    ]
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task(title, total=total, note="")

        def tick(amount: float, note: str = "") -> None:
            bar.update(task, advance=amount, note=note[:60])

        yield tick
        if total:
            bar.update(task, completed=total, note="")


@contextmanager
def _plain(title: str, total: float | None, unit: str) -> Iterator[Tick]:
    say(f"{title} ...")
    done, shown = 0.0, 0

    def tick(amount: float, note: str = "") -> None:
        nonlocal done, shown
        done += amount
        if total and (quarter := int(4 * done / total)) > shown:
            shown = min(quarter, 4)
            say(f"{title}: {min(100, 25 * quarter)}%{f' of {total:.0f} {unit}' if unit else ''}")

    yield tick
