"""Partition against a per-token brute force: every token once, every row's keys right, no synchronisation."""

from dataclasses import dataclass, field
from itertools import accumulate
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_sfa_cp.partition import (
    KINDS,
    Kind,
    Partition,
    causal_work,
    imbalance,
    make_dummy_partition,
    make_partition,
)


def build(
    query_lens: list[int],
    seq_lens: list[int],
    rank: int,
    size: int,
    kind: Kind,
    extra_tokens: int = 0,
    num_input_tokens: int | None = None,
    min_balanced_tokens: int = 0,
) -> Partition:
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    return make_partition(
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
        num_tokens=int(starts[-1]) + extra_tokens,
        rank=rank,
        size=size,
        kind=kind,
        num_input_tokens=num_input_tokens,
        query_start_loc_cpu=starts.clone(),
        min_balanced_tokens=min_balanced_tokens,
    )


def everyone(
    query_lens: list[int], seq_lens: list[int], size: int, kind: Kind, **more: int
) -> list[Partition]:
    return [build(query_lens, seq_lens, rank, size, kind, **more) for rank in range(size)]


@dataclass
class Brute:
    """What the definition says, one token at a time."""

    rows: int
    order: list[int]  # gathered row -> flat token or -1
    visible: list[int]  # flat token -> keys it sees, 0 without a request
    request: list[int]  # flat token -> request, -1 without one
    part: dict[int, str] = field(default_factory=dict)  # flat token -> zig, zag, res


