"""What rank processes do in the distributed tests, and what they report. Imported inside `RankPool`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from engines import engine, generate
from torch.utils._python_dispatch import TorchDispatchMode

Prompts = list[list[int]]


@dataclass(frozen=True)
class StepLog:
    """One step: per request the tokens computed and the total length; the partition, if the step is a CP step;
    the rows and visible keys of every segment that this rank hands to the kernels."""

    query_lens: list[int]
    seq_lens: list[int]
    kind: str | None
    segment_rows: list[int]
    segment_keys: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def mixed(self) -> bool:
        """Whether a decode and a prefill share the step."""
        decodes = [q == 1 and s > 1 for q, s in zip(self.query_lens, self.seq_lens)]
        return any(decodes) and not all(decodes)


def _segment_tensors(segments: Any) -> list[torch.Tensor]:
    return [segments.cu_query_lens, segments.key_lens, segments.block_table]


def _tensors(metadata: Any) -> list[torch.Tensor]:
    held = [metadata.slot_mapping, *_segment_tensors(metadata.segments)]
    if metadata.cp is not None:
        held += [metadata.cp.slot_mapping, *_segment_tensors(metadata.cp.segments)]
    return held


def _refuse(*_: Any) -> None:
    raise AssertionError("device-to-host transfer in the metadata build")


def rows_of(segments: Any) -> list[int]:
    """Rows of every segment."""
    return torch.diff(segments.cu_query_lens, prepend=torch.zeros(1, dtype=torch.int32)).tolist()


@contextmanager
def steps() -> Iterator[list[StepLog]]:
    """Record every step's metadata as it is built, and check what must hold for each of them:

    C1   the rank's range is the one the lengths were computed for, whatever was computed since;
    C6   the per-segment tensors have one length;
    C9   what an earlier step was given has not changed;
    C10  the build reads no tensor value on the host (on a CPU `numpy()` of the host copy is not such a read).
    """
    from vllm_sfa_cp.metadata import SfaMetadataBuilder

    log: list[StepLog] = []
    previous: list[tuple[torch.Tensor, torch.Tensor]] = []
    build = SfaMetadataBuilder.build

    def traced(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        for given, copy in previous:
            assert torch.equal(given, copy), "a later step changed tensors that were handed out"
        forbidden = dict.fromkeys(("item", "tolist", "__int__", "__bool__", "__float__", "nonzero"), _refuse)
        with mock.patch.multiple(torch.Tensor, **forbidden):
            metadata = build(self, common_prefix_len, common, fast_build)
        previous[:] = [(t, t.clone()) for t in _tensors(metadata)]
        starts = common.query_start_loc[: common.num_reqs + 1]
        assert metadata.num_actual_tokens == int(starts[-1])
        segments, kind = metadata.segments, None
        if metadata.cp is not None:
            segments, partition = metadata.cp.segments, metadata.cp.partition
            kind = partition.kind
            assert partition.local_start == partition.rank * partition.rows
            assert partition.local_end == partition.local_start + partition.rows
            assert sum(rows_of(segments)) == partition.num_local_tokens
        assert len({t.shape[0] for t in _segment_tensors(segments)}) == 1
        lens = common.seq_lens[: common.num_reqs].tolist()
        log.append(StepLog(starts.diff().tolist(), lens, kind, rows_of(segments), segments.key_lens.tolist()))
        return metadata

    with mock.patch.object(SfaMetadataBuilder, "build", traced):
        yield log


def inside(llm: Any, function: Callable[[Any], Any]) -> Any:
    """function(worker) of this rank."""
    return llm.collective_rpc(function)[0]


def rounds(
    model: str,
    prompts: Prompts,
    plan: list[str],
    max_tokens: int = 8,
    busy_replica: int | None = None,
    **kwargs: Any,
) -> dict:
    """One engine; for every entry of `plan` the same prompts, `together` (all in flight) or `alone` (one by one).

    Entries may end in a label, as in "together again". Replicas other than `busy_replica`, if given, get no
    prompt. Returns entry -> results; "steps": entry -> StepLogs; "idle": how many dummy steps there were.
    """
    from vllm.v1.worker.gpu_worker import Worker

    report: dict[str, Any] = {"steps": {}}
    dummy = mock.patch.object(
        Worker, "execute_dummy_batch", autospec=True, side_effect=Worker.execute_dummy_batch
    )
    with steps() as log, dummy as idle, engine(model, **kwargs) as llm:
        rank = llm.llm_engine.vllm_config.parallel_config.data_parallel_rank
        if busy_replica not in (None, rank):
            prompts = [[] for _ in prompts]
        for entry in plan:
            first = len(log)
            if entry.startswith("alone"):
                # An idle replica makes the same calls: each ends when no replica has work left.
                answers = [generate(llm, [p] if p else [], max_tokens) for p in prompts]
                report[entry] = [a for answer in answers for a in answer]
            else:
                report[entry] = generate(llm, [p for p in prompts if p], max_tokens)
            report["steps"][entry] = log[first:]
        report["idle"] = idle.call_count
    return report


def caches_of(llm: Any) -> dict[str, torch.Tensor]:
    """Copy of the cache [num_blocks, block_size, width] of every attention layer and every indexer."""

    def copy(worker: Any) -> dict[str, torch.Tensor]:
        layers = worker.vllm_config.compilation_config.static_forward_context
        return {
            name: layer.kv_cache[0].clone() for name, layer in layers.items() if hasattr(layer, "kv_cache")
        }

    return inside(llm, copy)


def caches(model: str, prompts: Prompts, alone: Prompts, **kwargs: Any) -> dict[str, Any]:
    """Caches after the prompts of `alone`, one by one, and then `prompts` together; nothing decodes, and with
    enough blocks none is used twice."""
    with steps() as log, engine(model, enable_prefix_caching=False, **kwargs) as llm:
        for prompt in alone:
            generate(llm, [prompt], 1, logits=False)
        generate(llm, prompts, 1, logits=False)
        return {"caches": caches_of(llm), "kinds": [s.kind for s in log], "tokens": [s.tokens for s in log]}


@contextmanager
def blind_kernels() -> Iterator[list[int]]:
    """Every kernel launch runs a second time on a cache that is NaN wherever no row of the launch may look, and
    must return the same. Yields the number of rows of each launch."""
    from vllm_sfa_cp.ops.reference import ReferenceOps

    launches: list[int] = []

    def hide(cache: torch.Tensor, segments: Any) -> torch.Tensor:
        blind = torch.full_like(cache, torch.nan)
        size = cache.shape[1]
        for rows, keys, table in zip(rows_of(segments), segments.key_lens.tolist(), segments.block_table):
            at = torch.arange(keys if rows else 0)
            slots = table[at // size].long() * size + at % size
            blind.flatten(0, 1)[slots] = cache.flatten(0, 1)[slots]
        return blind

    def twice(name: str, cache_at: int, segments_at: int) -> Any:
        original = getattr(ReferenceOps, name)

        def call(self: Any, *args: Any) -> torch.Tensor:
            out = original(self, *args)
            blind = list(args)
            blind[cache_at] = hide(args[cache_at], args[segments_at])
            assert torch.equal(original(self, *blind), out), f"{name} read a key that no row sees"
            launches.append(args[0].shape[0])
            return out

        return mock.patch.object(ReferenceOps, name, call)

    with twice("indexer_topk", 2, 3), twice("sparse_mla", 2, 4):
        yield launches


def arrivals(model: str, prompts: Prompts, blind: bool = False, max_tokens: int = 6, **kwargs: Any) -> dict:
    """The first prompt alone until it decodes, then the others in one step with it. Tokens in prompt order."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    tokens: dict[int, list[int]] = {}
    with ExitStack() as stack:
        log = stack.enter_context(steps())
        llm = stack.enter_context(engine(model, **kwargs))
        launches = stack.enter_context(blind_kernels()) if blind else []
        core = llm.llm_engine
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), {"prompt_token_ids": prompt}, params)
            if i == 0:
                core.step()
        while core.has_unfinished_requests():
            tokens |= {int(o.request_id): list(o.outputs[0].token_ids) for o in core.step()}
        return {"tokens": [tokens[i] for i in range(len(prompts))], "steps": log, "launches": launches}


