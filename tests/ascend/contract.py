"""What torch_npu promises, on a CPU: the real wheel's schemas and shape functions, the documented semantics.

`build()` returns a module that stands in for torch_npu. It exposes exactly the operators that the wheel
registers. Those the overlay calls are registered with torch.library under their own names and schemas, check
their arguments as the wheel's shape functions and documentation ask, and compute what the documentation says.
Values that the operators leave undefined are filled with garbage, so that nobody can rely on them.

float32 is accepted beside the documented 16-bit types, so that results can be compared closely;
`strict(True)` takes that back.
"""

import ast
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from patchset import npu_contract

LIMIT = 65536
GARBAGE_INDEX = 0x5A5A5A5A
COUNTS = {*range(1, 2049), 3072, 4096, 5120, 6144, 7168, 8192}
CALLS: Counter[str] = Counter()
_META = "torch_npu/op_plugin/meta/_meta_registrations.py"
_strict = False


class ContractError(RuntimeError):
    """A call that the operator would refuse. The message names operator and argument."""


def require(holds: bool, operator: str, what: str) -> None:
    if not holds:
        raise ContractError(f"{operator}: {what}")


@cache
def build(version: str = npu_contract.PINNED) -> ModuleType:
    """The stand-in for torch_npu `version`. npu_contract.Unavailable: its wheel is out of reach."""
    path = npu_contract.wheel(version)
    schemas = npu_contract.schemas(path)
    library = torch.library.Library("npu", "FRAGMENT")
    for name, implementation in IMPLEMENTATIONS.items():
        library.define(schemas[name])
        library.impl(name, _recorded(name, implementation, shape_functions(path)[name]), "CPU")
    module = ModuleType("torch_npu_contract")
    module.__dict__["_library"] = library  # the registrations live as long as this object

    def attribute(name: str) -> Callable[..., Any]:
        if name not in schemas:
            raise AttributeError(f"torch_npu {version} exports no {name}")
        if name not in IMPLEMENTATIONS:
            raise NotImplementedError(f"the contract has no semantics for {name} yet")
        return getattr(torch.ops.npu, name)

    module.__dict__["__getattr__"] = attribute
    return module


def strict(value: bool) -> None:
    """Whether only the documented 16-bit types are accepted from now on."""
    global _strict
    _strict = value


@cache
def shape_functions(path: Any) -> dict[str, Callable[..., Any]]:
    """The wheel's own shape functions of the operators we implement, compiled from its source."""
    with zipfile.ZipFile(path) as archive:
        tree = ast.parse(archive.read(_META))
    scope: dict[str, Any] = {
        "torch": torch,
        "ops_error": lambda code: f" [{code}]",
        "ErrCode": SimpleNamespace(
            VALUE="value", TYPE="type", PARAM="parameter", NOT_SUPPORT="not supported"
        ),
        "get_cann_version": lambda: "8.5.0",
    }
    found: dict[str, Callable[..., Any]] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            match decorator:
                case ast.Call(args=[_, ast.Constant(value=str(name))]) if name in IMPLEMENTATIONS:
                    node.decorator_list = []
                    exec(compile(ast.Module([node], []), _META, "exec"), scope)
                    found[name] = scope[node.name]
    return found


