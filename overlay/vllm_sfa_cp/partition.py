"""Who owns which token of a step: pure functions of the batch, no vLLM import.

A step's T tokens (all requests concatenated, request i at flat range [s_i, s_i + q_i), total length
L_i = context + q_i) are padded to T_pad = round_up(max(T, num_input_tokens), n), and each of the n ranks
owns `rows` = T_pad / n of them. The ranks' rows in rank order are the *gathered* buffer, which is what an
all-gather along rows returns.

contiguous  rank r owns the flat rows [r * rows, (r + 1) * rows): the gathered order is the flat order.
balanced    Causal work grows with the position, so request i's first 2 n m_i tokens, m_i = q_i // 2n, are
            cut into 2n blocks, and rank r owns block r ("zig") and block 2n - 1 - r ("zag"): every rank has
            the same work. The residual (the last q_i - 2 n m_i tokens of every request, and all tokens of a
            request shorter than `min_balanced_tokens`) forms one stream that is split contiguously. Local
            row order: zig blocks of all requests, zag blocks of all requests, residual slice, padding.

A rank's rows are described to kernels as segments (see `ops.interface.Segments`), kind-major and
request-minor: B segments if contiguous, 3 B if balanced (some may be empty), whatever the batch holds.

Everything is whole-tensor arithmetic without device-to-host transfers. Contiguous costs O(B), nothing in T.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from vllm_sfa_cp.config import MIN_BALANCED_TOKENS

Kind = Literal["contiguous", "balanced"]
KINDS: tuple[Kind, ...] = ("contiguous", "balanced")


@dataclass(frozen=True, eq=False)
class Partition:
    """One rank's view of a step. Tensors are on the device of the batch and never written again.

    num_tokens:         T, real tokens of the step.
    rows:               rows per rank, padding included.
    block_rows:         zig rows of this rank (and as many zag rows), the same on all ranks; 0 if contiguous.
    cu_query_lens:      [S] int32, inclusive prefix sum of rows per segment.
    key_lens:           [S] int32, keys visible to the segment's last row; 0 for a segment without rows.
    request_of_segment: [S] int64, to index block tables and other per-request tensors.
    """

    kind: Kind
    num_tokens: int
    rows: int
    rank: int
    size: int
    block_rows: int
    cu_query_lens: torch.Tensor
    key_lens: torch.Tensor
    request_of_segment: torch.Tensor
    _order: torch.Tensor | None = None  # None: gathered order is flat order

    @property
    def padded(self) -> int:
        """T_pad, rows of the gathered buffer."""
        return self.rows * self.size

    @property
    def local_start(self) -> int:
        """First row of this rank in the gathered buffer (the flat stream, if `identity`)."""
        return self.rank * self.rows

    @property
    def local_end(self) -> int:
        """One past the last row of this rank in the gathered buffer."""
        return self.local_start + self.rows

    @property
    def identity(self) -> bool:
        """Whether the gathered order is the flat order up to trailing padding."""
        return self._order is None

    @property
    def num_local_tokens(self) -> int:
        """Real tokens among this rank's rows; they precede its padding."""
        blocks = 2 * self.block_rows
        stream = self.num_tokens - blocks * self.size
        share = self.rows - blocks
        return blocks + min(max(stream - self.rank * share, 0), share)

    @cached_property
    def gather_order(self) -> torch.Tensor:
        """int64 [T_pad]: flat index of each row of the gathered buffer, -1 for padding."""
        if self._order is not None:
            return self._order
        order = torch.arange(self.padded, device=self.key_lens.device)
        order[self.num_tokens :] = -1
        return order

    @cached_property
    def flat_to_gathered(self) -> torch.Tensor:
        """int64 [T]: row of each flat token in the gathered buffer."""
        device = self.key_lens.device
        if self._order is None:
            return torch.arange(self.num_tokens, device=device)
        # Padding is sent to one spare entry at the end.
        target = self._order.where(self._order >= 0, self.num_tokens)
        inverse = self._order.new_empty(self.num_tokens + 1)
        return inverse.scatter_(0, target, torch.arange(self.padded, device=device))[: self.num_tokens]

    @property
    def local_tokens(self) -> torch.Tensor:
        """int64 [rows]: flat index of each local row, -1 for padding."""
        return self.gather_order[self.local_start : self.local_end]

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Local rows of a flat tensor: [>= T, ...] -> [rows, ...]; padding rows are zero."""
        count = self.num_local_tokens
        if self._order is None:
            start = min(self.local_start, self.num_tokens)
            real = flat[start : start + count]
        else:
            real = flat[self.local_tokens[:count]]
        if count == self.rows:
            return real
        return torch.cat([real, real.new_zeros(self.rows - count, *flat.shape[1:])])

    def unshard(self, gathered: torch.Tensor) -> torch.Tensor:
        """Flat tokens of a gathered tensor: [T_pad, ...] -> [T, ...]; padding is dropped."""
        return gathered[: self.num_tokens] if self._order is None else gathered[self.flat_to_gathered]

    def gathered_slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Cache slots in gathered order: [>= T] -> [T_pad], -1 for padding, so that a cache write takes the
        gathered rows as they come and no layer has to permute them."""
        if self._order is None:
            pad = slot_mapping.new_full((self.padded - self.num_tokens,), -1)
            return torch.cat([slot_mapping[: self.num_tokens], pad])
        spare = torch.cat([slot_mapping[: self.num_tokens], slot_mapping.new_full((1,), -1)])
        return spare[self._order]  # index -1 is the spare entry