def prompt_logprobs(model: str, prompts: Prompts, **kwargs: Any) -> dict[str, Any]:
    """Log-probability of every prompt token but the first given those before it, all prompts in flight."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with steps() as log, engine(model, **kwargs) as llm:
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        found = [
            torch.tensor(
                [entry[t].logprob for t, entry in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:])]
            )
            for out in outs
        ]
        return {"logprobs": found, "steps": log}


#: torch.distributed's collectives, and which argument holds the result's elements.
_COLLECTIVES = {
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 1,
    "all_gather": 1,
    "broadcast": 0,
    "all_to_all_single": 0,
    "all_to_all": 1,
    "reduce_scatter": 0,
    "gather": 0,
    "scatter": 0,
    "reduce": 0,
}


@dataclass(frozen=True)
class Call:
    """A collective: its name, its group's global ranks, the elements of its largest tensor, its kind of group,
    and the layer whose attention made it (None: something else did)."""

    name: str
    ranks: tuple[int, ...]
    elements: int
    attention: int | None


def _largest(args: tuple[Any, ...]) -> int:
    return max((a.numel() for a in args if isinstance(a, torch.Tensor)), default=0)


def communication(model: str, prompt: list[int], **kwargs: Any) -> dict[str, Any]:
    """One prefill: every collective of the model's forward (`calls`), the cache writes per layer and cache
    (`writes`, by the cache's address), the rows of the step and the ranks of the TP group."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_sfa_cp.layers.mla import RowsMLAAttention
    from vllm_sfa_cp.model import SfaDeepseekV2Model
    from vllm_sfa_cp.ops.reference import ReferenceOps

    calls: list[Call] = []
    writes: dict[tuple[str, int], int] = {}
    inside_forward, layer = False, None

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kw: Any) -> Any:
            if inside_forward:
                ranks = dist.get_process_group_ranks(kw.get("group") or dist.group.WORLD)
                calls.append(Call(name, tuple(ranks), _largest(args), layer))
            return original(*args, **kw)

        return mock.patch.object(dist, name, call)

    def written(name: str) -> Any:
        original = getattr(ReferenceOps, name)

        def call(self: Any, cache: torch.Tensor, *args: Any) -> None:
            key = (name, cache.data_ptr())
            writes[key] = writes.get(key, 0) + 1
            original(self, cache, *args)

        return mock.patch.object(ReferenceOps, name, call)

    forward, attend = SfaDeepseekV2Model.forward, {}

    def model_forward(self: Any, *args: Any, **kw: Any) -> Any:
        nonlocal inside_forward
        inside_forward = True
        try:
            return forward(self, *args, **kw)
        finally:
            inside_forward = False

    def attention_of(cls: type) -> Any:
        attend[cls] = cls.forward_rows  # type: ignore[attr-defined]

        def call(self: Any, *args: Any, **kw: Any) -> Any:
            nonlocal layer
            layer = int(self.mla_attn.mla_attn.layer_name.split(".")[2])
            try:
                return attend[cls](self, *args, **kw)
            finally:
                layer = None

        return mock.patch.object(cls, "forward_rows", call)

    with ExitStack() as stack:
        llm = stack.enter_context(engine(model, **kwargs))
        for name in _COLLECTIVES:
            stack.enter_context(counted(name))
        for name in ("write_latent", "write_indexer_key"):
            stack.enter_context(written(name))
        for cls in [RowsMLAAttention, *RowsMLAAttention.__subclasses__()]:
            stack.enter_context(attention_of(cls))
        stack.enter_context(mock.patch.object(SfaDeepseekV2Model, "forward", model_forward))
        log = stack.enter_context(steps())
        answer = generate(llm, [prompt], 1)[0]
        group = tuple(get_tp_group().ranks)
    return {"calls": calls, "writes": writes, "steps": log, "group": group, "answer": answer}


