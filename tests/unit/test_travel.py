"""What travels with a shared weight, in which memory layout, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm_sfa_cp.weights import travel
from vllm_sfa_cp.weights.broadcast import Broadcast
from vllm_sfa_cp.weights.gather import Gather
from vllm_sfa_cp.weights.series import Schedule
from vllm_sfa_cp.weights.travel import as_bytes, lay_out, nbytes, outermost, shard_dim, tensors_of

LAYOUTS = {
    "rows": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "three dims": torch.arange(24.0).view(2, 3, 4).permute(1, 2, 0),
    "fp8": torch.arange(12.0).view(3, 4).to(torch.float8_e4m3fn),
    "one value": torch.tensor(3.0),
    "column": torch.arange(3.0).view(3, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_the_memory_itself(name):
    tensor = LAYOUTS[name].clone()  # keeps the layout
    assert tensor.stride() == LAYOUTS[name].stride()
    flat = as_bytes(tensor)
    assert flat.shape == (tensor.nbytes,)
    assert flat.data_ptr() == tensor.data_ptr()
    flat.copy_(as_bytes(torch.zeros_like(tensor)))
    assert not tensor.float().any()


def test_memory_with_gaps_is_refused():
    with pytest.raises(RuntimeError):
        as_bytes(torch.zeros(4, 6)[:, :3])


@pytest.mark.parametrize(
    ("full", "shard", "size", "dim"),
    [((8, 6), (4, 6), 2, 0), ((8, 6), (8, 3), 2, 1), ((8, 1), (8, 1), 4, None), ((8,), (2,), 4, 0)],
)
def test_dimension_of_the_shards(full, shard, size, dim):
    assert shard_dim(torch.Size(full), torch.Size(shard), size) == dim


@pytest.mark.parametrize(
    ("full", "shard", "size"), [((8, 2), (8, 1), 4), ((8, 6), (4, 3), 2), ((8,), (4, 1), 2)]
)
def test_shards_that_make_up_no_whole_are_refused(full, shard, size):
    with pytest.raises(ValueError, match="do not make up"):
        shard_dim(torch.Size(full), torch.Size(shard), size)


@pytest.mark.parametrize("name", LAYOUTS)
def test_laid_out_shards_are_consecutive(name):
    tensor = LAYOUTS[name]
    for dim in (None, *range(tensor.dim())):
        laid = lay_out(tensor, dim)
        assert torch.equal(laid.float(), tensor.float())
        assert outermost(laid, dim).is_contiguous()
        assert lay_out(laid, dim) is laid


def linear(**tensors):
    module = nn.Module()
    module.quant_method = UnquantizedLinearMethod()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def test_parameters_buffers_and_attributes_travel():
    module = linear(weight=torch.ones(2, 3), bias=torch.ones(2))
    module.register_buffer("offset", torch.zeros(2))
    module.scale = torch.ones(1)
    module.note = "not a tensor"
    assert list(tensors_of(module)) == ["bias", "offset", "scale", "weight"]


def test_a_subclass_of_a_known_method_is_unknown():
    class Packed(UnquantizedLinearMethod):
        pass

    with pytest.raises(travel.UnknownMethodError, match=r"Packed.*replicate"):
        travel.check_method(Packed)
    travel.check_method(UnquantizedLinearMethod)


def test_bytes_of_shared_storage_count_once():
    whole = torch.zeros(10)
    assert nbytes({"a": whole[:5], "b": whole[5:], "c": torch.zeros(1)}) == 44


class Ranks:
    """The links of several ranks in one process: a collective runs once every rank has called it."""

    def __init__(self, size):
        self.size, self.calls = size, []

    def link(self, rank):
        return SimpleNamespace(
            rank=rank,
            size=self.size,
            broadcast=lambda tensor, owner: self._call(rank, owner, as_bytes(tensor)),
            all_gather=lambda out, shard: self._call(rank, as_bytes(out), as_bytes(shard)),
        )

    def _call(self, rank, *call):
        self.calls.append((rank, *call))

    def run(self):
        """Every rank's n-th collective belongs together."""
        by_rank = [[c[1:] for c in self.calls if c[0] == rank] for rank in range(self.size)]
        for calls in zip(*by_rank, strict=True):
            if isinstance(calls[0][0], int):
                owner = calls[0][0]
                for _, tensor in calls:
                    tensor.copy_(calls[owner][1])
            else:
                for out, _ in calls:
                    out.copy_(torch.cat([shard for _, shard in calls]))