def make_partition(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_tokens: int,
    rank: int,
    size: int,
    kind: Kind = "contiguous",
    num_input_tokens: int | None = None,
    query_start_loc_cpu: torch.Tensor | None = None,
    min_balanced_tokens: int = MIN_BALANCED_TOKENS,
) -> Partition:
    """Partition a step among `size` ranks and describe the rows of `rank`.

    query_start_loc:     [B + 1] integer, exclusive prefix sum of query lengths; B may be 0.
    seq_lens:            [>= B] integer, context + query tokens of each request.
    num_tokens:          T, on the host. Tokens past query_start_loc[-1] (padded graphs) belong to no request:
                         they are distributed like the others and no segment covers them.
    num_input_tokens:    rows the runner padded the step to, if more than T.
    query_start_loc_cpu: CPU copy of query_start_loc; required for `balanced`, whose row counts it decides.

    ValueError: arguments that contradict each other.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown partition {kind!r}; valid: {', '.join(KINDS)}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of {size}")
    batch = query_start_loc.shape[0] - 1
    if batch < 0 or seq_lens.shape[0] < batch:
        raise ValueError(f"{query_start_loc.shape[0]} query starts do not match {seq_lens.shape[0]} lengths")
    rows = -(-max(num_tokens, num_input_tokens or 0) // size)

    device = query_start_loc.device
    start = query_start_loc.long()
    total = seq_lens[:batch].long()
    requests = torch.arange(batch, device=device)
    if kind == "contiguous":
        counts, keys = _stream_segments(start, total, rank * rows, rows)
        cu = counts.cumsum(0, dtype=torch.int32)
        return Partition(kind, num_tokens, rows, rank, size, 0, cu, keys.int(), requests)

    if query_start_loc_cpu is None:
        raise ValueError("a balanced partition needs query_start_loc_cpu")
    host_start = query_start_loc_cpu.numpy()
    if host_start.shape[0] != batch + 1 or int(host_start[-1]) > num_tokens:
        raise ValueError(
            f"query_start_loc_cpu does not describe {batch} requests of at most {num_tokens} tokens"
        )
    blocks = 2 * size
    # One rank has nothing to balance. Requests of fewer than 2n tokens would have empty blocks.
    shortest = max(min_balanced_tokens, blocks) if size > 1 else num_tokens + 1
    host_lens = host_start[1:] - host_start[:-1]
    block_rows = int((host_lens[host_lens >= shortest] // blocks).sum())

    order = None
    if block_rows:
        lens = start.diff()
        m = (lens // blocks).where(lens >= shortest, 0)
        # Prefix sums with a final entry: the tokens past the last request act as one more without blocks.
        stream = torch.nn.functional.pad((lens - blocks * m).cumsum(0), (1, 0))
        order = _balanced_order(start, m, stream, num_tokens, rows, size, block_rows)
        context = total - lens
        zig = (context + (rank + 1) * m).where(m > 0, 0)
        zag = (context + (blocks - rank) * m).where(m > 0, 0)
    else:  # decode and short prompts: cheap, as these steps are
        stream = start
        m = zig = zag = torch.zeros_like(total)
    share = rows - 2 * block_rows
    counts, keys = _stream_segments(stream, total, rank * share, share)
    cu = torch.cat([m, m, counts]).cumsum(0, dtype=torch.int32)
    keys = torch.cat([zig, zag, keys]).int()
    return Partition(kind, num_tokens, rows, rank, size, block_rows, cu, keys, requests.repeat(3), order)


def make_dummy_partition(
    num_tokens: int,
    *,
    rank: int,
    size: int,
    kind: Kind = "contiguous",
    device: torch.device | str = "cpu",
) -> Partition:
    """Partition of a step without requests (profile run, idle data-parallel replica): no segments."""
    none = torch.zeros(1, dtype=torch.int32, device=device)
    host = torch.zeros(1, dtype=torch.int32)
    return make_partition(
        none, none[:0], num_tokens=num_tokens, rank=rank, size=size, kind=kind, query_start_loc_cpu=host
    )


def _stream_segments(
    start: torch.Tensor, total: torch.Tensor, low: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and visible keys [B] of the requests' parts inside the window [low, low + rows) of a stream, in
    which request i occupies [start[i], start[i + 1]) and ends at its total length."""
    end = start[1:]
    last = end.clamp(max=low + rows)
    counts = (last - start[:-1].clamp(min=low)).clamp(min=0)
    keys = (total - (end - last)).where(counts > 0, 0)
    return counts, keys


