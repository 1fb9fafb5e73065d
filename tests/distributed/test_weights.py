"""Shared weights in the engine: the same tokens from every source, at the memory and the time they promise.

SFA_CP_FULL_MATRIX=1 runs every combination of source, prefetch_step, group size, pipeline size and checkpoint
(eight ranks at most) instead of a set in which every pair of values occurs but four ranks with two stages.
"""

import itertools
import json
import math
import os
import random
import statistics
import sys
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from safetensors.torch import load_file, save_file
from vllm_sfa_cp.planner import Mode, ModelShape
from vllm_sfa_cp.planner import memory as planned
from vllm_sfa_cp.serving import SFA_CP_ENV
from vllm_sfa_cp.shapes import SHAPES, release_config
from vllm_sfa_cp.tiny_model import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FULL_MATRIX = bool(os.environ.get("SFA_CP_FULL_MATRIX"))
ALL = ["q_b_proj", "kv_b_proj", "o_proj"]
#: Sizes at which no other tensor has the shape of a shared projection or of a shard of one. Five layers are not
#: a multiple of the ranks.
ODD = {
    "none": SHAPES["base"] | {"num_hidden_layers": 5, "q_lora_rank": 52, "v_head_dim": 24},
    "fp8": SHAPES["fp8"] | {"q_lora_rank": 384, "qk_nope_head_dim": 64, "v_head_dim": 96},
}

Case = tuple[str, str, int, int, int]  # checkpoint, source, prefetch_step, group size, pipeline size
PAIRS: list[Case] = [
    ("base", "gather", 0, 2, 2),
    ("base", "gather", 1, 4, 1),
    ("base", "broadcast", 1, 2, 1),
    ("base", "broadcast", 2, 4, 1),
    ("base", "gather", 2, 2, 1),
    ("fp8", "broadcast", 0, 4, 1),
    ("fp8", "gather", 0, 2, 1),
    ("fp8", "gather", 1, 4, 1),
    ("deep base", "gather", 1, 2, 2),
    ("deep fp8", "broadcast", 1, 2, 2),
    ("deep fp8", "gather", 2, 2, 2),
]
#: Checkpoints of eight layers: with prefetch the windows do not hold the whole series of one of two stages.
DEEP = {f"deep {name}": SHAPES[name] | {"num_hidden_layers": 8} for name in ("base", "fp8")}
EVERY = [
    (f"deep {model}" if pipeline == 2 else model, source, ahead, size, pipeline)
    for model, source, ahead, size, pipeline in itertools.product(
        ["base", "fp8"], ["gather", "broadcast"], [0, 1, 2], [2, 4], [1, 2]
    )
]
CASES = EVERY if FULL_MATRIX else PAIRS


def sfa_cp(size: int, pipeline: int = 1, **section) -> dict:
    return {
        "tensor_parallel_size": size,
        "pipeline_parallel_size": pipeline,
        "additional_config": {"enable_sfa_cp": True, "sfa_cp": section},
    }


def random_prompts(count: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, 512) for _ in range(draw.choice(lengths))] for _ in range(count)]


PROMPTS = random_prompts(20, [1, 2, 5, 17, 40, 90])
FEW = PROMPTS[:5]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Runs a function of `weight_ranks` in ranks, with the environment of SFA-CP."""

    def run(pool, count, function, **kwargs):
        target = function if ":" in function else f"weight_ranks:{function}"
        return pool.run(count, target, kwargs, SFA_CP_ENV)

    if not FULL_MATRIX:
        pool = request.getfixturevalue("pool")
        yield lambda *args, **kwargs: run(pool, *args, **kwargs)
    else:
        with RankPool(8, str(tmp_path_factory.mktemp("ranks8"))) as pool:
            yield lambda *args, **kwargs: run(pool, *args, **kwargs)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoint of a name: base, fp8, each with a second set of weights (base2, fp82), and the odd sizes."""
    folder, written = tmp_path_factory.mktemp("models"), {}
    made = {
        "base": (SHAPES["base"], 1, "none"),
        "base2": (SHAPES["base"], 2, "none"),
        "fp8": (SHAPES["fp8"], 1, "fp8"),
        "fp82": (SHAPES["fp8"], 2, "fp8"),
        "odd none": (ODD["none"], 1, "none"),
        "odd fp8": (ODD["fp8"], 1, "fp8"),
        "deep base": (DEEP["deep base"], 1, "none"),
        "deep fp8": (DEEP["deep fp8"], 1, "fp8"),
    }

    def path(name: str) -> str:
        if name not in written:
            shape, seed, quant = made[name]
            written[name] = folder / name.replace(" ", "-")
            write_checkpoint(written[name], shape, seed, quant)
        return str(written[name])

    return path


