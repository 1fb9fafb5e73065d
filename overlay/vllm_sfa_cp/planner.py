"""What a prefill costs under each mode, before anything is built: FLOPs, bytes, memory, time, recommendation.

FLOPs count a multiply-add as 2 and come from the shapes of the matrix products of DeepSeek-V3.2's layer
(arXiv:2512.02556; vLLM v0.12.0 `deepseek_v2.py`), with W_UK and W_UV absorbed. Norms, rope, softmax and top-k
are not counted; a device profile's rates, being *achieved* rates of whole kernels, contain them.

Under TP a rank holds 1/n of q_b, kv_b, o and the MLP, but projects, indexes and scores every token: with R
the work that TP repeats on every rank (fused qkv_a and the indexer) and P the rest, a rank does R + P/n.
SFA-CP divides everything by n. Its ideal speed-up over TP is (R + P/n) / ((R + P)/n) = (nR + P) / (R + P).

No torch, no vLLM.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from .config import MIN_BALANCED_TOKENS
from .device_profile import ATTENTION_SIDE, NOMINAL, REPEATED, DeviceProfile
from .errors import UserError
from .shapes import SHAPES, Param, parameters

GiB = 2**30

#: Sizes of DeepSeek-V3.2 (huggingface.co/deepseek-ai/DeepSeek-V3.2, config.json).
DEEPSEEK_V32: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
BUILT_IN: dict[str, dict[str, Any]] = {"deepseek-v3.2": DEEPSEEK_V32} | SHAPES

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP8_BLOCK = 128


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model with a lightning indexer; field names are those of its config.json.

    max_position_embeddings: longest context; 0 if the config does not say.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    vocab_size: int
    max_position_embeddings: int = 0
    dtype_bytes: int = 4  # activations, caches and unquantised weights
    fp8: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "model") -> "ModelShape":
        """Read a Hugging Face config. UserError: sizes are missing or a setting is unknown."""
        if "index_topk" not in config:
            kind = config.get("model_type", "unknown")
            raise UserError(
                f"model type {kind!r} has no lightning indexer (index_topk)", "plan a DSA model", 2
            )
        sizes = [f.name for f in fields(cls) if f.name not in ("name", "dtype_bytes", "fp8")]
        given = {"max_position_embeddings": 0, **config}
        if missing := [key for key in sizes if key not in given]:
            raise UserError(f"{name} lacks {', '.join(missing)}", "give a config.json of a DSA model", 2)
        for key in sizes:
            least = 0 if key in _MAY_BE_ZERO else 1
            if type(given[key]) is not int or given[key] < least:
                raise UserError(
                    f"{name} has {key} {given[key]!r}", f"it must be an integer of at least {least}", 2
                )
        if given["first_k_dense_replace"] > given["num_hidden_layers"]:
            raise UserError(f"{name} has more dense layers than layers", "change first_k_dense_replace", 2)
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32")
        if dtype not in _BYTES:
            raise UserError(f"{name} has dtype {dtype!r}", f"known: {', '.join(_BYTES)}", 2)
        quantised = config.get("quantization_config") or {}
        if not isinstance(quantised, Mapping):
            raise UserError(f"{name} has quantization_config {quantised!r}", "it must be an object", 2)
        method = quantised.get("quant_method")
        if method not in (None, "fp8"):
            raise UserError(f"{name} has quant_method {method!r}", "known: fp8, or none", 2)
        values = {key: given[key] for key in sizes}
        return cls(name, **values, dtype_bytes=_BYTES[dtype], fp8=method == "fp8")

    @classmethod
    def built_in(cls, name: str) -> "ModelShape":
        return cls.from_config(BUILT_IN[name], name)

    @property
    def packed_width(self) -> int:
        """Values per token that a layer caches and SFA-CP gathers: latent, rotated k_pe, indexer key."""
        return self.kv_lora_rank + self.qk_rope_head_dim + self.index_head_dim

    @cached_property
    def linear_flops(self) -> dict[str, int]:
        """FLOPs per token of one layer's matrix products with weights: 2 x rows x columns each."""
        h, heads = self.hidden_size, self.num_attention_heads
        index_q = self.q_lora_rank * self.index_n_heads * self.index_head_dim
        experts = self.num_experts_per_tok + self.n_shared_experts
        return {
            "qkv_a": 2 * h * (self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim),
            "indexer_proj": 2 * (index_q + h * (self.index_head_dim + self.index_n_heads)),
            "q_b": 2 * self.q_lora_rank * heads * (self.qk_nope_head_dim + self.qk_rope_head_dim),
            "w_uk": 2 * heads * self.qk_nope_head_dim * self.kv_lora_rank,
            "w_uv": 2 * heads * self.v_head_dim * self.kv_lora_rank,
            "o": 2 * heads * self.v_head_dim * h,
            "dense_mlp": 2 * 3 * h * self.intermediate_size,
            "router": 2 * h * self.n_routed_experts,
            "experts": 2 * 3 * h * self.moe_intermediate_size * experts,
        }

    @property
    def score_flops(self) -> int:
        """Indexer FLOPs per (token, visible key) of one layer."""
        return 2 * self.index_n_heads * self.index_head_dim

    @property
    def attention_flops(self) -> int:
        """Attention FLOPs per (token, selected key): q.k over latent and rope, p.v over the latent."""
        return 2 * self.num_attention_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of each group of weights, all layers, unsharded. `kv_b` includes the dequantised W_UK and
        W_UV that vLLM keeps beside a quantised kv_b_proj; without quantisation they are views of it."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self)}
        groups = dict.fromkeys(dict.fromkeys(_GROUPS.values()), 0)
        for param in parameters(sizes):
            group = next(g for part, g in _GROUPS.items() if part in param.name)
            groups[group] += self._stored(param)
            if group == "kv_b" and self.fp8:
                groups[group] += param.numel * self.dtype_bytes
        return groups

    def _stored(self, param: Param) -> int:
        if self.fp8 and param.quantised:
            rows, columns = param.shape
            return param.numel + 4 * (-(-rows // _FP8_BLOCK)) * (-(-columns // _FP8_BLOCK))
        return param.numel * (4 if param.full else self.dtype_bytes)


_MAY_BE_ZERO = ("first_k_dense_replace", "n_shared_experts", "max_position_embeddings")

# Part of a parameter's name -> group; the first that matches counts.
_GROUPS = {
    "q_a_proj": "qkv_a",
    "kv_a_proj": "qkv_a",
    "indexer": "indexer",
    "q_b_proj": "q_b",
    "kv_b_proj": "kv_b",
    "o_proj": "o",
    "norm": "norms",
    "mlp.gate.": "router",
    "experts": "experts",
    "mlp.": "dense_mlp",
    "embed_tokens": "embedding",
    "lm_head": "embedding",
}
_SERIES = {"q_b_proj": "q_b", "kv_b_proj": "kv_b", "o_proj": "o"}
_TP_SHARDED = ("q_b", "kv_b", "o", "experts", "dense_mlp", "embedding")


@dataclass(frozen=True)
class Mode:
    """One way to run. `weights` and `partition` mean something under SFA-CP only."""

    name: str  # off, flashcomm1, sfa-cp
    weights: str = ""  # replicate, broadcast, gather
    partition: str = ""  # contiguous, balanced
    prefetch_step: int = 1
    shared: tuple[str, ...] = ("q_b_proj", "o_proj")

    @property
    def label(self) -> str:
        return f"sfa-cp/{self.weights}" if self.name == "sfa-cp" else self.name


def all_modes(partition: str = "balanced", prefetch_step: int = 1) -> list[Mode]:
    sources = ("replicate", "broadcast", "gather")
    cp = [Mode("sfa-cp", source, partition, prefetch_step) for source in sources]
    return [Mode("off"), Mode("flashcomm1"), *cp]


def _triangle(first: int, last: int) -> int:
    """Sum of first + 1 .. last: keys visible to the tokens at these positions."""
    return (last * (last + 1) - first * (first + 1)) // 2


def _selected(first: int, last: int, topk: int) -> int:
    """Sum of min(p, topk) over p in first + 1 .. last: keys those tokens attend to."""
    return _triangle(min(first, topk), min(last, topk)) + topk * (max(last, topk) - max(first, topk))


def step_flops(shape: ModelShape, tokens: int, context: int = 0) -> dict[str, float]:
    """FLOPs by part of a step of `tokens` tokens after `context` cached ones, all layers, without repetition.
    `lm_head` is for one token: a prompt's last."""
    layers, dense = shape.num_hidden_layers, shape.first_k_dense_replace
    count = {"dense_mlp": dense, "router": layers - dense, "experts": layers - dense}
    work: dict[str, float] = {
        part: flops * tokens * count.get(part, layers) for part, flops in shape.linear_flops.items()
    }
    last = context + tokens
    work["indexer_scores"] = layers * shape.score_flops * _triangle(context, last)
    work["attention"] = layers * shape.attention_flops * _selected(context, last, shape.index_topk)
    work["lm_head"] = 2 * shape.hidden_size * shape.vocab_size
    return work


def rank_flops(shape: ModelShape, mode: Mode, size: int, tokens: int, context: int = 0) -> dict[str, float]:
    """FLOPs by part of the rank that does most, of `size`, in a step of `tokens` tokens after `context`.

    The router sees gathered rows on every rank in every mode. With `contiguous`, and in steps too short to be
    dealt out, the last rows see most keys.
    """
    work = step_flops(shape, tokens, context)
    if mode.name != "sfa-cp":
        return {part: w if part in (*REPEATED, "router") else w / size for part, w in work.items()}
    rows = -(-tokens // size)
    for part in work:
        if part in ATTENTION_SIDE:
            work[part] *= rows / tokens
        elif part != "router":
            work[part] /= size
    if mode.partition == "contiguous" or tokens < max(MIN_BALANCED_TOKENS, 2 * size):
        edges = [
            (context + min(r * rows, tokens), context + min((r + 1) * rows, tokens)) for r in range(size)
        ]
        scores = max(_triangle(*edge) for edge in edges)
        selected = max(_selected(*edge, shape.index_topk) for edge in edges)
        work["indexer_scores"] = shape.num_hidden_layers * shape.score_flops * scores
        work["attention"] = shape.num_hidden_layers * shape.attention_flops * selected
    return work


def split(shape: ModelShape, tokens: int, context: int = 0) -> tuple[float, float]:
    """(R, P): average FLOPs per token and layer that TP repeats on every rank, and the others."""
    work = step_flops(shape, tokens, context)
    each = tokens * shape.num_hidden_layers
    repeated = sum(work[part] for part in REPEATED)
    return repeated / each, (sum(work.values()) - work["lm_head"] - repeated) / each


def ideal_speedup(shape: ModelShape, size: int, tokens: int, context: int = 0) -> float:
    """(nR + P) / (R + P): SFA-CP over TP if nothing but FLOPs took time."""
    repeated, rest = split(shape, tokens, context)
    return (size * repeated + rest) / (repeated + rest)


@dataclass(frozen=True)
class Collectives:
    """What one rank receives in a step: bytes, and the number of collectives, by kind."""

    bytes: dict[str, float]
    count: dict[str, int]


def collectives(
    shape: ModelShape, mode: Mode, size: int, tokens: int, reduce_scatter: float = 1.0
) -> Collectives:
    """Ring algorithms: an all-gather or reduce-scatter of X bytes moves (n-1)/n X through each rank, an
    all-reduce twice that. The embedding's all-reduce counts in every mode; logits do not.

    reduce_scatter: what a reduce-scatter moves, of what a ring's does (`DeviceProfile.reduce_scatter`).
    """
    part = (size - 1) / size
    rows = -(-tokens // size) * size if mode.name != "off" else tokens
    hidden = rows * shape.hidden_size * shape.dtype_bytes * part
    layers = shape.num_hidden_layers
    if mode.name == "off":
        count = {"all-reduce": 2 * layers + 1}
    elif mode.name == "flashcomm1":
        count = {"all-reduce": 1, "all-gather": 2 * layers + 1, "reduce-scatter": 2 * layers}
    else:
        count = {"all-reduce": 1, "all-gather": layers + 1, "reduce-scatter": layers}
    weight = {"all-reduce": 2.0, "reduce-scatter": reduce_scatter}
    moved = {kind: times * hidden * weight.get(kind, 1.0) for kind, times in count.items()}
    if mode.name == "sfa-cp":
        count["packed keys"] = layers
        moved["packed keys"] = layers * rows * shape.packed_width * shape.dtype_bytes * part
    if mode.weights in ("broadcast", "gather"):
        full = sum(shape.weight_bytes[_SERIES[name]] for name in mode.shared)
        count["weights"] = layers * len(mode.shared)
        moved["weights"] = full * (part if mode.weights == "gather" else 1)
    if size == 1:
        return Collectives(dict.fromkeys(moved, 0.0), dict.fromkeys(count, 0))
    return Collectives(moved, count)


def memory(shape: ModelShape, mode: Mode, size: int, tokens: int) -> dict[str, float]:
    """Bytes one rank keeps, by category: weights of each group, windows, and the cache of `tokens` tokens,
    which every rank holds whole.

    A shared linear of one layer takes W bytes: `replicate` L W, `broadcast` ceil(L/n) W on the rank that owns
    most, `gather` L/n W; the last two also min(k + 1, L) windows of W. Activations are not counted.
    """
    layers = shape.num_hidden_layers
    use: dict[str, float] = {}
    windows = 0.0
    for group, full in shape.weight_bytes.items():
        series = next((name for name, g in _SERIES.items() if g == group), None)
        if mode.name != "sfa-cp" or series is None:
            use[group] = full / size if group in _TP_SHARDED else full
        elif mode.weights == "replicate" or series not in mode.shared:
            use[group] = full
        else:
            held = -(-layers // size) if mode.weights == "broadcast" else layers / size
            use[group] = full / layers * held
            windows += full / layers * min(mode.prefetch_step + 1, layers)
    use["windows"] = windows
    use["kv_cache"] = float(layers * tokens * shape.packed_width * shape.dtype_bytes)
    return use


@dataclass(frozen=True)
class Prediction:
    """One mode's cost for a whole prompt on the rank that does most; seconds come from a device profile."""

    mode: Mode
    flops: dict[str, float]
    bytes: dict[str, float]
    memory: dict[str, float]
    compute_s: float
    collective_s: float
    weight_wait_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.collective_s + self.weight_wait_s + self.overhead_s

    @property
    def resident(self) -> float:
        return sum(self.memory.values())


def predict(
    shape: ModelShape,
    mode: Mode,
    size: int,
    prompt: int,
    chunk: int | None = None,
    profile: DeviceProfile = NOMINAL,
    context: int = 0,
) -> Prediction:
    """Cost of one prompt of `prompt` tokens after `context` cached ones, in steps of at most `chunk` tokens.

    Parts run one after another; each takes the longer of its FLOPs and of reading its weights. Full weights
    are fetched beside a layer's work (prefetch_step 0: before it), as far as the device's link moves bytes by
    itself (`overlap`); what does not fit beside it is waited for.
    """
    chunk = min(chunk or prompt, prompt)
    flops: dict[str, float] = {}
    moved: dict[str, float] = {}
    totals = (0.0, 0.0, 0.0)
    for begin in range(0, prompt, chunk):
        tokens = min(chunk, prompt - begin)
        work = rank_flops(shape, mode, size, tokens, context + begin)
        traffic = collectives(shape, mode, size, tokens, profile.reduce_scatter)
        seen = context + begin + tokens
        compute = sum(_seconds(shape, mode, size, tokens, seen, part, w, profile) for part, w in work.items())
        times = {
            kind: profile.collective_s(amount, traffic.count[kind], size)
            for kind, amount in traffic.bytes.items()
        }
        beside = times.pop("weights", 0.0)
        if mode.prefetch_step:
            times["weights"] = (1 - profile.overlap) * beside
            beside *= profile.overlap
        busy = compute + sum(times.values())
        wait = beside if mode.prefetch_step == 0 else max(0.0, beside - busy)
        totals = (totals[0] + compute, totals[1] + busy - compute, totals[2] + wait)
        _add(flops, work)
        _add(moved, traffic.bytes)
    steps = -(-prompt // chunk)
    overhead = steps * (profile.step_overhead + shape.num_hidden_layers * profile.layer_overhead)
    kept = memory(shape, mode, size, context + prompt)
    return Prediction(mode, flops, moved, kept, *totals, overhead)


_WEIGHTS_READ = {"indexer_proj": "indexer", "w_uk": "kv_b", "w_uv": "kv_b", "lm_head": "embedding"}


def _seconds(
    shape: ModelShape,
    mode: Mode,
    size: int,
    tokens: int,
    seen: int,
    part: str,
    work: float,
    profile: DeviceProfile,
) -> float:
    """Seconds of `part` in a step of `tokens` tokens, the last of which sees `seen` keys."""
    group = _WEIGHTS_READ.get(part, part)
    read = float(shape.weight_bytes.get(group, 0))
    if group in ("kv_b", "embedding"):
        read /= 2  # each of W_UK and W_UV is half of kv_b; the head is half of the embeddings
    whole = part in (*REPEATED, "router") or (mode.name == "sfa-cp" and part in ATTENTION_SIDE)
    if group in _TP_SHARDED and not whole:
        read /= size
    if group == "experts":  # share of the experts that at least one token chose
        read *= 1 - (1 - shape.num_experts_per_tok / shape.n_routed_experts) ** tokens
    rows = -(-tokens // size) if mode.name == "sfa-cp" and part in ATTENTION_SIDE else tokens
    if part in (
        "indexer_scores",
        "attention",
    ):  # their work grows with the keys that a row sees, not with rows only
        rows = seen
    rate = profile.rate(part, rows, size, shard=not whole)
    return max(work / rate, read / profile.memory_bandwidth)


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


def token_threshold(
    shape: ModelShape, mode: Mode, size: int, profile: DeviceProfile = NOMINAL, context: int = 0
) -> int | None:
    """Tokens of a step, after `context` cached ones, at which `mode` begins to be no slower than plain TP; None if
    it is slower even at a million.

    Found between two powers of two. Ranks get whole rows and rates bend, so a few larger steps can still lose a
    little; the planner itself is not more exact than that.
    """

    def pays(tokens: int) -> bool:
        ours, plain = (
            predict(shape, m, size, tokens, profile=profile, context=context) for m in (mode, Mode("off"))
        )
        return ours.seconds <= plain.seconds

    high = 1
    while not pays(high):
        high *= 2
        if high > 2**20:
            return None
    low = high // 2  # does not pay (0: no step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Recommendation:
    mode: Mode
    reason: str


def recommend(
    shape: ModelShape,
    predictions: Iterable[Prediction],
    size: int,
    profile: DeviceProfile = NOMINAL,
    decodes: bool = True,
) -> Recommendation:
    """The fastest mode that fits the device and the role; the simpler one if they are within 2 %.

    predictions: of modes in order of simplicity, plain TP first.
    decodes:     whether the server also decodes; `replicate` and `broadcast` have no TP shards for it.
    """
    every = list(predictions)
    plain = every[0]
    if size == 1:
        return Recommendation(plain.mode, "with one rank there is nothing to divide")
    fitting = [p for p in every if profile.memory is None or p.resident <= profile.memory]
    if not fitting:
        least = min(every, key=lambda p: p.resident)
        return Recommendation(
            least.mode,
            f"no mode fits: the smallest, {least.mode.label}, keeps {least.resident / GiB:.1f} GiB per rank "
            f"and the device has {(profile.memory or 0) / GiB:.1f} GiB; use more ranks",
        )
    usable = [p for p in fitting if not (decodes and p.mode.weights in ("replicate", "broadcast"))] or fitting
    fastest = min(p.seconds for p in usable)
    best = next(p for p in usable if p.seconds <= 1.02 * fastest)
    gain = plain.seconds / best.seconds
    repeated = sum(plain.flops[part] for part in REPEATED) / sum(plain.flops.values())
    share = f"{repeated:.0%} of a plain-TP rank's work is repeated on every rank"
    if best.mode.name != "sfa-cp":
        return Recommendation(best.mode, f"only {share}: dividing it would not pay for what it costs")
    reason = f"{gain:.2f}x plain TP: {share}, which SFA-CP divides"
    if best.mode.weights == "gather" and decodes:
        reason += "; decode steps run on the TP shards"
    elif best.mode.weights != "replicate" and not any(p.mode.weights == "replicate" for p in fitting):
        reason += "; full weights on every rank would not fit"
    if best.weight_wait_s > 0.02 * best.seconds:
        reason += f"; {best.weight_wait_s / best.seconds:.0%} of the time waits for weights"
    return Recommendation(best.mode, reason)
