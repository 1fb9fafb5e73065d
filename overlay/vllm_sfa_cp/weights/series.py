"""Which layer's full weights are fetched when, and into which window: arithmetic only, no communication.

A series is one linear of every layer [start, start + L) of a pipeline stage. A forward uses the layers in
order; `ahead` = k layers are under way while one is used, so k + 1 windows hold full weights.

Layer i always uses window (i - start) % (k + 1): a captured graph may bake the address in, and no aborted
step can shift it. With fixed windows the formula "at layer i fetch next_layer(i)" cannot be right at the end
of a forward unless k + 1 divides L: the window of the next forward's layer p is then still held by one of
the last layers. That fetch is put off until right after the holder's use. The holder is used at the same
point of its layer as p will be of its own, so at least a whole layer of compute still lies in between.

Every forward therefore issues the same fetches in the same places and leaves the first k layers fetched for
the next one. Only when there is nothing to take over (first forward, aborted forward, changed weights) does a
prologue fetch them. If the windows hold the whole series (k + 1 >= L) the prologue fetches all of it once.
Nothing here depends on the rank: all ranks of a group issue the same collectives in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Action(Enum):
    FETCH = "fetch"
    WAIT = "wait"
    RELEASE = "release"


class Event(NamedTuple):
    action: Action
    layer: int
    window: int


class WindowError(RuntimeError):
    """A fetch or use out of order, which would compute with another layer's weights."""


