"""What rank processes do in the tests of shared weights, and what they report. Imported inside `RankPool`."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from engines import engine, generate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Prompts = list[list[int]]
Kind = tuple[tuple[int, ...], torch.dtype]
#: (kind, bytes or rows): a collective, or ("step", mode) where a forward begins.
Log = list[tuple[str, Any]]


def tokens(llm: Any, prompts: Prompts, max_tokens: int = 4) -> list[list[int]]:
    """Greedy tokens of prompts that are all in flight at once."""
    return [r["tokens"] for r in generate(llm, prompts, max_tokens, logits=False)]


def staggered(llm: Any, prompts: Prompts, max_tokens: int = 4) -> list[list[int]]:
    """The same of prompts that arrive one every other step, so that prefills and decodes share steps."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    core, waiting, done, step = llm.llm_engine, list(enumerate(prompts)), {}, 0
    while waiting or core.has_unfinished_requests():
        if waiting and step % 2 == 0:
            i, prompt = waiting.pop(0)
            core.add_request(f"staggered-{step}-{i}", {"prompt_token_ids": prompt}, params)
        for out in core.step():
            if out.finished:
                done[int(out.request_id.rpartition("-")[2])] = list(out.outputs[0].token_ids)
        step += 1
    return [done[i] for i in range(len(prompts))]


def inside(llm: Any, function: Callable[[Any], Any]) -> Any:
    """function(worker) of this rank."""
    return llm.collective_rpc(function)[0]


def model_of(llm: Any) -> Any:
    return inside(llm, lambda worker: worker.model_runner.get_model())


