"""Shared weights at run time: series of full weights, fetched into windows before their layer needs them.

    shared.begin()                       once per CP forward
    shared.enter(layer)                  start the fetches that belong to this layer
    y = shared.apply("o_proj", layer, attention.o_proj, x)

Owned by the model; its windows are not parameters, so no loader, LoRA or weight sync sees them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from vllm_sfa_cp.weights.link import Handle
from vllm_sfa_cp.weights.metrics import Counters
from vllm_sfa_cp.weights.series import Schedule, WindowState
from vllm_sfa_cp.weights.travel import Tensors, nbytes

if TYPE_CHECKING:
    from vllm_sfa_cp.backend import HeadWeights, SfaImpl


class Source(Protocol):
    """Where full weights come from: `broadcast.Broadcast` or `gather.Gather`."""

    def owns(self, layer: int) -> bool: ...
    def prepare(self, layer: int, own: Tensors | None, window: Tensors) -> Tensors | None: ...
    def fetch(self, layer: int, own: Tensors | None, window: Tensors) -> tuple[list[Handle], int]: ...


class Series:
    """One projection of every layer of the stage.

    own:     per layer, this rank's tensors (full, shard, or None where another rank owns the layer).
    windows: num_windows sets of full tensors.
    """

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        source: Source,
        own: dict[int, Tensors | None],
        windows: list[Tensors],
        counters: Counters,
    ) -> None:
        self.name, self.schedule, self.source = name, schedule, source
        self.own, self.windows, self.counters = own, windows, counters
        self.state = WindowState(schedule)
        self._pending: dict[int, list[Handle]] = {}
        counters.add("windows", len(windows))

    def begin(self) -> None:
        """Recover from a forward that stopped midway."""
        if self.state.aborted:
            self.invalidate()

    def invalidate(self) -> None:
        """Forget what the windows hold: weights changed, or a forward was aborted. Fetches under way are
        awaited first, or a late arrival would overwrite a newer weight."""
        for layer in self.state.reset():
            self._await(layer)

    def enter(self, layer: int) -> None:
        """Start the fetches that belong before the layer's use."""
        self._start(self.state.enter(layer))

    def wait(self, layer: int) -> int | None:
        """Index of the window that now holds the layer, None where this rank owns it."""
        if self.state.wait(layer):
            self._await(layer)
        return None if self.source.owns(layer) else self.schedule.window(layer)

    def leave(self, layer: int) -> None:
        """The layer's weight was used; start the fetches that waited for its window."""
        self._start(self.state.leave(layer))

    def resident_bytes(self) -> int:
        """Bytes of this rank's own tensors and windows, by their storages."""
        sets = [t for t in self.own.values() if t is not None] + self.windows
        return nbytes({f"{i}.{k}": t for i, s in enumerate(sets) for k, t in s.items()})

    def _start(self, layers: tuple[int, ...]) -> None:
        for layer in layers:
            window = self.windows[self.schedule.window(layer)]
            self._pending[layer], size = self.source.fetch(layer, self.own[layer], window)
            self.counters.add("fetches", 1)
            self.counters.add("bytes", size)

    def _await(self, layer: int) -> None:
        start = time.perf_counter()
        for handle in self._pending.pop(layer, ()):  # none where an earlier fetch failed to start
            handle.wait()
        self.counters.add("wait_seconds", time.perf_counter() - start)


class SharedWeights:
    """Every series of one model stage, driven together so that all ranks issue the same collectives."""

    def __init__(
        self,
        series: dict[str, Series] | None = None,
        modules: Mapping[str, Sequence[nn.Module]] | None = None,
        kv_b: list[torch.Tensor] | None = None,
    ) -> None:
        """series: by projection name; empty if every rank holds everything. modules: a linear per window that
        computes with the window's tensors. kv_b: the windows of series kv_b_proj, [H * (nope + v), D] each."""
        self.series, self.modules, self.kv_b = series or {}, modules or {}, kv_b or []

    def begin(self) -> None:
        """Call at the start of a CP forward."""
        for series in self.series.values():
            series.begin()

    def invalidate(self) -> None:
        """Call when weights changed or go away (reload, sleep)."""
        for series in self.series.values():
            series.invalidate()

    def enter(self, layer: int) -> None:
        """Call at the start of a layer, before the first use of any of its shared weights."""
        for series in self.series.values():
            series.enter(layer)

    def apply(self, name: str, layer: int, own: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The full projection of x [rows, in] -> [rows, out]; bias, if any, added once."""
        if name not in self.series:
            return own(x)[0]
        return self.use(
            name, layer, lambda window: (own if window is None else self.modules[name][window])(x)[0]
        )

    def attend(
        self, layer: int, impl: "SfaImpl", function: Callable[["HeadWeights"], torch.Tensor]
    ) -> torch.Tensor:
        """Call function(up-projections of all heads) while they are held."""
        if "kv_b_proj" not in self.series:
            return function(impl.head_weights())
        return self.use(
            "kv_b_proj",
            layer,
            lambda window: function(impl.head_weights(None if window is None else self.kv_b[window])),
        )

    def use(self, name: str, layer: int, function: Callable[[int | None], torch.Tensor]) -> torch.Tensor:
        """Call function(window index, None for this rank's own tensors) while the weight is held."""
        series = self.series[name]
        result = function(series.wait(layer))
        series.leave(layer)
        return result
