"""docs/performance.md: what it says follows from the reports, and it notices when it no longer does."""

import json
import sys
from pathlib import Path

import pytest
from vllm_sfa_cp.bench_report import machine
from vllm_sfa_cp.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))
import performance_doc
from performance_reports import COMMANDS, Reports, bars, command

PROFILE = {
    "name": "test",
    "flops": {"default": 3e10},
    "memory_bandwidth": 1e10,
    "link_bandwidth": 1e9,
    "latency": 1e-4,
}


def run(mode="sfa-cp", prompt=8192, ranks=8, wall=1.0, **changes):
    sfa = mode == "sfa-cp"
    return {
        "mode": mode,
        "weights": "gather" if sfa else None,
        "partition": "balanced" if sfa else None,
        "ranks": ranks,
        "prompt": prompt,
        "repeats": 5,
        "wall_s": wall,
        "wall_s_min": wall * 0.9,
        "wall_s_max": wall * 1.1,
        "cpu_s_max_rank": wall / 4,
        "cpu_s_mean_rank": wall / 5,
        "bytes": 10**6,
        "weight_wait_s": 0.01 * wall,
        "peak_bytes": prompt * 10_000,
    } | changes


def report(what, *runs, **more):
    model = {"name": "dsv32-128k/64", "dtype": "float32"}
    options = {"what": what, "dtype": "float32", "chunk": None, "prefetch_step": 1, "repeats": 5}
    return {
        "what": what,
        "machine": machine(),
        "model": model,
        "options": options,
        "runs": list(runs),
        "speedup": [],
    } | more


@pytest.fixture
def docs(tmp_path):
    """A docs folder, and a function that puts reports into it."""
    (tmp_path / "performance").mkdir()

    def put(**reports):
        for name, content in reports.items():
            (tmp_path / "performance" / f"{name}.json").write_text(json.dumps(content))
        return Reports(tmp_path / "performance")

    return tmp_path, put


def verdicts(reports):
    return {bar.text: (bar.measured, bar.holds) for bar in bars(reports)}


def found(reports, part):
    return next(value for text, value in verdicts(reports).items() if part in text)


def test_without_reports_nothing_is_claimed(docs):
    _, put = docs
    assert {holds for _, holds in verdicts(put()).values()} == {None}
    text = performance_doc.document(put())
    assert "Nothing has been measured yet." in text
    assert f"Not measured: {', '.join(COMMANDS)}." in text
    assert all(f"{command_line} --json docs/performance/" in text for command_line in COMMANDS.values())


@pytest.mark.parametrize(("plain", "holds"), [(3.36, True), (3.35, False)])
def test_speed_up_bars(docs, plain, holds):
    _, put = docs
    reports = put(prefill=report("prefill", run("off", wall=plain), run()))
    assert found(reports, "8 ranks: at least 3.36 x plain TP, wall") == (f"{plain:.2f} x", holds)
    assert found(reports, "4 ranks")[1] is None


def test_other_configurations_and_reports_do_not_turn_a_bar(docs):
    _, put = docs
    cells = [run("off", wall=3.0), run(), run(weights="replicate", wall=0.5)]
    better = report("prefill", run("off", wall=3.5), run())
    reports = put(prefill=report("prefill", *cells), again=better)
    assert found(reports, "at least 3.36 x plain TP, wall") == ("3.00 x; again: 3.50 x", False)


def test_decode_is_judged_in_wall_and_in_cpu_seconds(docs):
    _, put = docs
    busy = run(prompt=2048, batch=8, cpu_s_max_rank=0.3)
    reports = put(decode=report("decode", run("off", 2048, batch=8), busy))
    assert found(reports, "plain TP's, wall")[1]
    assert found(reports, "plain TP's, CPU") == ("1.200 x (8 ranks, 2,048 tokens)", False)


def test_planner_bar_names_the_worst_cell(docs):
    _, put = docs
    cells = [
        run(mode, prompt, wall=w) for prompt in (4096, 8192) for mode, w in (("off", 3.0), ("sfa-cp", 1.0))
    ]
    reports = put(prefill=report("prefill", *cells), profile=PROFILE)
    worst = max(reports.speedups("prefill"), key=lambda r: abs(r["predicted"] / r["wall"] - 1))
    error = abs(worst["predicted"] / worst["wall"] - 1)
    measured, holds = found(reports, "planner's speed-up")
    assert measured == f"{error * 100:.1f} % (8 ranks, {worst['prompt']:,} tokens)"
    assert holds == (error <= 0.1)


def test_balance_stands_beside_contiguous(docs):
    _, put = docs

    def kernels(ratio):
        return {"indexer_topk": {"cpu_s_max_rank": ratio, "cpu_s_mean_rank": 1.0, "max_over_mean": ratio}}

    runs = [run(kernels=kernels(1.04)), run(partition="contiguous", kernels=kernels(1.87))]
    reports = put(balance=report("prefill", run("off", kernels=kernels(1.0)), *runs))
    assert found(reports, "indexer's CPU") == ("1.040 (8 ranks, 8,192 tokens); `contiguous`: 1.870", True)
    asked = command("balance", reports.found["balance"])
    assert asked.endswith("--partition balanced,contiguous --kernels --json docs/performance/balance.json")