def int8_tensors(seed):
    """As an int8 method leaves them: transposed weight, scale and offset per output and per group of inputs, a
    second-level scale, bias."""
    gen = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randint(-128, 127, (8, 16), generator=gen, dtype=torch.int8).t(),
        "scale": torch.rand(8, 4, generator=gen),
        "offset": torch.randint(-9, 9, (8, 4), generator=gen, dtype=torch.int8),
        "outer": torch.rand(1, generator=gen),
        "bias": torch.rand(8, generator=gen),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_every_tensor_is_broadcast_as_the_owner_holds_it(size):
    schedule, ranks = Schedule(5, 3, 1), Ranks(size)
    windows = [{k: torch.zeros_like(t) for k, t in int8_tensors(0).items()} for _ in range(size)]
    received = []
    for rank in range(size):
        source = Broadcast(schedule, ranks.link(rank))
        own = int8_tensors(6) if rank == 1 else None
        assert source.prepare(6, own, windows[rank]) is own
        handles, size_ = source.fetch(6, own, windows[rank])
        received.append(size_)
        assert len(handles) == 5
    ranks.run()
    for rank, window in enumerate(windows):
        want = {k: torch.zeros_like(t) for k, t in window.items()} if rank == 1 else int8_tensors(6)
        assert all(torch.equal(window[k], want[k]) for k in want)
    whole = sum(t.nbytes for t in int8_tensors(6).values())
    assert received == [0 if rank == 1 else whole for rank in range(size)]


def test_an_owner_whose_tensors_do_not_fit_the_windows_is_refused():
    source = Broadcast(Schedule(0, 2, 1), Ranks(2).link(0))
    window = int8_tensors(0)
    for other in (
        window | {"weight": window["weight"].contiguous()},
        window | {"scale": window["scale"].double()},
        {k: t for k, t in window.items() if k != "offset"},
    ):
        with pytest.raises(ValueError, match="layer 0: the loaded tensors"):
            source.prepare(0, other, window)


@pytest.mark.parametrize(("dim", "size"), [(0, 2), (1, 2), (0, 4), (1, 4)], ids=str)
def test_shards_of_every_tensor_are_gathered(dim, size):
    """dim 0: outputs are sharded, and with them the bias; dim 1: inputs, and with them the groups' scales."""
    whole, ranks = int8_tensors(3), Ranks(size)
    cut = {"weight": 1 - dim, "scale": dim, "offset": dim, "bias": dim if dim == 0 else None, "outer": None}
    windows = []
    for rank in range(size):
        source = Gather(ranks.link(rank))
        own = {k: t if cut[k] is None else t.chunk(size, cut[k])[rank].clone() for k, t in whole.items()}
        window = source.window_layout(own, {k: torch.zeros_like(t) for k, t in whole.items()})
        own = source.prepare(3, own, window)
        _, received = source.fetch(3, own, window)
        assert received == sum(t.nbytes * (size - 1) // size for k, t in whole.items() if cut[k] is not None)
        windows.append(window)
    ranks.run()
    assert all(torch.equal(window[k], whole[k]) for window in windows for k in whole)


def test_a_shard_without_a_tensor_of_the_window_is_refused():
    whole = int8_tensors(3)
    with pytest.raises(ValueError, match=r"layer 3: shard has .*window"):
        Gather(Ranks(2).link(0)).prepare(3, {"weight": whole["weight"]}, whole)
