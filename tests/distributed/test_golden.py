"""Hugging Face's tokens and logits in every mode: the whole engine, on real ranks."""

import pytest
from vllm_sfa_cp.serving import SFA_CP_ENV as FLASHCOMM1

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CACHE = {"block_size": 16, "num_gpu_blocks_override": 256}
CHUNKED = {"max_num_batched_tokens": 32, "max_num_seqs": 9, "enable_prefix_caching": False}


def sfa_cp(**section) -> dict:
    return {"additional_config": {"enable_sfa_cp": True, "sfa_cp": section}}


CONTIGUOUS = sfa_cp(weights="replicate", partition="contiguous")
BALANCED = sfa_cp(weights="replicate", partition="balanced")
#: Every step with a prefill is a CP step, however short; decode steps take the TP path.
GATHER = sfa_cp(weights="gather", cp_min_tokens=0)

MODES = [
    pytest.param(1, {}, {}, id="off-1"),
    pytest.param(2, {}, {}, id="off-2"),
    pytest.param(4, {}, {}, id="off-4"),
    pytest.param(2, FLASHCOMM1, {}, id="flashcomm1-2"),
    pytest.param(4, FLASHCOMM1, {}, id="flashcomm1-4"),
    pytest.param(2, FLASHCOMM1, CONTIGUOUS, id="contiguous-2"),
    pytest.param(4, FLASHCOMM1, CONTIGUOUS, id="contiguous-4"),
    pytest.param(2, FLASHCOMM1, BALANCED, id="balanced-2"),
    pytest.param(4, FLASHCOMM1, BALANCED, id="balanced-4"),
    pytest.param(4, FLASHCOMM1, GATHER, id="gather-4"),
]


def run(pool, golden, ranks, env, plan, **options) -> list[dict]:
    kwargs = {"tensor_parallel_size": ranks, "model": golden.model, "prompts": golden.prompts, **CACHE}
    return pool.run(ranks, "scenarios:rounds", {**kwargs, "plan": plan, **options}, env)


def check(golden, reports, entry) -> None:
    """Tokens equal and logits within 2e-4 on every rank that answered."""
    worst = 0.0
    for report in reports:
        assert [a["tokens"] for a in report[entry]] == golden.tokens, entry
        for answer, logits in zip(report[entry], golden.logits, strict=True):
            worst = max(worst, float((answer["logits"] - logits).abs().max()))
    print(f"{entry}: logits within {worst:.1e}")
    assert worst < 2e-4


def check_kinds(log, options) -> None:
    """CP steps are of the partition that was asked for, and no step is one where none was."""
    section = options.get("additional_config", {}).get("sfa_cp")
    kinds = {step.kind for step in log}
    if section is None:
        assert kinds == {None}
    elif section["weights"] == "replicate":
        assert kinds == {section["partition"]}
    else:
        assert kinds == {"balanced", None}


