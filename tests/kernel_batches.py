"""Hypothesis batches for kernel tests: paged caches in which everything that no row may read is NaN."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from vllm_sfa_cp.ops.interface import Segments

D, R, DI = 24, 8, 16
torch.set_num_threads(1)  # launches are tiny: more threads would only wait for each other


@dataclass
class Batch:
    """One launch over a cache of which everything that no row may read is NaN."""

    segments: Segments
    visible: list[torch.Tensor]  # per row, the rows of the flat cache that it sees, in context order
    k_cache: torch.Tensor
    kv_cache: torch.Tensor
    q: torch.Tensor
    weights: torch.Tensor
    q_latent: torch.Tensor
    q_pe: torch.Tensor
    topk: int

    @property
    def rows(self) -> int:
        return self.q.shape[0]


def slots_of(table: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    position = torch.arange(length)
    return table.long()[position // block_size] * block_size + position % block_size


@st.composite
def batches(
    draw: st.DrawFn,
    ties: bool = False,
    heads: tuple[int, ...] = (1, 2, 3, 8, 16),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> Batch:
    block_size = draw(st.sampled_from([1, 3, 16, 64]))
    index_heads = draw(st.sampled_from(heads))
    topk = draw(st.sampled_from([1, 2, 7, 64]))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    requests = draw(
        st.lists(
            st.lists(  # the request's segments: rows, and keys between them and the segment before
                st.tuples(st.sampled_from([0, 1, 1, 2, 5, 40]), st.sampled_from([0, 0, 1, 9, 70, 300])),
                min_size=1,
                max_size=3,
            ),
            min_size=1,
            max_size=4,
        )
    )
    counts, lengths, owner = [], [], []
    for request, parts in enumerate(requests):
        position = 0
        for count, gap in parts:
            position += gap + count
            counts.append(count)
            lengths.append(position if count else 0)
            owner.append(request)
    padding = draw(st.integers(0, 3))
    rows = sum(counts) + padding
    if rows == 0:
        rows = 1
    width = max(1, -(-max(lengths) // block_size))
    total = len(requests) * width
    physical = torch.randperm(total + 2, generator=generator)[:total].view(len(requests), width).int()
    table = physical[owner]
    caches = []
    for features in (DI, D + R):
        cache = torch.full((total + 2, block_size, features), math.nan, dtype=dtype)
        for request in range(len(requests)):
            longest = max(length for length, o in zip(lengths, owner) if o == request)
            keys = torch.randn(longest, features, generator=generator)
            if ties and features == DI:
                keys = keys.sign() * (torch.arange(longest) % 3 == 0)[:, None]  # few distinct scores, many 0
            cache.flatten(0, 1)[slots_of(physical[request], longest, block_size)] = keys.to(dtype)
        caches.append(cache)
    visible = []
    for segment, (count, length) in enumerate(zip(counts, lengths)):
        slots = slots_of(table[segment], length, block_size)
        visible += [slots[: length - (count - 1 - j)] for j in range(count)]
    visible += [torch.empty(0, dtype=torch.long)] * (rows - len(visible))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q = randn(rows, index_heads, DI)
    weights = randn(rows, index_heads)
    if ties:
        q, weights = q.sign(), weights.sign()
    segments = Segments(
        torch.tensor(counts).cumsum(0).int(),
        torch.tensor(lengths).int(),
        table,
        max(lengths) + draw(st.sampled_from([0, 5])),
    )
    return Batch(segments, visible, *caches, q, weights, randn(rows, 4, D), randn(rows, 4, R), topk)