@pytest.fixture(scope="module")
def reference(ranks, models):
    """What the engine says where every rank holds everything: at the same sizes in the full matrix, else at 2."""
    made = {}

    def report(model: str, size: int, pipeline: int) -> dict:
        key = (model, size, pipeline) if FULL_MATRIX else (model, 2, 1)
        if key not in made:
            options = sfa_cp(*key[1:], weights="replicate")
            made[key] = ranks(key[1] * key[2], "serve", model=models(model), prompts=PROMPTS, **options)
        return {
            **{k: made[key][0][k] for k in ("alone", "mixed")},
            "names": {name for report in made[key] for name in report["names"]},
        }

    return report


@pytest.fixture(scope="module")
def fresh(ranks, models):
    """Tokens of a fresh engine in which every rank holds everything."""
    made = {}

    def answer(model: str) -> list:
        if model not in made:
            options = sfa_cp(2, weights="replicate")
            made[model] = ranks(2, "fresh", model=models(model), prompts=FEW, **options)[0]
        return made[model]

    return answer


def split_by_step(log) -> list[tuple[str, list[str]]]:
    """(mode, kinds of the collectives) of every forward."""
    steps: list[tuple[str, list[str]]] = []
    for kind, value in log:
        if kind == "step":
            steps.append((value, []))
        elif steps:
            steps[-1][1].append(kind)
    return steps


@pytest.mark.parametrize(("model", "source", "ahead", "size", "pipeline"), CASES, ids=str)
def test_tokens_of_every_source(ranks, models, reference, model, source, ahead, size, pipeline):
    options = sfa_cp(
        size, pipeline, weights=source, prefetch_step=ahead, **({"shared": ALL} if ahead == 1 else {})
    )
    reports = ranks(size * pipeline, "serve", model=models(model), prompts=PROMPTS, **options)
    want = reference(model, size, pipeline)
    for report in reports:
        assert report["alone"] == want["alone"]
        assert report["mixed"] == want["mixed"]
    # C23: nothing that loads, adapts or synchronises weights sees other names.
    assert {name for report in reports for name in report["names"]} == want["names"]
    layers = (SHAPES | DEEP)[model]["num_hidden_layers"] // pipeline
    for stage in range(pipeline):
        members = list(range(stage * size, (stage + 1) * size))
        for rank in members:
            report = reports[rank]
            # C13: a series has the layers and the ranks of its stage.
            span = list(range(stage * layers, (stage + 1) * layers))
            names = ALL if ahead == 1 else ["q_b_proj", "o_proj"]
            assert report["series"] == dict.fromkeys(names, (span, members, min(ahead + 1, layers)))
            # C19: the same collectives in the same order on every rank, profile run included.
            for part in ("start", "log"):
                assert report[part] == reports[members[0]][part]
            steps = split_by_step(report["log"])
            fetches = {
                mode: sum(kind.startswith("fetch") for m, kinds in steps if m == mode for kind in kinds)
                for mode, _ in steps
            }
            if source == "gather":  # C16
                assert fetches["tp"] == 0
            assert set(fetches) == ({"cp", "tp"} if source == "gather" else {"cp"})
            assert (fetches["cp"] > 0) == (ahead + 1 < layers)  # else the windows hold the whole series


def test_the_same_parameter_names_as_upstream(ranks, models, reference):
    for model in ("base", "fp8"):
        off = ranks(2, "serve", model=models(model), prompts=FEW, tensor_parallel_size=2)[0]
        assert set(off["names"]) == reference(model, 2, 1)["names"]
        assert [off["alone"], off["mixed"]] == [reference(model, 2, 1)[k][:5] for k in ("alone", "mixed")]