@pytest.mark.parametrize(("ranks", "env", "options"), MODES)
def test_whole_prompts_and_cached_prefixes(pool, golden, ranks, env, options):
    plan = ["together", "together again", "alone"]
    reports = run(pool, golden, ranks, env, plan, max_num_seqs=9, **options)
    for entry in plan:
        check(golden, reports, entry)
    first = reports[0]["steps"]["together"][0]
    assert first.tokens == sum(map(len, golden.prompts))
    assert first.tokens % 2 == 1  # no number of ranks divides it
    # C8: exactly max_num_seqs requests in a step of an odd number of tokens.
    assert reports[0]["steps"]["together"][1].query_lens == [1] * 9
    assert all(len(step.query_lens) == 1 for step in reports[0]["steps"]["alone"])
    assert [a["cached"] for a in reports[0]["together"]] == [0] * 9
    # All full blocks but the one with the last token, which has to be computed.
    want = [(len(p) - 1) // 16 * 16 for p in golden.prompts]
    assert [a["cached"] for a in reports[0]["together again"]] == want
    assert max(want) == 688
    for report in reports:
        check_kinds([step for entry in plan for step in report["steps"][entry]], options)
    if options is BALANCED:  # two prompts are long enough to be cut into zig and zag blocks
        blocks = first.segment_rows[:18]
        assert sum(n > 0 for n in blocks) == 4


@pytest.mark.parametrize(("ranks", "env", "options"), MODES)
def test_chunks_of_32_tokens(pool, golden, ranks, env, options):
    """Prefills of one request and decodes of others share steps. C28: nothing depends on being first."""
    plan = ["together", "together second"] if options is BALANCED else ["together"]
    reports = run(pool, golden, ranks, env, plan, **CHUNKED, **options)
    for entry in plan:
        check(golden, reports, entry)
        for report in reports:
            log = report["steps"][entry]
            assert max(step.tokens for step in log) == 32
            assert sum(step.mixed for step in log) > 10
            assert any(step.tokens % 2 for step in log)
            check_kinds(log, options)
    if len(plan) == 2:
        for first, second in zip(*(reports[0][entry] for entry in plan), strict=True):
            assert first["logits"].equal(second["logits"])


PARALLEL = [
    pytest.param({}, {"pipeline_parallel_size": 2}, id="off-pp2"),
    pytest.param(FLASHCOMM1, {"pipeline_parallel_size": 2}, id="flashcomm1-pp2"),
    pytest.param(FLASHCOMM1, {**BALANCED, "pipeline_parallel_size": 2}, id="balanced-pp2"),
    pytest.param(FLASHCOMM1, {**GATHER, "pipeline_parallel_size": 2}, id="gather-pp2"),
    pytest.param({}, {"enable_expert_parallel": True}, id="off-ep"),
    pytest.param(FLASHCOMM1, {"enable_expert_parallel": True}, id="flashcomm1-ep"),
    pytest.param(FLASHCOMM1, {**BALANCED, "enable_expert_parallel": True}, id="balanced-ep"),
]


@pytest.mark.parametrize(("env", "options"), PARALLEL)
def test_pipeline_and_expert_parallel(pool, golden, env, options):
    stages = options.get("pipeline_parallel_size", 1)
    kwargs = {"tensor_parallel_size": 2, "model": golden.model, "prompts": golden.prompts, **CACHE}
    kwargs |= {"plan": ["together", "together again"], "max_num_batched_tokens": 257, **options}
    reports = pool.run(2 * stages, "scenarios:rounds", kwargs, env)
    for entry in kwargs["plan"]:
        check(golden, reports, entry)


@pytest.mark.parametrize("experts", [False, True], ids=["tp", "ep"])
@pytest.mark.parametrize(
    ("env", "options"),
    [pytest.param({}, {}, id="off"), pytest.param(FLASHCOMM1, BALANCED, id="balanced")],
)
def test_two_replicas_one_of_them_idle(pool, golden, env, options, experts):
    """C3: the idle replica runs a dummy step for each of the other's, and the answers are one replica's."""
    kwargs = {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": experts,
        "model": golden.model,
        "prompts": golden.prompts,
        "busy_replica": 1,
        "plan": ["together", "alone"],
        **CACHE,
        **options,
    }
    reports = pool.run(4, "scenarios:rounds", kwargs, env)
    for entry in kwargs["plan"]:
        check(golden, reports[2:], entry)
        assert [report[entry] for report in reports[:2]] == [[], []]
        assert not any(report["steps"][entry] for report in reports[:2])
    busy = sum(len(log) for log in reports[2]["steps"].values())
    assert [report["idle"] for report in reports] == [busy, busy, 0, 0]


@pytest.mark.parametrize(
    ("ranks", "env", "options"),
    [MODES[0], MODES[1], pytest.param(2, FLASHCOMM1, BALANCED, id="balanced-2")],
)
def test_bfloat16_stays_near(pool, golden, ranks, env, options):
    """Prompts longer than index_topk are reported only: a near-tie may select another key. At 31 tokens one token
    stands between two groups of experts; Hugging Face's own model in bfloat16 is 1.0e-1 away there."""
    report = run(pool, golden, ranks, env, ["together"], dtype="bfloat16", **options)[0]
    far = {}
    for prompt, answer, logits in zip(golden.prompts, report["together"], golden.logits, strict=True):
        far[len(prompt)] = float((answer["logits"] - logits).norm() / logits.norm())
    print("relative distance by prompt length:", {n: f"{x:.1e}" for n, x in far.items()})
    assert all(x < (1e-1 if n == 31 else 5e-2) for n, x in far.items() if n <= 32)