@contextmanager
def collectives() -> Iterator[Log]:
    """Record every forward's mode and this rank's collectives: of the layers, and fetches of weights."""
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm_sfa_cp.layers import step as steps
    from vllm_sfa_cp.weights.link import Link

    log: Log = []

    def traced(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            log.append((kind, tensor.nbytes))
            return original(self, tensor, *args, **kwargs)

        return call

    def begin(*args: Any) -> Any:
        step = original_begin(*args)
        log.append(("step", step.mode))
        return step

    original_begin = steps.begin
    with ExitStack() as stack:
        for cls, kind in ((GroupCoordinator, "layer"), (Link, "fetch")):
            for name in ("all_gather", "all_reduce", "reduce_scatter", "broadcast"):
                if name in vars(cls):
                    replacement = traced(f"{kind} {name}", getattr(cls, name))
                    stack.enter_context(mock.patch.object(cls, name, replacement))
        stack.enter_context(mock.patch.object(steps, "begin", begin))
        yield log


class Living(TorchDispatchMode):
    """Bytes of the living storages that were made to hold a tensor of one of some shapes and dtypes."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__()
        self.kinds, self.peak = {(s, dtype) for shape, dtype in kinds for s in (shape, shape[::-1])}, 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes(self) -> int:
        return sum(size for ref, size in self._held.values() if not ref.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor) or t.is_meta or (tuple(t.shape), t.dtype) not in self.kinds:
                continue
            storage = t.untyped_storage()
            if storage.nbytes() != t.nbytes:  # a piece of something else: a mapped checkpoint, say
                continue
            held = self._held.get(storage._cdata)
            if held is None or held[0].expired():
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.peak = max(self.peak, self.bytes)
        return out


def serve(model: str, prompts: Prompts, **kwargs: Any) -> dict[str, Any]:
    """One engine: the prompts one after the other, then arriving while others decode; and its series."""
    with collectives() as log, engine(model, **kwargs) as llm:
        report: dict[str, Any] = {"start": list(log)}
        log.clear()
        report["alone"] = [tokens(llm, [p])[0] for p in prompts]
        report["mixed"] = staggered(llm, prompts)
        report["log"] = list(log)
        loaded = model_of(llm)
        report["names"] = sorted(name for name, _ in loaded.named_parameters())
        shared = getattr(loaded.model, "shared", None)
        for series in (shared.series if shared else {}).values():
            link = series.source.link
            report.setdefault("series", {})[series.name] = (
                list(series.schedule.layers),
                list(link.group.ranks),
                len(series.windows),
            )
    return report


def memory(model: str, kinds: list[Kind], prompts: Prompts, **kwargs: Any) -> dict[str, int]:
    """Bytes of the tensors of these kinds: at most while starting, and kept after a request."""
    from vllm_sfa_cp.weights.resident import resident

    with Living(kinds) as living, engine(model, **kwargs) as llm:
        peak = living.peak
        tokens(llm, prompts)
        shared = model_of(llm).model.shared
        found = resident(model_of(llm), kwargs["tensor_parallel_size"])
        return {
            "logged": sum(found[name][0] for name in ("q_b_proj", "o_proj", "windows")),
            "peak": peak,
            "kept": living.bytes,
            "reported": sum(series.resident_bytes() for series in shared.series.values()),
        }


def lifecycle(model: str, other: str, prompts: Prompts, **kwargs: Any) -> dict[str, Any]:
    """One engine through sleep, dummy steps, an aborted forward and a reload of `other`'s weights."""
    from vllm_sfa_cp.weights.shared import SharedWeights

    report: dict[str, Any] = {}
    with (
        collectives() as log,
        engine(model, enable_prefix_caching=False, enable_sleep_mode=False, **kwargs) as llm,
    ):
        report["first"] = tokens(llm, prompts)
        for level in (1, 2):
            inside(llm, lambda worker, level=level: worker.sleep(level))
            # Sleep leaves the memory alone on a CPU. What it would do to weights elsewhere is done here: level 1
            # brings all of it back, level 2 nothing, and the weights are loaded again.
            kept = lose_weights(llm, level == 1)
            report[f"dropped {level}"] = all(
                held is None for s in model_of(llm).model.shared.series.values() for held in s.state._windows
            )
            inside(llm, lambda worker: worker.wake_up())
            for storage, data in kept:
                storage.copy_(data)
            if level == 2:
                reload_from(llm, model)
            report[f"slept {level}"] = tokens(llm, prompts)
        for _ in range(3):
            inside(llm, lambda worker: worker.execute_dummy_batch())
        report["idle"] = tokens(llm, prompts)

        original, calls = SharedWeights.use, []

        def failing(self: Any, name: str, layer: int, function: Any) -> Any:
            calls.append(name)
            if len(calls) == 6:
                raise ZeroDivisionError("injected")
            return original(self, name, layer, function)

        with mock.patch.object(SharedWeights, "use", failing):
            try:
                tokens(llm, prompts)
            except ZeroDivisionError:
                report["aborted"] = True
        core = llm.llm_engine
        core.abort_request(list(core.output_processor.request_states))
        report["after abort"] = tokens(llm, prompts)

        impls = [layer.self_attn.impl for layer in _layers(llm)]
        before = [None if i.kv_b is None else i.kv_b.data_ptr() for i in impls]
        reload_from(llm, other)
        report["reloaded"] = tokens(llm, prompts)
        report["moved"] = before != [None if i.kv_b is None else i.kv_b.data_ptr() for i in impls]
        report["log"] = list(log)
    return report


def lose_weights(llm: Any, keep: bool) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
    """Overwrite parameters, what was derived from them and windows with NaN; (storage, its copy) if asked to keep."""
    shared = model_of(llm).model.shared
    kv_b = [layer.self_attn.impl.kv_b for layer in _layers(llm)]
    windows = [t for s in shared.series.values() for window in s.windows for t in window.values()]
    tensors = [*model_of(llm).parameters(), *(t for t in kv_b if t is not None), *windows]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_meta}
    kept = [(s, s.clone()) for s in storages.values()] if keep else []
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
    return kept