class _Opened(TorchDispatchMode):
    """Lets modes below see inside vLLM's custom operators, whose kernels are Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "vllm":
            return func(*args, **(kwargs or {}))
        with self:
            cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            return func.redispatch(cpu, *args, **(kwargs or {}))


def flops(model: str, prompt: list[int], **kwargs: Any) -> int:
    """FLOPs of this rank's matrix products in the prefill of a prompt, as torch's FlopCounterMode counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with engine(model, **kwargs) as llm:
        generate(llm, [prompt], 1, logits=False)
        with FlopCounterMode(display=False) as counter, _Opened():
            generate(llm, [prompt], 1, logits=False)
    return counter.get_total_flops()


def shape_of(model: str, prompts: Prompts, **kwargs: Any) -> dict[str, Any]:
    """What an engine is made of and what its steps do: everything that an option may change."""
    with steps() as log, engine(model, **kwargs) as llm:
        loaded = inside(llm, lambda worker: worker.model_runner.get_model())
        inner = loaded.model
        block = inner.layers[inner.start_layer]
        attention = block.self_attn
        generate(llm, prompts, 3, logits=False)
        shared = getattr(inner, "shared", None)
        series = shared.series if shared else {}
        return {
            "model": type(inner).__name__,
            "layer": type(block).__name__,
            "attention": type(attention).__name__,
            "ops": type(attention.impl.ops if hasattr(attention, "impl") else _impl(attention).ops).__name__,
            "projections": {
                name: type(getattr(attention, name)).__name__ for name in ("q_b_proj", "kv_b_proj", "o_proj")
            },
            "series": {s.name: (type(s.source).__name__, len(s.windows)) for s in series.values()},
            "kinds": [s.kind for s in log],
            "tokens": [s.tokens for s in log],
        }


def _impl(attention: Any) -> Any:
    return attention.mla_attn.mla_attn.impl