def _recorded(
    name: str, implementation: Callable[..., Any], shape_function: Callable[..., Any]
) -> Callable[..., Any]:
    """Count the call, run the wheel's shape function over it, compute, and compare shapes and types."""

    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        as_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        named = {k: a.to("meta") if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
        try:
            expected = shape_function(*as_meta, **named)
        except RuntimeError as problem:
            raise ContractError(f"{name}: {problem}") from problem
        result = implementation(*args, **kwargs)
        flat = result if isinstance(result, tuple) else (result,)
        promised = expected if isinstance(expected, tuple) else (expected,)
        for index, (got, want) in enumerate(zip(flat, promised, strict=True)):
            same = got.shape == want.shape and got.dtype == want.dtype
            assert same, f"{name} output {index}: {got.shape} {got.dtype}, promised {want.shape} {want.dtype}"
        return result

    return call


def _floats(operator: str, **tensors: torch.Tensor) -> None:
    allowed = {torch.float16, torch.bfloat16} | (set() if _strict else {torch.float32})
    first = next(iter(tensors.values())).dtype
    for name, tensor in tensors.items():
        require(tensor.dtype in allowed, operator, f"{name} has type {tensor.dtype}")
        require(
            tensor.dtype == first, operator, f"{name} has type {tensor.dtype}, the first argument {first}"
        )
        require(tensor.is_contiguous(), operator, f"{name} is not contiguous")


def _integers(operator: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise ContractError(f"{operator}: {name} is missing")
        require(tensor.dtype == torch.int32, operator, f"{name} has type {tensor.dtype}, not int32")
        require(tensor.is_contiguous(), operator, f"{name} is not contiguous")


def _segments(
    operator: str,
    rows: int,
    cache_shape: torch.Size,
    query_lens: torch.Tensor | None,
    key_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> list[tuple[slice, int, torch.Tensor]]:
    """Check a TND x PA_BSND launch; per segment its rows, its keys and its blocks."""
    _integers(
        operator,
        actual_seq_lengths_query=query_lens,
        actual_seq_lengths_key=key_lens,
        block_table=block_table,
    )
    assert query_lens is not None
    assert key_lens is not None
    assert block_table is not None
    require(query_lens.dim() == key_lens.dim() == 1, operator, "sequence lengths are not 1-D")
    require(len(query_lens) > 0, operator, "there is no sequence")
    require(len(query_lens) == len(key_lens), operator, "query and key lengths differ in number")
    require(block_table.dim() == 2, operator, "block_table is not 2-D")
    require(block_table.shape[0] == len(query_lens), operator, "block_table has not one row per sequence")
    blocks, block_size = cache_shape[:2]
    ends, lengths = query_lens.tolist(), key_lens.tolist()
    found, start = [], 0
    for index, (end, length) in enumerate(zip(ends, lengths)):
        require(end >= start, operator, "actual_seq_lengths_query is not a prefix sum")
        require(length >= 0, operator, "a key length is negative")
        needed = -(-length // block_size)
        require(block_table.shape[1] >= needed, operator, "block_table is narrower than a sequence needs")
        table = block_table[index, :needed].long()
        inside = bool(((table >= 0) & (table < blocks)).all())
        require(inside, operator, "block_table names a block that does not exist")
        found.append((slice(start, end), length, table))
        start = end
    require(start <= rows, operator, "actual_seq_lengths_query ends past the query")
    return found


def lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = 2**63 - 1,
    next_tokens: int = 2**63 - 1,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best first, -1 behind the last; rows outside every sequence are left alone."""
    name = "npu_lightning_indexer"
    require(layout_query in ("BSND", "TND"), name, f"layout_query {layout_query!r}")
    require(layout_key in ("PA_BSND", "BSND", "TND"), name, f"layout_key {layout_key!r}")
    require(layout_key == "PA_BSND" or layout_key == layout_query, name, "layouts of query and key differ")
    require(sparse_mode in (0, 3), name, f"sparse_mode {sparse_mode}")
    require(sparse_count in COUNTS, name, f"sparse_count {sparse_count}")
    if (layout_query, layout_key, sparse_mode, return_value) != ("TND", "PA_BSND", 3, False):
        raise NotImplementedError(f"{name}: the contract computes TND over PA_BSND, causal, only")
    _floats(name, query=query, key=key, weights=weights)
    require(query.dim() == 3, name, "query is not [T, N1, D]")
    require(weights.shape == query.shape[:2], name, "weights is not [T, N1]")
    require(key.dim() == 4 and key.shape[2:] == (1, query.shape[2]), name, "key is not [blocks, block, 1, D]")
    require(query.shape[1] <= 64, name, f"{query.shape[1]} index heads")
    selected = torch.full((query.shape[0], 1, sparse_count), GARBAGE_INDEX, dtype=torch.int32)
    launch = _segments(
        name, query.shape[0], key.shape, actual_seq_lengths_query, actual_seq_lengths_key, block_table
    )
    for rows, length, table in launch:
        keys = key[table].flatten(0, 1)[:length, 0].float()
        products = torch.einsum("tnd,sd->tns", query[rows].float(), keys).relu()
        scores = torch.einsum("tn,tns->ts", weights[rows].float(), products)
        count = rows.stop - rows.start
        visible = length - count + 1 + torch.arange(count)
        hidden = torch.arange(length) >= visible[:, None]
        order = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        place = torch.arange(sparse_count)
        best = torch.nn.functional.pad(order[:, :sparse_count], (0, max(0, sparse_count - length)))
        selected[rows, 0] = torch.where(place < visible[:, None], best, -1).int()
    return selected, query.new_empty(0)


def sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = 2**63 - 1,
    next_tokens: int = 2**63 - 1,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over each row's selected keys; rows that select none, or lie outside, are left alone."""
    name = "npu_sparse_flash_attention"
    require(layout_query in ("BSND", "TND"), name, f"layout_query {layout_query!r}")
    require(layout_kv in ("PA_BSND", "BSND", "TND"), name, f"layout_kv {layout_kv!r}")
    require(sparse_mode in (0, 3), name, f"sparse_mode {sparse_mode}")
    require(attention_mode == 2, name, f"attention_mode {attention_mode}: only 2, MLA absorbed, is supported")
    if query_rope is None or key_rope is None:
        raise ContractError(f"{name}: attention_mode 2 needs query_rope and key_rope")
    assert value is not None  # the shape function has asked the version of CANN
    same = value.data_ptr() == key.data_ptr() and value.shape == key.shape
    require(same, name, "attention_mode 2 reads key and value from one cache")
    modes = (layout_query, layout_kv, sparse_mode, sparse_block_size, return_softmax_lse, sinks)
    if modes != ("TND", "PA_BSND", 3, 1, False, None):
        raise NotImplementedError(f"{name}: the contract computes TND over PA_BSND, causal, token-wise, only")
    _floats(name, query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    _integers(name, sparse_indices=sparse_indices)
    total, heads, width = query.shape
    rope = query_rope.shape[-1]
    require(query_rope.shape == (total, heads, rope), name, "query_rope is not [T, N, rope]")
    require(key.dim() == 4 and key.shape[2:] == (1, width), name, "key is not [blocks, block, 1, D]")
    require(key_rope.shape == (*key.shape[:3], rope), name, "key_rope is not [blocks, block, 1, rope]")
    expected = sparse_indices.dim() == 3 and sparse_indices.shape[:2] == (total, 1)
    require(expected, name, "sparse_indices is not [T, 1, K]")
    output = torch.full_like(query, torch.nan)
    launch = _segments(name, total, key.shape, actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
    for rows, length, table in launch:
        count = rows.stop - rows.start
        if count == 0:
            continue
        chosen = sparse_indices[rows, 0].long()
        valid = chosen >= 0
        ordered = bool((valid[:, 1:] <= valid[:, :-1]).all())
        require(ordered, name, "sparse_indices has a valid position behind an invalid one")
        visible = length - count + 1 + torch.arange(count)
        inside = bool((chosen < visible[:, None]).all())
        require(inside, name, "sparse_indices names a key that its row does not see")
        some = valid[:, 0]
        if not bool(some.any()):
            continue
        latent = key[table].flatten(0, 1)[:, 0]
        rotary = key_rope[table].flatten(0, 1)[:, 0]
        at, mask = chosen[some].clamp(min=0), ~valid[some][:, None]
        latents = torch.where(valid[some][..., None], latent[at].float(), 0)
        rotaries = torch.where(valid[some][..., None], rotary[at].float(), 0)
        scores = query[rows][some].float() @ latents.mT + query_rope[rows][some].float() @ rotaries.mT
        probability = (scores * scale_value).masked_fill(mask, -torch.inf).softmax(-1)
        output[rows] = output[rows].masked_scatter(
            some[:, None, None].expand_as(output[rows]), (probability @ latents).to(query.dtype)
        )
    return output, torch.empty(0), torch.empty(0)


def scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    name = "npu_scatter_nd_update_"
    require(indices.dtype in (torch.int32, torch.int64), name, f"indices has type {indices.dtype}")
    require(updates.dtype == input.dtype, name, f"updates has type {updates.dtype}, input {input.dtype}")
    require(indices.dim() >= 2 and indices.shape[-1] <= input.dim(), name, "indices has a wrong shape")
    depth = indices.shape[-1]
    shape = (*indices.shape[:-1], *input.shape[depth:])
    require(updates.shape == shape, name, f"updates is {tuple(updates.shape)}, not {shape}")
    limits = torch.tensor(input.shape[:depth])
    inside = bool(((indices >= 0) & (indices < limits)).all())
    require(inside, name, "an index is out of range")
    input[tuple(indices.long().unbind(-1))] = updates
    return input


def _interleaved_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i + 1) rotated by angle i, stored at (i, i + D/2)."""
    even, odd = x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    cos, sin = cos.float(), sin.float()
    first = even.float() * cos[..., :half] - odd.float() * sin[..., :half]
    second = odd.float() * cos[..., half:] + even.float() * sin[..., half:]
    return torch.cat((first, second), -1).to(x.dtype)


def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    name = "npu_interleave_rope"
    _floats(name, x=x, cos=cos, sin=sin)
    require(x.dim() == 4, name, "x is not [B, N, S, D]")
    batch, _, length, width = x.shape
    for angle in (cos, sin):
        require(angle.shape == (batch, 1, length, width), name, "cos and sin are not [B, 1, S, D]")
    return _interleaved_rope(x, cos, sin)


def kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slot -1 writes nothing. The last two outputs are left alone unless `is_output_kv`."""
    name = "npu_kv_rmsnorm_rope_cache"
    modes = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
    require(cache_mode in modes, name, f"cache_mode {cache_mode!r}")
    if cache_mode not in ("PA", "PA_BNSD"):
        raise NotImplementedError(f"{name}: the contract computes cache_mode PA only")
    _floats(name, kv=kv, gamma=gamma, cos=cos, sin=sin, k_cache=k_cache, ckv_cache=ckv_cache)
    batch, heads, length, full = kv.shape
    width, rope = gamma.shape[0], cos.shape[3]
    require(heads == 1 and full == width + rope, name, "kv is not [B, 1, S, D + rope]")
    for angle in (cos, sin):
        require(angle.shape == (batch, 1, length, rope), name, "cos and sin are not [B, 1, S, rope]")
    require(index.dtype == torch.int64 and index.is_contiguous(), name, "index is not contiguous int64")
    require(index.shape == (batch * length,), name, "index is not [B * S]")
    slots = k_cache.shape[0] * k_cache.shape[1]
    require(k_cache.dim() == 4 and k_cache.shape[2:] == (1, rope), name, "k_cache has a wrong shape")
    require(ckv_cache.shape == (*k_cache.shape[:3], width), name, "ckv_cache has a wrong shape")
    require(bool(((index >= -1) & (index < slots)).all()), name, "index is out of range")
    latent = kv[..., :width].float()
    normed = latent * (latent.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gamma.float()
    normed = normed.to(kv.dtype)
    rotated = _interleaved_rope(kv[..., width:], cos, sin)
    kept = index >= 0
    k_cache.view(slots, rope)[index[kept]] = rotated.reshape(-1, rope)[kept]
    ckv_cache.view(slots, width)[index[kept]] = normed.reshape(-1, width)[kept]
    if not is_output_kv:
        rotated, normed = torch.full_like(rotated, torch.nan), torch.full_like(normed, torch.nan)
    # The schema does not declare the caches as outputs, so what is returned must not alias them.
    return k_cache.clone(), ckv_cache.clone(), rotated, normed


def transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
) -> torch.Tensor:
    name = "npu_transpose_batchmatmul"
    _floats(name, input=input, weight=weight)
    left = input.permute(perm_x1 or [0, 1, 2])
    right = weight.permute(perm_x2 or [0, 1, 2])
    batch, _, inner = left.shape
    require(right.shape[:2] == (batch, inner), name, "weight does not fit input")
    for size in (batch * inner, right.shape[2]):
        require(size < LIMIT, name, f"a dimension of {size} is at or past {LIMIT}")
    return torch.bmm(left, right).permute(perm_y or [1, 0, 2]).contiguous()


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_interleave_rope": interleave_rope,
    "npu_kv_rmsnorm_rope_cache": kv_rmsnorm_rope_cache,
    "npu_lightning_indexer": lightning_indexer,
    "npu_scatter_nd_update_": scatter_nd_update_,
    "npu_sparse_flash_attention": sparse_flash_attention,
    "npu_transpose_batchmatmul": transpose_batchmatmul,
}