def idle_replica(model: str, prompt: list[int], **kwargs: Any) -> dict[str, Any]:
    """Two replicas, one of which decodes while the other has nothing to do: modes of the steps after the prompt, and
    the fetches in them."""
    import os

    from vllm import SamplingParams

    with collectives() as log, engine(model, **kwargs) as llm:
        core, steps = llm.llm_engine, 0
        busy = int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) // 2
        if busy:
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
            core.add_request("0", {"prompt_token_ids": prompt}, params)
        while core.has_unfinished_requests():  # of either replica; the idle one makes dummy steps
            core.step()
            if not steps:
                log.clear()
            steps += 1
        return {
            "steps": steps,
            "modes": [value for kind, value in log if kind == "step"],
            "fetches": sum(kind.startswith("fetch") for kind, _ in log),
        }


def buckets(model: str, prompts: Prompts, **kwargs: Any) -> list[list[int]]:
    """Tokens of an engine that began with dummy weights and was given `model`'s in two parts."""
    from safetensors.torch import load_file

    with engine(model, enable_prefix_caching=False, **kwargs) as llm:
        tokens(llm, prompts)
        tensors = list(load_file(f"{model}/model.safetensors").items())
        for part in (tensors[::2], tensors[1::2]):
            inside(llm, lambda worker, part=part: worker.model_runner.get_model().load_weights(iter(part)))
        return tokens(llm, prompts)


def _layers(llm: Any) -> list[Any]:
    inner = model_of(llm).model
    return [inner.layers[i] for i in range(inner.start_layer, inner.end_layer)]


def reload_from(llm: Any, path: str) -> None:
    """Load another checkpoint of the same shape into the running engine, by vLLM's own call."""

    def swap(worker: Any) -> None:
        worker.model_runner.model_config.model = path

    inside(llm, swap)
    llm.collective_rpc("reload_weights")


def reload(model: str, other: str, prompts: Prompts, **kwargs: Any) -> list[list[int]]:
    """Tokens after a reload of `other`'s weights into a fresh engine on `model`."""
    with engine(model, enable_prefix_caching=False, **kwargs) as llm:
        reload_from(llm, other)
        return tokens(llm, prompts)


def fresh(model: str, prompts: Prompts, **kwargs: Any) -> list[list[int]]:
    """Tokens of a fresh engine."""
    with engine(model, **kwargs) as llm:
        return tokens(llm, prompts)


def two_models(first: str, second: str, prompts: Prompts, **kwargs: Any) -> dict[str, Any]:
    """Two engines alive in one process, asked in turn."""
    from vllm_sfa_cp.weights.link import create_weight_group, weight_link

    with engine(first, **kwargs) as a:
        group = weight_link().group
        with engine(second, **kwargs) as b:
            report: dict[str, Any] = {"same group": weight_link().group is group is create_weight_group()}
            answers = [tokens(llm, prompts) for llm in (a, b, a, b)]
            report["apart"] = model_of(a).model.shared is not model_of(b).model.shared
            report["answers"] = answers
    return report