def test_waiting_decode_and_memory_bars(docs):
    _, put = docs
    late = run(weight_wait_s=0.03)
    reports = put(
        prefill=report("prefill", run("off", wall=4.0), late, run(prompt=4096, peak_bytes=30 * 10**6)),
        decode=report("decode", run("off", 2048, batch=8, wall=1.0), run(prompt=2048, batch=8, wall=1.06)),
    )
    assert found(reports, "waiting") == ("3.0 % (8 ranks, 8,192 tokens)", False)
    assert found(reports, "decode step") == ("1.060 x (8 ranks, 2,048 tokens)", False)
    assert found(reports, "memory of a step") == ("T^1.45 (8 ranks, 8,192 tokens)", False)
    short, middle, last = (run(prompt=4096 * k, peak_bytes=k * 10**7) for k in (1, 2, 4))
    middle["peak_bytes"] *= 1.3  # the ends count: a single doubling is noisy
    reports = put(prefill=report("prefill", run("off", wall=4.0), short, middle, last))
    assert found(reports, "memory of a step") == ("T^1.00 (8 ranks, 16,384 tokens)", True)


def hf(*rows):
    """rows: (prompt, our seconds, {tokens a call or None for all: transformers' seconds or None})."""
    runs, gains = [], []
    for prompt, ours, theirs in rows:
        runs.append(run("off", prompt, 1, ours) | {"engine": "vllm-sfa-cp", "chunk": None})
        for chunk, wall in theirs.items():
            other = run("off", prompt, 1, wall or 1.0) | {"engine": "transformers", "chunk": chunk}
            missing = {"wall_s": None, "peak_bytes": None, "reason": "no memory"}
            runs.append(other | ({"tokens": 6, "tokens_agree": 5} if wall else missing))
            gain = wall and wall / ours
            gains.append({"prompt": prompt, "chunk": chunk, "wall": gain, "cpu": gain})
    about = {"transformers": "5.24.0", "torch": "2.13.0", "attention": "sdpa", "threads": 2}
    return report("hf", *runs, speedup=gains, transformers=about)


def test_transformers_bars(docs):
    _, put = docs
    reports = put(hf=hf((4096, 1.0, {None: 3.5}), (8192, 2.0, {None: 8.0})))
    assert found(reports, "transformers") == ("3.50 x", True)
    assert found(reports, "more than at 4,096") == ("4.00 x", True)
    reports = put(hf=hf((4096, 1.0, {None: 2.9}), (8192, 2.0, {None: None})))
    assert found(reports, "transformers") == ("2.90 x", False)
    assert found(reports, "more than at 4,096") == ("transformers: no memory", None)


def test_the_faster_way_to_feed_transformers_counts(docs):
    _, put = docs
    given = hf((4096, 1.0, {None: 6.0, 1024: 4.0}), (8192, 2.0, {None: None, 1024: 9.0}))
    reports = put(hf=given)
    assert found(reports, "transformers") == ("4.00 x", True)
    assert found(reports, "more than at 4,096") == ("4.50 x", True)
    text = performance_doc.document(reports)
    assert "| 4,096 | 1.00 | 0.900 .. 1.10 | 1,024 | 4.00 | 3.60 .. 4.40 | 4.00 |" in text
    assert "| 8,192 | 2.00 | 1.80 .. 2.20 | all | no memory | - | - |" in text
    assert "8,192 tokens, all a call: no memory" in text


def kernel(name, **more):
    shares = {"mm": 0.8, "select_topk": 0.01, "rest": 0.19}
    return {"kernel": name, "launch": "prefill", "ms": 2.0, "gflops": 50.0, "parts": shares} | more


def everything():
    prefill = [
        run(m, p, n, w * p / 1e3)
        for n in (2, 8)
        for p in (4096, 8192)
        for m, w in (("off", 3), ("sfa-cp", 1))
    ]
    return {
        "prefill": report("prefill", *prefill),
        "decode": report("decode", run("off", 2048, batch=8), run(prompt=2048, batch=8)),
        "hf": hf((4096, 1.0, {None: 3.5})),
        "profile": PROFILE,
        "modes": report("prefill", run("off", wall=3.0), run("flashcomm1", wall=2.9), run()),
        "kernels": report("kernels", kernel("indexer_topk"), kernel("sparse_mla", heads=8), topk=128)
        | {"gemm_gflops": 100.0},
        "serve": report(
            "serve",
            run(batch=8, first_s=1.0, request_s=2.0, tokens_per_s=3.0, cpu_s_mean_rank=None, bytes=None),
        ),
    }


def test_tables_have_as_many_cells_as_columns(docs):
    _, put = docs
    text = performance_doc.document(put(**everything()))
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 10
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "Not measured: balance, again, memory." in text
    assert "| sparse_mla, 8 heads | prefill | 2.00 | 50.0 | 50.0 % | mm 80%, rest 19% |" in text


def test_stale_documents_and_pictures_are_noticed(docs, capsys):
    pytest.importorskip("matplotlib")
    folder, put = docs
    reports = everything()
    put(**reports)
    arguments = ["--docs", str(folder)]
    assert performance_doc.main([*arguments, "--check"]) == 1
    assert performance_doc.main(arguments) == 0
    assert performance_doc.main([*arguments, "--check"]) == 0
    assert sorted(path.name for path in (folder / "performance").glob("*.png")) == ["hf.png", "speedup.png"]
    reports["hf"]["runs"][0]["wall_s"] = 0.5
    put(**reports)
    capsys.readouterr()
    assert performance_doc.main([*arguments, "--check"]) == 1
    stale = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert stale == ["error: performance.md is stale", "error: hf.png is stale"]


def test_reports_that_cannot_be_used_are_named(docs, capsys):
    folder, put = docs
    with pytest.raises(UserError, match=r"prefill.json is of 'mine'"):
        bars(put(prefill=report("prefill", run(), model={"name": "mine", "dtype": "float32"})))
    (folder / "performance/prefill.json").write_text("{")
    assert performance_doc.main(["--docs", str(folder), "--check"]) == 1
    assert "cannot read" in capsys.readouterr().err