def _balanced_order(
    start: torch.Tensor,
    m: torch.Tensor,
    res_start: torch.Tensor,
    num_tokens: int,
    rows: int,
    size: int,
    block_rows: int,
) -> torch.Tensor:
    """int64 [T_pad]: flat index of each gathered row, -1 for padding. Sizes are host-side: nothing waits."""
    device = start.device
    # Row w of request i's block b has flat index start[i] + b * m[i] + w; `first` is block 0 of all requests.
    block_start = m.cumsum(0) - m
    width = m.repeat_interleave(m, output_size=block_rows)
    first = (start[:-1] - block_start).repeat_interleave(m, output_size=block_rows)
    first += torch.arange(block_rows, device=device)
    ranks = torch.arange(size, device=device).unsqueeze(1)

    stream = num_tokens - 2 * size * block_rows
    share = rows - 2 * block_rows
    # Residual row x of request i: flat index x + (end of the request's blocks) - (its start in the stream).
    shift = start - res_start + 2 * size * torch.nn.functional.pad(m, (0, 1))
    counts = torch.cat([res_start.diff(), stream - res_start[-1:]])
    residual = start.new_full((size * share,), -1)
    residual[:stream] = shift.repeat_interleave(counts, output_size=stream)
    residual[:stream] += torch.arange(stream, device=device)

    order = start.new_empty(size, rows)
    torch.add(first, width * ranks, out=order[:, :block_rows])
    torch.add(first, width * (2 * size - 1 - ranks), out=order[:, block_rows : 2 * block_rows])
    order[:, 2 * block_rows :] = residual.view(size, share)
    return order.view(-1)


def causal_work(partition: Partition) -> torch.Tensor:
    """int64 scalar: sum over the rank's real rows of the keys each one sees (the indexer's scores)."""
    counts = torch.nn.functional.pad(partition.cu_query_lens.long(), (1, 0)).diff()
    keys = partition.key_lens.long()
    return (counts * keys - counts * (counts - 1) // 2).sum()


def imbalance(partitions: Sequence[Partition]) -> float:
    """Largest causal work of a rank over the mean: 1 is perfect, n is one rank doing everything."""
    work = torch.stack([causal_work(p) for p in partitions]).double()
    return float(work.max() / work.mean()) if float(work.sum()) else 1.0
