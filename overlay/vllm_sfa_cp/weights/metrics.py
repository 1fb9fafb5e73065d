"""Counters of shared weights, written by ranks and read by whoever serves `/metrics`.

Ranks are processes of their own. Each keeps its counters in a small memory-mapped file; the API server's
collector reads the files when it is scraped. Nothing is sent and nothing blocks.
"""

import atexit
import functools
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ENV_DIR = "VLLM_SFA_CP_METRICS_DIR"
FIELDS = ("wait_seconds", "bytes", "fetches", "windows")
_RECORD = struct.Struct("<4d")


class Counters:
    """Totals of one series on one rank: seconds waited for fetches, bytes fetched, fetches, windows."""

    def __init__(self, series: str, label: str = "") -> None:
        self.series = series
        self.values = dict.fromkeys(FIELDS, 0.0)
        self._map: mmap.mmap | None = None
        folder = os.environ.get(ENV_DIR)
        if folder and os.path.isdir(folder):
            head = json.dumps({"series": series, "rank": label}).encode().ljust(256)
            fd, _ = tempfile.mkstemp(
                ".bin", f"{label}-{series}-", folder
            )  # a model of its own, a file of its own
            with open(fd, "r+b") as file:
                file.write(head + _RECORD.pack(*self.values.values()))
                file.flush()
                self._map = mmap.mmap(file.fileno(), 0)
        _LIVE.add(self)

    def add(self, field: str, amount: float) -> None:
        """Increase one counter."""
        self.values[field] += amount
        if self._map is not None:
            _RECORD.pack_into(self._map, 256, *self.values.values())


# Only for `snapshot`: which counters this process has. Each lives as long as its engine's series.
_LIVE: "weakref.WeakSet[Counters]" = weakref.WeakSet()


def snapshot() -> dict[str, float]:
    """Totals of this process over its series: wait_seconds, bytes, fetches, windows."""
    return {field: math.fsum(c.values[field] for c in _LIVE) for field in FIELDS}


def make_dir() -> str:
    """Create the folder for this engine's counters and announce it to child processes. Idempotent."""
    folder = os.environ.get(ENV_DIR)
    if not folder or not os.path.isdir(folder):
        folder = tempfile.mkdtemp(prefix="vllm-sfa-cp-")
        os.environ[ENV_DIR] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def read_all(folder: str) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(series, rank, counters) of every file; a file being created is left for the next scrape."""
    for path in sorted(Path(folder).glob("*.bin")):
        data = path.read_bytes()
        if len(data) == 256 + _RECORD.size:
            head = json.loads(data[:256])
            yield head["series"], head["rank"], dict(zip(FIELDS, _RECORD.unpack_from(data, 256)))


_HELP = {
    "wait_seconds": "Seconds the rank waited for full weights that were not there yet.",
    "bytes": "Bytes of weights fetched from other ranks.",
    "fetches": "Fetches of a layer's full weight.",
    "windows": "Windows that hold fetched full weights.",
}


class Collector:
    """prometheus_client custom collector: vllm_sfa_cp_weight_{wait_seconds,bytes,fetches}_total and
    vllm_sfa_cp_weight_windows, labelled by series and rank."""

    def collect(self) -> Iterator[object]:
        """Metric families, read from the files of this engine's ranks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        folder = os.environ.get(ENV_DIR)
        # Several models of one rank are one time series: its labels may occur only once.
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for series, rank, values in read_all(folder) if folder and os.path.isdir(folder) else ():
            totals = rows.setdefault((series, rank), dict.fromkeys(FIELDS, 0.0))
            for field in FIELDS:
                totals[field] += values[field]
        for field in FIELDS:
            family = GaugeMetricFamily if field == "windows" else CounterMetricFamily
            metric = family(f"vllm_sfa_cp_weight_{field}", _HELP[field], labels=["series", "rank"])
            for labels, totals in rows.items():
                metric.add_metric(list(labels), totals[field])
            yield metric


def with_weight_counters(original: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap `get_prometheus_registry`: whatever registry vLLM serves also has our collector, once."""

    @functools.wraps(original)
    def get_prometheus_registry() -> Any:
        registry = original()
        if not getattr(registry, _REGISTERED, False):
            registry.register(Collector())
            setattr(registry, _REGISTERED, True)
        return registry

    return get_prometheus_registry


_REGISTERED = "_sfa_cp_weight_counters"