def upstream_path(model: str, prompts: Prompts, share: str, **kwargs: Any) -> dict[str, Any]:
    """Mode off with less and less of the overlay:

    off       as it is served;
    poisoned  the same with every piece of the FlashComm1 and SFA-CP code replaced by one that raises;
    upstream  upstream's own DeepseekV3ForCausalLM, DeepseekV2Model, decoder layer, attention and CPU worker; only
              the indexer and the attention backend, which upstream has for CUDA alone, are the overlay's.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import deepseek_v2 as upstream
    from vllm_sfa_cp import partition, registration
    from vllm_sfa_cp.layers import decoder, mla, replicated, step
    from vllm_sfa_cp.layers.indexer import SfaIndexer
    from vllm_sfa_cp.model import SfaDeepseekV2Model
    from vllm_sfa_cp.weights import assemble, link, shared

    def poison(*_: Any, **__: Any) -> Any:
        raise AssertionError("mode off ran code of another mode")

    with ExitStack() as stack:
        if share != "off":
            for owner, names in (
                (partition.Partition, ["__init__"]),
                (step.Step, ["__init__", "gather", "reduce", "shard", "unshard"]),
                (step, ["begin"]),
                (decoder.RowsDecoderLayer, ["__init__", "forward_rows"]),
                (mla.RowsMLAAttention, ["forward_rows"]),
                (mla.CpMLAAttention, ["__init__"]),
                (mla, ["_attend_layer", "pack"]),
                (replicated.FullLinear, ["__init__"]),
                (assemble.Assembly, ["__init__"]),
                (shared.SharedWeights, ["__init__"]),
                (link.Link, ["__init__"]),
                (SfaDeepseekV2Model, ["_pack", "_unpack"]),
            ):
                for name in names:
                    stack.enter_context(mock.patch.object(owner, name, poison))
        if share == "upstream":
            ours = ModelRegistry.models[registration.ARCHITECTURE]
            ModelRegistry.register_model(registration.ARCHITECTURE, upstream.DeepseekV3ForCausalLM)
            stack.callback(ModelRegistry.models.__setitem__, registration.ARCHITECTURE, ours)
            # vLLM remembers the class of a configuration that it has seen.
            stack.enter_context(mock.patch.dict(utils._MODEL_ARCH_BY_HASH, clear=True))
            stack.enter_context(mock.patch.object(upstream.DeepseekV2MLAAttention, "indexer_cls", SfaIndexer))
            kwargs["worker_cls"] = "vllm.v1.worker.cpu_worker.CPUWorker"
        llm = stack.enter_context(engine(model, **kwargs))
        classes = inside(llm, lambda w: [type(w.worker).__name__, *_classes(w.model_runner.get_model())])
        return {"answers": generate(llm, prompts), "caches": caches_of(llm), "classes": classes}


def _classes(model: Any) -> list[str]:
    layer = model.model.layers[0]
    return [type(m).__qualname__ for m in (model, model.model, layer, layer.self_attn)]


def packed_without_indexer() -> dict[str, Any]:
    """C11: the packed gather of a layer that has no indexer of its own."""
    from vllm_sfa_cp.layers.mla import pack

    kv_c, k_pe, k_index = torch.ones(3, 32), torch.ones(3, 8) * 2, torch.ones(3, 16) * 3
    whole, without = pack([kv_c, k_pe, k_index]), pack([kv_c, k_pe, None])
    mixed = ""
    try:
        pack([kv_c, k_pe.bfloat16(), k_index])
    except TypeError as err:
        mixed = str(err)
    return {
        "whole": (tuple(whole[0].shape), whole[1]),
        "without": (tuple(without[0].shape), without[1]),
        "parts": [bool(torch.equal(a, b)) for a, b in zip(without[0].split(without[1], -1), (kv_c, k_pe))],
        "mixed": mixed,
    }


def starts(model: str, **kwargs: Any) -> str:
    """What comes of an engine start: "ok", or the error's type and text."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        with engine(model, **kwargs) as llm:
            generate(llm, [[5, 6, 7]], 1)
            return "ok"
    except (ValueError, TypeError, NotImplementedError) as err:
        return f"{type(err).__name__}: {err}"
    finally:
        cleanup_dist_env_and_memory()


def configurations(model: str, most: int) -> list[tuple[int, int, int, str]]:
    """(ranks, max_num_seqs, max_num_batched_tokens, mode) of a valid configuration for every max_num_seqs."""
    from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm_sfa_cp.config import resolve

    overrides = {"num_attention_heads": 16, "num_key_value_heads": 16}
    one = ModelConfig(model, dtype="float32", skip_tokenizer_init=True, hf_overrides=overrides)
    found = []
    for size in (1, 2, 4, 8, 16):
        for seqs in range(1, most + 1):
            config = VllmConfig(
                model_config=one,
                parallel_config=ParallelConfig(
                    tensor_parallel_size=size, distributed_executor_backend="mp" if size > 1 else "uni"
                ),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=seqs,
                    max_num_batched_tokens=seqs,
                    max_model_len=2048,
                    is_encoder_decoder=False,
                ),
                additional_config={"enable_sfa_cp": True},
            )
            scheduler = config.scheduler_config
            mode = resolve(config).mode
            found.append((size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, mode))
    return found