@dataclass(frozen=True)
class Schedule:
    """Fetches of one series.

    start:      index of the stage's first layer.
    num_layers: L >= 1. The MTP layer is not counted: it is in no series.
    ahead:      k >= 0, layers fetched ahead; 0 fetches a layer right at its use.
    carry:      whether a forward fetches the first layers of the next one. Without it every forward is
                self-contained and pays for its first fetch.

    ValueError: a value out of range. IndexError: a layer that is not in the series.
    """

    start: int
    num_layers: int
    ahead: int
    carry: bool = True

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_layers < 1 or self.ahead < 0:
            raise ValueError(f"no series: start {self.start}, {self.num_layers} layers, {self.ahead} ahead")

    @property
    def layers(self) -> range:
        return range(self.start, self.start + self.num_layers)

    @property
    def num_windows(self) -> int:
        return min(self.ahead + 1, self.num_layers)

    @property
    def resident(self) -> bool:
        """Whether every layer has a window to itself, so that what was fetched stays valid."""
        return self.carry and self.num_windows == self.num_layers

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            raise IndexError(f"layer {layer} is not in the series [{self.start}, {self.layers.stop})")
        return layer - self.start

    def window(self, layer: int) -> int:
        return self._index(layer) % self.num_windows

    def owner(self, layer: int, size: int) -> int:
        """Group rank, of `size`, that keeps the full weight when it is broadcast."""
        return self._index(layer) % size

    def owned(self, rank: int, size: int) -> range:
        """Layers whose owner is `rank`; at most ceil(L / size)."""
        return self.layers[rank::size]

    def next_layer(self, layer: int) -> int:
        """The layer that comes `ahead` later inside the stage, cyclically."""
        return (self._index(layer) + self.ahead) % self.num_layers + self.start

    @cached_property
    def prologue(self) -> tuple[int, ...]:
        """Layers that a forward expects to be fetched when it begins."""
        return tuple(self.layers) if self.resident else tuple(self.layers[: self.ahead])

    @cached_property
    def _wrap(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Wrap-around fetches, by the layer before whose wait or after whose release they go."""
        before: dict[int, tuple[int, ...]] = {}
        after: dict[int, tuple[int, ...]] = {}
        if self.carry and not self.resident:
            for p in range(self.ahead):
                at = self.num_layers + p - self.ahead
                holder = self.num_layers - 1 - (self.num_layers - 1 - p) % self.num_windows
                place, index = (before, at) if holder < at else (after, holder)
                layer = index + self.start
                place[layer] = (*place.get(layer, ()), p + self.start)
        return before, after

    def before(self, layer: int) -> tuple[int, ...]:
        """Layers to fetch before waiting for `layer`."""
        index = self._index(layer) + self.ahead
        if index < self.num_layers and not self.resident:
            return (self.start + index,)
        return self._wrap[0].get(layer, ())

    def after(self, layer: int) -> tuple[int, ...]:
        """Layers to fetch right after `layer` was used."""
        self._index(layer)
        return self._wrap[1].get(layer, ())

    def events(self) -> Iterator[Event]:
        """One forward, prologue excluded, in order."""
        for layer in self.layers:
            for other in self.before(layer):
                yield Event(Action.FETCH, other, self.window(other))
            yield Event(Action.WAIT, layer, self.window(layer))
            yield Event(Action.RELEASE, layer, self.window(layer))
            for other in self.after(layer):
                yield Event(Action.FETCH, other, self.window(other))


class _Content(Enum):
    FETCHING = "being fetched"
    READY = "waiting for its use"
    USED = "used"


class WindowState:
    """What the windows of one series hold; drives a source through its schedule, refuses what it forbids.

    Per layer: fetch what `enter` returns; await the layer's own fetch if `wait` says so; use it; fetch
    what `leave` returns. A forward that stopped midway shows as `aborted`; the caller then calls `reset`.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._windows: list[tuple[int, _Content] | None] = [None] * schedule.num_windows
        self._expected = schedule.start  # the layer that must enter next
        self._inside = False

    @property
    def aborted(self) -> bool:
        """Whether a forward has begun and not ended. Meaningful between forwards."""
        return self._inside or self._expected != self.schedule.start

    def prime(self) -> tuple[int, ...]:
        """Layers to fetch before a forward; empty if the last forward left them. `enter` includes them, so
        calling this is only worth while where it can be earlier."""
        if self.aborted:
            raise WindowError(f"the last forward stopped before layer {self._expected} was done; reset first")
        missing = [layer for layer in self.schedule.prologue if not self._holds(layer)]
        return tuple(map(self._fetch, missing))

    def enter(self, layer: int) -> tuple[int, ...]:
        """Layers to fetch now, in this order, before `layer` is used."""
        if self._inside or layer != self._expected:
            raise WindowError(f"layer {layer} entered when layer {self._expected} was to be done")
        first = self.prime() if layer == self.schedule.start else ()
        self._inside = True
        return first + tuple(map(self._fetch, self.schedule.before(layer)))

    def wait(self, layer: int) -> bool:
        """Whether the layer's fetch is still to be awaited; afterwards its window is ready for use."""
        if not self._holds(layer):
            raise WindowError(f"layer {layer} is used but was not fetched")
        window = self.schedule.window(layer)
        pending = self._windows[window] == (layer, _Content.FETCHING)
        self._windows[window] = (layer, _Content.READY)
        return pending

    def leave(self, layer: int) -> tuple[int, ...]:
        """Layers to fetch now that `layer` was used."""
        window = self.schedule.window(layer)
        if not self._inside or layer != self._expected or self._windows[window] != (layer, _Content.READY):
            raise WindowError(f"layer {layer} left before it was used")
        if not self.schedule.resident:
            self._windows[window] = (layer, _Content.USED)
        last = layer == self.schedule.layers[-1]
        self._expected = self.schedule.start if last else layer + 1
        self._inside = False
        return tuple(map(self._fetch, self.schedule.after(layer)))

    def reset(self) -> tuple[int, ...]:
        """Forget every window: after an aborted forward, and before weights change (reload, sleep).

        Returns the layers whose fetch is under way: the caller awaits them before it fetches anything else,
        or a late arrival would overwrite newer weights."""
        pending = tuple(held[0] for held in self._windows if held and held[1] is _Content.FETCHING)
        self._windows = [None] * self.schedule.num_windows
        self._expected = self.schedule.start
        self._inside = False
        return pending

    def _holds(self, layer: int) -> bool:
        held = self._windows[self.schedule.window(layer)]
        return held is not None and held[0] == layer and held[1] is not _Content.USED

    def _fetch(self, layer: int) -> int:
        window = self.schedule.window(layer)
        held = self._windows[window]
        if held is not None and held[1] is not _Content.USED:
            raise WindowError(
                f"layer {layer} would overwrite layer {held[0]} in window {window}, which is {held[1].value}"
            )
        self._windows[window] = (layer, _Content.FETCHING)
        return layer