@pytest.mark.parametrize(
    ("quant", "source", "ahead", "size"),
    [
        ("none", "gather", 1, 4),
        ("none", "broadcast", 1, 2),
        ("fp8", "gather", 0, 2),
        ("fp8", "broadcast", 1, 4),
    ],
)
def test_memory_is_what_the_planner_says(ranks, models, quant, source, ahead, size):
    """C22: measured from the storages that live; a copy that nobody uses would count."""
    sizes = ODD[quant]
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    q = (heads * (sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]), sizes["q_lora_rank"])
    o = (sizes["hidden_size"], heads * sizes["v_head_dim"])
    shapes = [q, o, (q[0] // size, q[1]), (o[0], o[1] // size)]  # full, full, shard, shard
    if quant == "fp8":
        scales = [(-(-rows // 128), -(-columns // 128)) for rows, columns in shapes]
        kinds = [(s, torch.float8_e4m3fn) for s in shapes] + [(s, torch.float32) for s in scales]
    else:
        kinds = [(s, torch.float32) for s in shapes]
    full = (0, 1, 4, 5)
    layer = sum(math.prod(s) * dtype.itemsize for i, (s, dtype) in enumerate(kinds) if i in full)
    options = sfa_cp(size, weights=source, prefetch_step=ahead)
    reports = ranks(size, "memory", model=models(f"odd {quant}"), kinds=kinds, prompts=FEW, **options)

    formula = (-(-layers // size) if source == "broadcast" else layers / size) + ahead + 1
    kept = max(report["kept"] for report in reports)
    assert kept == pytest.approx(formula * layer, rel=0.01)
    for report in reports:
        assert report["reported"] == report["logged"] == report["kept"]
    config = release_config(sizes) | {
        "quantization_config": {"quant_method": "fp8"} if quant == "fp8" else None
    }
    plan = planned(ModelShape.from_config(config), Mode("sfa-cp", source, prefetch_step=ahead), size, 0)
    assert kept == pytest.approx(plan["q_b"] + plan["o"] + plan["windows"], rel=0.01)
    for report in reports:
        assert report["peak"] - report["kept"] <= layer


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_slow_link_hides_behind_compute(ranks, models, ahead):
    """A delay of half of each layer's compute: all of it is waited for without prefetch, none of it with."""
    prompts = random_prompts(24, [2000])
    options = sfa_cp(2, weights="gather", prefetch_step=ahead, shared=["q_b_proj"])
    report = ranks(2, "slow_link", model=models("base"), prompts=prompts, share=0.5, **options)[0]
    grown = (min(report["slow"]) - min(report["fast"])) / report["delay"]
    waited = statistics.median(report["waited"]) / report["delay"]
    print(f"prefetch_step {ahead}: step grew by {grown:.1%} of the delay, {waited:.1%} of it waited for")
    if ahead:
        assert grown < 0.1
        assert waited < 0.1
    else:
        assert grown > 0.85
        assert waited > 0.95


@pytest.mark.parametrize(
    ("model", "source", "shared"),
    [
        ("base", "gather", ALL),
        ("base", "broadcast", ["q_b_proj", "o_proj"]),
        ("fp8", "gather", ["q_b_proj", "o_proj"]),
        ("fp8", "broadcast", ALL),
    ],
)
def test_sleep_idle_abort_and_reload(ranks, models, fresh, model, source, shared):
    options = sfa_cp(2, weights=source, shared=shared)
    other = model + "2"
    reports = ranks(2, "lifecycle", model=models(model), other=models(other), prompts=FEW, **options)
    for report in reports:
        for moment in ("first", "slept 1", "slept 2", "idle", "after abort"):
            assert report[moment] == fresh(model), moment  # C36
        assert report["dropped 1"]
        assert report["dropped 2"]
        assert report["aborted"]
        assert report["reloaded"] == fresh(other) != fresh(model)
        assert not report["moved"]  # C18
        assert report["log"] == reports[0]["log"]  # C19


def test_reload_without_sfa_cp(ranks, models, fresh):
    """A quantised kv_b_proj is dequantised once; a reload has to do so again."""
    options = {"model": models("fp8"), "other": models("fp82"), "prompts": FEW}
    assert ranks(1, "reload", **options)[0] == fresh("fp82")


def test_two_models_in_one_process(ranks, models, fresh):
    options = sfa_cp(2, weights="gather")
    for report in ranks(
        2, "two_models", first=models("base"), second=models("base2"), prompts=FEW, **options
    ):
        assert report["answers"] == [fresh("base"), fresh("base2")] * 2
        assert report["same group"]  # C14
        assert report["apart"]


def test_every_replica_has_its_own_group(ranks, models, reference):
    """C13, C19: one request reaches both replicas here; each fetches from its own ranks."""
    options = sfa_cp(2, weights="broadcast") | {"data_parallel_size": 2}
    reports = ranks(4, "serve", model=models("base"), prompts=FEW, **options)
    want = reference("base", 2, 1)
    for rank, report in enumerate(reports):
        assert report["alone"] == want["alone"][:5]
        assert report["series"]["o_proj"][1] == ([0, 1] if rank < 2 else [2, 3])
        assert report["log"] == reports[rank // 2 * 2]["log"]


def test_the_mtp_layer_is_in_no_series(ranks, models, fresh, tmp_path):
    """A checkpoint with a multi-token-prediction layer, as releases have one, serves as if it had none."""
    source = models("base")
    config = release_config(SHAPES["base"] | {"num_nextn_predict_layers": 1})
    tensors = load_file(f"{source}/model.safetensors")
    last = f"model.layers.{SHAPES['base']['num_hidden_layers'] - 1}."
    extra = last.replace(
        str(SHAPES["base"]["num_hidden_layers"] - 1), str(SHAPES["base"]["num_hidden_layers"])
    )
    tensors |= {k.replace(last, extra): t.clone() for k, t in tensors.items() if k.startswith(last)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = sfa_cp(2, weights="broadcast")
    report = ranks(2, "serve", model=str(tmp_path), prompts=FEW, **options)[0]
    assert report["series"]["o_proj"][0] == [0, 1, 2, 3]
    assert not [name for name in report["names"] if name.startswith(extra)]
    assert ranks(2, "fresh", model=str(tmp_path), prompts=FEW, **options)[0] == fresh("base")


@pytest.mark.parametrize("source", ["gather", "broadcast"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_int8_with_scale_offset_and_bias(ranks, models, source, ahead):
    """C20, C21: tensors sharded along either dimension, a Parameter replaced after loading, bias added once."""
    options = sfa_cp(2, weights="gather")
    for error in ranks(
        2, "int8_method:forwards", model=models("base"), source=source, ahead=ahead, **options
    ):
        assert error < 1e-4


def test_an_idle_replica_fetches_nothing_while_another_decodes(ranks, models):
    """C16: its steps have no metadata, and must not make the busy one wait for weights."""
    options = sfa_cp(2, weights="gather", prefetch_step=0) | {"data_parallel_size": 2}
    reports = ranks(4, "idle_replica", model=models("base"), prompt=FEW[-1], **options)
    for rank, report in enumerate(reports):
        assert report["steps"] > 3
        assert set(report["modes"]) == {"tp"}, rank
        assert report["fetches"] == 0


def test_dummy_weights_are_replaced_in_parts(ranks, models, fresh):
    """C17, C23: a trainer starts from dummies and sends the weights in buckets."""
    options = sfa_cp(2, weights="gather") | {"load_format": "dummy"}
    for answers in ranks(2, "buckets", model=models("base"), prompts=FEW, **options):
        assert answers == fresh("base")


def test_dummy_weights_load_where_every_rank_has_a_shard(ranks, models):
    options = sfa_cp(2, weights="gather") | {"load_format": "dummy"}
    first, second = ranks(2, "fresh", model=models("base"), prompts=FEW, **options)
    assert first == second
    assert all(len(answer) == 4 for answer in first)


def config_only(folder, shape: dict, **quantisation) -> str:
    """A model without weights: what is refused is refused before any is read."""
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(
        json.dumps(release_config(shape) | {"quantization_config": quant | quantisation})
    )
    return str(folder)


@pytest.mark.parametrize("source", ["gather", "broadcast"])
class TestRefusedAtStart:
    """C24: on every rank, while the model is built."""

    def test_a_method_nobody_registered(self, ranks, tmp_path, source):
        model = config_only(tmp_path, SHAPES["fp8"])
        options = sfa_cp(2, weights=source) | {"forget": "BlockFp8LinearMethod"}
        for text in ranks(2, "refused", model=model, **options):
            assert text.startswith(
                "UnknownMethodError: shared weights do not know the layout of BlockFp8Linear"
            )
            assert '"replicate"' in text

    def test_layers_that_differ(self, ranks, tmp_path, source):
        ignored = ["model.layers.1.self_attn.o_proj"]
        model = config_only(tmp_path, SHAPES["fp8"], ignored_layers=ignored)
        for text in ranks(2, "refused", model=model, **sfa_cp(2, weights=source)):
            assert "one quantisation method for every layer's o_proj, not BlockFp8LinearMethod, Unq" in text


def test_blocks_that_the_shards_would_cut(ranks, tmp_path):
    """Half of o_proj's inputs at four ranks is half a block. The owner of a whole layer has no such limit."""
    shape = SHAPES["fp8"] | {"num_attention_heads": 8, "num_key_value_heads": 8}
    model = config_only(tmp_path, shape)
    for text in ranks(4, "refused", model=model, **sfa_cp(4, weights="gather")):
        assert text.startswith(
            "ValueError: Weight input_size_per_partition = 64 is not divisible by weight quant"
        )
        assert '"broadcast"' in text


def test_soak(request, models):
    """The short form of ci/soak.py; C29."""
    sys.path.append(str(Path(__file__).parents[2] / "ci"))
    from soak import soak

    print(soak(request.getfixturevalue("pool"), models("base"), 60, 1, "gather", 60))
