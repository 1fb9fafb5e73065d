"""What a rank's device achieves: rates by part of the layer, links, overheads; `planner` makes seconds of it.

Written by `vllm-sfa-cp bench calibrate`, or by hand, as a JSON object with the fields of `DeviceProfile`. No torch.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import UserError

# Work that a TP rank repeats for every token: projections that vLLM replicates, and the whole indexer.
REPEATED = ("qkv_a", "indexer_proj", "indexer_scores")
ATTENTION_SIDE = (*REPEATED, "q_b", "w_uk", "w_uv", "attention", "o")
PARTS = (*ATTENTION_SIDE, "dense_mlp", "router", "experts", "lm_head")

Rate = float | Mapping[str, float]  # a number, or a table
_RATES = "a rate is a positive number of FLOP/s, or a table {tokens: FLOP/s}"
_RANKED = ("shard_flops", "whole_flops")


@dataclass(frozen=True)
class DeviceProfile:
    """Achieved rates of one rank's device. Speed-ups depend on their ratios only.

    flops:            FLOP/s by part of the layer (`PARTS`); "default" serves the others. A table {tokens: FLOP/s}
                      instead of a number: the rate depends on a step's tokens (of "indexer_scores" and "attention":
                      on the keys that its last token sees). A power law between two entries, constant beyond.
    shard_flops:      the same where heads or columns are divided over so many ranks (a key such as "8"): narrow
                      slices reach other rates. What it does not name has the rate of `flops`.
    whole_flops:      the same for what each of so many ranks computes undivided: ranks that share cores and
                      caches slow each other down.
    memory_bandwidth: byte/s at which weights are read; bounds steps of few tokens.
    link_bandwidth:   byte/s a rank receives in a collective; a number, or a table by number of ranks.
    latency:          seconds per collective besides; likewise.
    reduce_scatter:   bytes that a reduce-scatter moves, of those of a ring; 2 where it is an all-reduce of which
                      each rank keeps a slice, as over gloo.
    overlap:          share of a prefetch that runs beside computing; 0 where a rank's own cores move the bytes.
    step_overhead:    seconds per engine step outside the layers. layer_overhead: seconds per layer and step.
    memory:           bytes a rank may use, None if unknown.
    """

    name: str
    flops: Mapping[str, Rate]
    memory_bandwidth: float
    link_bandwidth: Rate
    latency: Rate
    step_overhead: float = 0.0
    layer_overhead: float = 0.0
    reduce_scatter: float = 1.0
    overlap: float = 1.0
    memory: float | None = None
    shard_flops: Mapping[str, Mapping[str, Rate]] = field(default_factory=dict)
    whole_flops: Mapping[str, Mapping[str, Rate]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, given: Any, source: str) -> "DeviceProfile":
        """Validate a JSON object with this class's fields. UserError names the field that is wrong."""
        known = [f.name for f in fields(cls)]
        hint = f"fields: {', '.join(known)}; flops maps parts or 'default' to FLOP/s"
        if not isinstance(given, dict):
            raise UserError(f"{source} is not a JSON object", hint, 2)
        if unknown := sorted(set(given) - set(known)):
            raise UserError(f"{source} has unknown fields: {', '.join(unknown)}", hint, 2)
        for key in ("name", "flops", "memory_bandwidth", "link_bandwidth", "latency"):
            if key not in given:
                raise UserError(f"{source} lacks {key!r}", hint, 2)
        _check_rates(given["flops"], f"{source}: flops", hint)
        if "default" not in given["flops"]:
            raise UserError(f"{source}: flops lacks 'default'", hint, 2)
        for key in _RANKED:
            ranked = given.get(key, {})
            if not isinstance(ranked, dict) or not all(map(str.isdecimal, ranked)):
                raise UserError(f"{source}: {key} must map numbers of ranks to rates", hint, 2)
            for count, rates in ranked.items():
                _check_rates(rates, f"{source}: {key} of {count} ranks", hint)
        for key in set(given) - {"name", "flops", *_RANKED}:
            value = given[key]
            if key in ("link_bandwidth", "latency") and isinstance(value, dict):
                _check_table(value, f"{source}: {key}", "a number, or a table {ranks: number}")
                continue
            nothing = value is None if key == "memory" else value == 0 and not key.endswith("bandwidth")
            if not (_positive(value) or nothing):
                raise UserError(f"{source}: {key} must be a positive number, not {value!r}", hint, 2)
        if given.get("overlap", 0) > 1:
            raise UserError(f"{source}: overlap is a share, not {given['overlap']!r}", "give 0 to 1", 2)
        return cls(**given)

    def rate(self, part: str, tokens: int = 1, ranks: int = 1, shard: bool = False) -> float:
        """FLOP/s of a part in a step of `tokens` tokens: whole, or (`shard`) divided, on each of `ranks` ranks."""
        ranked = (self.shard_flops if shard else self.whole_flops).get(str(ranks), {})
        found = ranked.get(part, self.flops.get(part, self.flops["default"]))
        return _at(found, tokens)

    def collective_s(self, amount: float, count: int, ranks: int) -> float:
        """Seconds of `count` collectives of `ranks` ranks in which each receives `amount` bytes altogether."""
        return amount / _at(self.link_bandwidth, ranks) + count * _at(self.latency, ranks)


def _at(rate: Rate, where: int) -> float:
    """A number itself, or the table's value, a power law between its entries."""
    if not isinstance(rate, Mapping):
        return rate
    known = sorted((int(key), value) for key, value in rate.items())
    place = bisect_left([key for key, _ in known], where)
    if place in (0, len(known)):
        return known[min(place, len(known) - 1)][1]
    (low, slow), (high, fast) = known[place - 1], known[place]
    share = math.log(where / low) / math.log(high / low)
    return slow ** (1 - share) * fast**share


def _check_rates(rates: Any, place: str, hint: str) -> None:
    if not isinstance(rates, dict):
        raise UserError(f"{place} must map 'default' and parts to positive FLOP/s", hint, 2)
    if unknown := sorted(set(rates) - {"default", *PARTS}):
        raise UserError(f"{place} has unknown parts: {', '.join(unknown)}", ", ".join(PARTS), 2)
    for part, rate in rates.items():
        _check_table(rate if isinstance(rate, dict) else {"1": rate}, f"{place}: {part}", _RATES)


def _check_table(table: dict[str, Any], place: str, hint: str) -> None:
    if not table:
        raise UserError(f"{place} is an empty table", hint, 2)
    for key, value in table.items():
        if not key.isdecimal() or not int(key) or not _positive(value):
            raise UserError(f"{place} must be positive, not {value!r} at {key!r}", hint, 2)


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


NOMINAL = DeviceProfile("nominal accelerator", {"default": 1e14}, 1e12, 1e11, 2e-5)
# A rank that has one core to itself and talks to its neighbours over gloo on the same machine.
CPU_CORE = DeviceProfile("one CPU core", {"default": 4e10}, 1e10, 2e9, 1e-4, reduce_scatter=2.0, overlap=0.0)