class SlowLink:
    """Delays every collective of `Link`, one after the other, in a thread: a link of its own beside compute."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = ThreadPoolExecutor(1)

    @contextmanager
    def installed(self) -> Iterator["SlowLink"]:
        from vllm_sfa_cp.weights.link import Link

        def slow(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(link: Any, *args: Any) -> "_Fetch":
                seconds = self.seconds

                def work() -> None:
                    time.sleep(seconds)
                    original(link, *args).wait()

                return _Fetch(self._thread.submit(work))

            return call

        with (
            mock.patch.object(Link, "broadcast", slow(Link.broadcast)),
            mock.patch.object(Link, "all_gather", slow(Link.all_gather)),
        ):
            yield self
        self._thread.shutdown()


class _Fetch:
    def __init__(self, future: "Future[None]") -> None:
        self.wait = future.result


def slow_link(model: str, prompts: Prompts, share: float, **kwargs: Any) -> dict[str, Any]:
    """Prefill steps of the prompts, alternating between the link as it is and a slower one. Its delay per layer is
    a `share` of the layer's seconds, taken from the first steps. Seconds: `delay` (of a whole step), `fast` and
    `slow` (per step), `waited` (per slow step, as the rank counts them)."""
    from vllm_sfa_cp.model import SfaDeepseekV2Model
    from vllm_sfa_cp.weights.metrics import snapshot

    times: list[float] = []
    forward = SfaDeepseekV2Model.forward

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = forward(self, *args, **kwargs)
        times.append(time.perf_counter() - begin)
        return out

    with (
        SlowLink().installed() as link,
        engine(model, enable_prefix_caching=False, **kwargs) as llm,
        mock.patch.object(SfaDeepseekV2Model, "forward", timed),
    ):

        def step(prompt: list[int], seconds: float) -> tuple[float, float]:
            link.seconds = seconds
            times.clear()
            waited = snapshot()["wait_seconds"]
            tokens(llm, [prompt], max_tokens=1)
            return sum(times), snapshot()["wait_seconds"] - waited

        warm = min(step(prompt, 0.0)[0] for prompt in prompts[:4])
        layers = len(model_of(llm).model.shared.series["q_b_proj"].schedule.layers)
        delay = share * warm / layers
        fast, slow = [], []
        for a, b in zip(prompts[4::2], prompts[5::2]):
            fast.append(step(a, 0.0))
            slow.append(step(b, delay))
    return {
        "delay": layers * delay,
        "fast": [t for t, _ in fast],
        "slow": [t for t, _ in slow],
        "waited": [w for _, w in slow],
    }


def refused(model: str, forget: str | None = None, **kwargs: Any) -> str:
    """Why the engine does not start. forget: name of a quantisation method to take out of the known ones first."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm_sfa_cp.plugin import register
    from vllm_sfa_cp.weights import travel

    register()
    known = {method for method in travel._KNOWN if method.__name__ != forget}
    with mock.patch.object(travel, "_KNOWN", known):
        try:
            with engine(model, **kwargs):
                return "it starts"
        except (ValueError, TypeError) as err:
            return f"{type(err).__name__}: {err}"
        finally:
            cleanup_dist_env_and_memory()


def soak(
    model: str, pool: Prompts, requests: int, seed: int, limit_s: float, replicas: int = 1, **kwargs: Any
) -> dict[str, Any]:
    """Rounds of random load until a replica had its `requests`: each replica gets its own number of prompts from
    `pool`, none at times; between rounds all idle for a random number of dummy steps.

    A round that takes longer than `limit_s` ends the process with every thread's stack in its log.
    Returns the `answers` that each prompt of the pool got (once each), and what was done.
    """
    import faulthandler
    import os

    from vllm import SamplingParams

    replica = int(os.environ["RANK"]) * replicas // int(os.environ["WORLD_SIZE"])
    plan = random.Random(seed)  # the same on every rank: replicas step together
    answers: dict[tuple[int, int], list[list[int]]] = {}
    report: dict[str, Any] = {"answers": answers, "requests": 0, "idle": 0, "rounds": 0, "steps": 0}
    with collectives() as log, engine(model, data_parallel_size=replicas, **kwargs) as llm:
        core = llm.llm_engine
        while report["requests"] < requests:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            loads = [
                [(plan.randrange(len(pool)), plan.randrange(1, 9)) for _ in range(plan.choice([0, 1, 2, 7]))]
                for _ in range(replicas)
            ]
            for i, (prompt, length) in enumerate(loads[replica]):
                params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
                name = f"{report['rounds']}-{i}-{prompt}-{length}"
                core.add_request(name, {"prompt_token_ids": pool[prompt]}, params)
            while core.has_unfinished_requests():
                report["steps"] += 1
                for out in core.step():
                    if out.finished:
                        _, _, prompt, length = map(int, out.request_id.split("-"))
                        got, seen = list(out.outputs[0].token_ids), answers.setdefault((prompt, length), [])
                        if got not in seen:
                            seen.append(got)
            for _ in range(plan.choice([0, 0, 1, 3])):
                core.engine_core.execute_dummy_batch()
                report["idle"] += 1
            report["requests"] += sum(map(len, loads))
            report["rounds"] += 1
        faulthandler.cancel_dump_traceback_later()
        report["fetches"] = sum(kind.startswith("fetch") for kind, _ in log)
        report["replica"] = replica
    return report