def brute(
    query_lens: list[int],
    seq_lens: list[int],
    size: int,
    kind: Kind,
    tokens: int,
    padded_to: int,
    shortest: int,
) -> Brute:
    padded = -(-max(tokens, padded_to) // size) * size
    rows = padded // size
    visible, request, part = [], [], {}
    zig: list[list[int]] = [[] for _ in range(size)]
    zag: list[list[int]] = [[] for _ in range(size)]
    residual = []
    for i, (q, total) in enumerate(zip(query_lens, seq_lens)):
        m = q // (2 * size) if kind == "balanced" and q >= shortest and size > 1 else 0
        for o in range(q):
            t = len(visible)
            visible.append(total - q + o + 1)
            request.append(i)
            if o < 2 * size * m:
                block = o // m
                part[t] = "zig" if block < size else "zag"
                (zig[block] if block < size else zag[2 * size - 1 - block]).append(t)
            else:
                part[t] = "res"
                residual.append(t)
    while len(visible) < tokens:
        residual.append(len(visible))
        part[len(visible)] = "res"
        visible.append(0)
        request.append(-1)
    share = rows - 2 * len(zig[0])
    residual += [-1] * (size * share - len(residual))
    order = []
    for r in range(size):
        order += zig[r] + zag[r] + residual[r * share : (r + 1) * share]
    return Brute(rows, order, visible, request, part)


batches = st.lists(
    st.tuples(st.integers(0, 90) | st.just(1), st.integers(0, 200) | st.just(0)), min_size=0, max_size=9
)


@settings(max_examples=400, deadline=None)
@given(
    batch=batches,
    size=st.integers(1, 16),
    kind=st.sampled_from(KINDS),
    extra=st.sampled_from([0, 0, 3]),
    pad_by=st.sampled_from([0, 1, 7, 40]),
    shortest=st.sampled_from([0, 30]),
)
def test_matches_brute_force(batch, size, kind, extra, pad_by, shortest):
    query_lens = [q for q, _ in batch]
    seq_lens = [q + context for q, context in batch]
    tokens = sum(query_lens) + extra
    want = brute(query_lens, seq_lens, size, kind, tokens, tokens + pad_by, shortest)
    segments = len(batch) * (3 if kind == "balanced" else 1)
    flat = torch.arange(tokens + pad_by) + 1000
    for rank in range(size):
        p = build(query_lens, seq_lens, rank, size, kind, extra, tokens + pad_by, shortest)
        assert (p.rows, p.padded, p.rank, p.size, p.num_tokens) == (
            want.rows,
            size * want.rows,
            rank,
            size,
            tokens,
        )
        assert p.gather_order.tolist() == want.order
        local = want.order[rank * p.rows : (rank + 1) * p.rows]
        assert p.local_tokens.tolist() == local
        assert (p.local_start, p.local_end) == (rank * p.rows, (rank + 1) * p.rows)
        assert p.num_local_tokens == sum(t >= 0 for t in local)
        assert p.flat_to_gathered.tolist() == [want.order.index(t) for t in range(tokens)]
        assert p.identity <= (want.order == [*range(tokens)] + [-1] * (p.padded - tokens))
        assert (kind == "contiguous") <= p.identity

        cu, keys, owner = p.cu_query_lens.tolist(), p.key_lens.tolist(), p.request_of_segment.tolist()
        assert len(cu) == len(keys) == len(owner) == segments
        assert (p.cu_query_lens.dtype, p.key_lens.dtype) == (torch.int32, torch.int32)
        row = 0
        for s, (end, key_len) in enumerate(zip(cu, keys)):
            assert end >= row
            assert key_len >= end - row
            assert (key_len == 0) == (end == row)
            for j in range(row, end):
                assert want.request[local[j]] == owner[s]
                assert want.visible[local[j]] == key_len - (end - 1 - j)
                if kind == "balanced":
                    assert want.part[local[j]] == ("zig", "zag", "res")[s // len(batch)]
            row = end
        assert all(t < 0 or want.request[t] < 0 for t in local[row:])

        assert p.shard(flat).tolist() == [flat[t].item() if t >= 0 else 0 for t in local]
        assert p.gathered_slots(flat).tolist() == [flat[t].item() if t >= 0 else -1 for t in want.order]
        assert causal_work(p) == sum(want.visible[t] for t in local if t >= 0)
    gathered = torch.cat([build(query_lens, seq_lens, r, size, kind, extra).shard(flat) for r in range(size)])
    last = build(query_lens, seq_lens, 0, size, kind, extra)
    assert torch.equal(last.unshard(gathered), flat[:tokens])


def test_worked_example_of_the_design():
    zero, one = everyone([3, 2], [3, 7], 2, "contiguous")
    assert (zero.cu_query_lens.tolist(), zero.key_lens.tolist()) == ([3, 3], [3, 0])
    assert (one.cu_query_lens.tolist(), one.key_lens.tolist()) == ([0, 2], [0, 7])
    assert one.local_tokens.tolist() == [3, 4, -1]


def test_balanced_example():
    """n=2, 9 tokens after 10 cached ones: blocks of 2, token 8 left over."""
    zero, one = everyone([9], [19], 2, "balanced")
    assert zero.local_tokens.tolist() == [0, 1, 6, 7, 8]
    assert one.local_tokens.tolist() == [2, 3, 4, 5, -1]
    assert (zero.cu_query_lens.tolist(), zero.key_lens.tolist()) == ([2, 4, 5], [12, 18, 19])
    assert (one.cu_query_lens.tolist(), one.key_lens.tolist()) == ([2, 4, 4], [14, 16, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_c2_sizes_around_the_rank_count_and_a_chunk(kind, size):
    for tokens in (size - 1, size, size + 1, 8191, 8192, 8193):
        ranks = everyone([tokens], [tokens], size, kind)
        assert ranks[0].padded == -(-tokens // size) * size
        owned = torch.cat([p.local_tokens for p in ranks])
        assert torch.equal(owned, ranks[0].gather_order)
        assert torch.equal(owned[owned >= 0].sort().values, torch.arange(tokens))
        slots = ranks[0].gathered_slots(torch.arange(tokens) + 16)
        assert int((slots == -1).sum()) == ranks[0].padded - tokens
        assert sum(int(causal_work(p)) for p in ranks) == tokens * (tokens + 1) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_c4_prompts_shorter_than_the_group(kind):
    for tokens in range(1, 9):
        ranks = everyone([tokens], [tokens], 8, kind)
        assert [p.num_local_tokens for p in ranks] == [1] * tokens + [0] * (8 - tokens)
        idle = [p for p in ranks if not p.num_local_tokens]
        assert all(int(p.cu_query_lens[-1]) == 0 and not p.key_lens.any() for p in idle)
        assert all(not p.shard(torch.full((tokens, 3), torch.nan)).isnan().any() for p in idle)


@pytest.mark.parametrize("kind", KINDS)
def test_c5_mixed_step_reads_no_key_of_a_request_without_rows(kind):
    query_lens, seq_lens = [1, 7, 5000], [900, 7, 5000]
    for p in everyone(query_lens, seq_lens, 4, kind):
        counts = torch.diff(p.cu_query_lens, prepend=torch.zeros(1, dtype=torch.int32))
        assert not p.key_lens[counts == 0].any()
        assert int(counts.sum()) == p.num_local_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_c6_every_tensor_describes_the_same_segments(kind):
    """Requests without query tokens stay, so that no filtered tensor stands beside an unfiltered one."""
    for p in everyone([0, 5, 0, 40], [3, 9, 0, 40], 3, kind):
        assert p.cu_query_lens.shape == p.key_lens.shape == p.request_of_segment.shape
        assert p.request_of_segment.tolist() == [0, 1, 2, 3] * (3 if kind == "balanced" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_c8_full_batch_and_odd_tokens(kind):
    for p in everyone([1] * 127 + [64], [9] * 127 + [64], 8, kind):
        assert p.padded == 192
        assert int(p.cu_query_lens[-1]) == p.num_local_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_c9_later_steps_leave_earlier_tensors_alone(kind):
    starts = torch.tensor([0, 33, 50], dtype=torch.int32)
    lens = torch.tensor([33, 40], dtype=torch.int32)

    def step(rank: int) -> Partition:
        return make_partition(
            starts,
            lens,
            num_tokens=50,
            rank=rank,
            size=4,
            kind=kind,
            query_start_loc_cpu=starts,
            min_balanced_tokens=0,
        )

    first = step(1)
    tensors = [first.cu_query_lens, first.key_lens, first.request_of_segment, first.gather_order]
    tensors.append(first.flat_to_gathered)
    copies = [t.clone() for t in tensors]
    starts.copy_(torch.tensor([0, 1, 50]))
    lens.fill_(60)
    step(2)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies))
    assert first.gather_order is tensors[3]


@pytest.mark.parametrize("kind", KINDS)
def test_c10_no_device_to_host_synchronisation(kind):
    starts = torch.tensor([0, 100, 101, 340], dtype=torch.int32)
    lens = torch.tensor([150, 9, 239], dtype=torch.int32)

    def refuse(*_):
        raise AssertionError("device-to-host synchronisation")

    names = ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "nonzero", "cpu")
    with mock.patch.multiple(torch.Tensor, **dict.fromkeys(names, refuse)):
        p = make_partition(
            starts,
            lens,
            num_tokens=340,
            rank=1,
            size=4,
            kind=kind,
            query_start_loc_cpu=starts,
            min_balanced_tokens=0,
        )
        p.shard(p.unshard(p.gather_order))
        p.gathered_slots(p.flat_to_gathered)
        make_dummy_partition(5, rank=1, size=4, kind=kind)
    assert p.num_local_tokens == 85


@pytest.mark.parametrize("size", [2, 4, 8])
def test_balance_of_one_long_prompt(size):
    assert imbalance(everyone([8192], [8192], size, "balanced")) <= 1.001
    assert imbalance(everyone([8192], [8192], size, "contiguous")) == pytest.approx(2 - 1 / size, abs=0.01)


def test_balance_of_several_prompts_and_odd_lengths():
    for query_lens in ([8191], [5000, 301, 4096], [2049, 1, 1, 1, 300]):
        assert imbalance(everyone(query_lens, query_lens, 8, "balanced")) <= 1.1
    chunk = everyone([2048], [8192], 8, "balanced")
    assert imbalance(chunk) <= 1.001


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 64])
def test_dummy_step_has_rows_but_no_segments(kind, tokens):
    p = make_dummy_partition(tokens, rank=2, size=4, kind=kind)
    assert p.rows == -(-tokens // 4)
    assert p.key_lens.numel() == p.cu_query_lens.numel() == 0
    assert p.identity


def test_decode_steps_and_single_ranks_need_no_permutation():
    assert all(p.identity for p in everyone([1] * 9, [500] * 9, 4, "balanced"))
    assert build([777], [777], 0, 1, "balanced").identity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "diagonal"}, "unknown partition 'diagonal'; valid: contiguous, balanced"),
        ({"rank": 4}, "rank 4 is not in a group of 4"),
        ({"seq_lens": torch.zeros(1)}, "3 query starts do not match 1 lengths"),
        ({"kind": "balanced"}, "needs query_start_loc_cpu"),
        ({"kind": "balanced", "query_start_loc_cpu": torch.tensor([0, 9, 11])}, "at most 10 tokens"),
    ],
)
def test_contradictory_arguments(change, message):
    arguments = {
        "query_start_loc": torch.tensor([0, 3, 10]),
        "seq_lens": torch.tensor([3, 7]),
        "num_tokens": 10,
        "rank": 0,
        "size": 4,
    }
    with pytest.raises(ValueError, match=message):
        make_partition(**{**arguments, **change})
