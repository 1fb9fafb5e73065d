"""The benchmark without engines: statistics, turns, resuming, calibration's arithmetic, plots, command line."""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_sfa_cp import bench, bench_http, calibrate, cli, plots, rank_calibration
from vllm_sfa_cp.bench import Plan
from vllm_sfa_cp.bench_report import (
    Configuration,
    configurations,
    machine,
    speedups,
    summarise,
    table,
    turns,
)
from vllm_sfa_cp.device_profile import DeviceProfile
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.launch import RankError
from vllm_sfa_cp.planner import ModelShape, ideal_speedup
from vllm_sfa_cp.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ModelShape.built_in("dsv32-128k/64")
BASE = ModelShape.built_in("base")
OFF, GATHER = Configuration("off"), Configuration("sfa-cp", "gather", "balanced")
RUN_KEYS = [
    "mode",
    "weights",
    "partition",
    "ranks",
    "prompt",
    "repeats",
    "wall_s",
    "wall_s_min",
    "wall_s_max",
    "cpu_s_max_rank",
    "cpu_s_mean_rank",
    "bytes",
    "weight_wait_s",
    "peak_bytes",
]
RATES = {
    "name": "d",
    "flops": {"default": 1e10},
    "memory_bandwidth": 1e10,
    "link_bandwidth": 1e9,
    "latency": 0,
}


def sample(wall, cpu=1.0, **changes):
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "bytes": 100,
        "bytes_by_kind": {"all_reduce": 100},
        "weight_wait_s": 0.0,
        "peak_bytes": 10,
        "kernels": {},
    } | changes


def summary(configuration=OFF, wall=1.0, ranks=2, prompt=64, cpu=1.0):
    return summarise(configuration, ranks, prompt, [[sample(wall, cpu)] * ranks])


def test_a_summary_is_of_the_slowest_busiest_and_fullest_rank():
    samples = [
        [sample(3.0, 1.0), sample(2.0, 2.0, bytes=300, bytes_by_kind={"recv": 300})],
        [sample(9.0, 4.0, weight_wait_s=0.5), sample(1.0, 2.0)],
        [sample(4.0, 2.0, peak_bytes=70), sample(5.0, 3.0, bytes_by_kind={"recv": 200})],
    ]
    run = summarise(GATHER, 2, 64, samples, peaks=[50, 60])
    assert list(run)[: len(RUN_KEYS)] == RUN_KEYS
    assert [run[key] for key in RUN_KEYS[:6]] == ["sfa-cp", "gather", "balanced", 2, 64, 3]
    assert [run[key] for key in ("wall_s", "wall_s_min", "wall_s_max")] == [5.0, 3.0, 9.0]
    assert [run[key] for key in ("cpu_s_max_rank", "cpu_s_mean_rank")] == [3.0, 2.5]
    assert [run[key] for key in ("bytes", "weight_wait_s", "peak_bytes")] == [100, 0.0, 70]
    assert run["spread"] == pytest.approx(6 / 5)
    assert run["bytes_by_kind"] == {"all_reduce": 100, "recv": 200}
    assert run["samples"] == {"wall_s": [3.0, 9.0, 5.0], "cpu_s_max_rank": [2.0, 4.0, 3.0]}
    assert "kernels" not in run
    assert summarise(GATHER, 2, 64, samples, peaks=[80])["peak_bytes"] == 80


def test_kernels_are_summarised_with_their_imbalance():
    ranks = [
        sample(1.0, kernels={"indexer_topk": 3.0}),
        sample(1.0, kernels={"indexer_topk": 1.0, "idle": 0.0}),
    ]
    found = summarise(GATHER, 2, 64, [ranks])["kernels"]
    assert found["indexer_topk"] == {"cpu_s_max_rank": 3.0, "cpu_s_mean_rank": 2.0, "max_over_mean": 1.5}
    assert found["idle"]["max_over_mean"] == 0.0


def test_speed_ups_compare_with_off_of_the_same_cell_only():
    runs = [
        summary(OFF, 3.0, prompt=64, cpu=5.0),
        summary(GATHER, 2.0, prompt=64, cpu=2.0),
        summary(Configuration("flashcomm1"), 3.0, prompt=64),
        summary(GATHER, 2.0, prompt=128),  # without its off
    ]
    rows = speedups(runs, SHAPE)
    assert [(r["mode"], r["prompt"]) for r in rows] == [("sfa-cp", 64), ("flashcomm1", 64)]
    first, second = rows
    assert {"mode", "ranks", "prompt", "wall", "cpu", "ideal"} <= set(first)
    assert (first["wall"], first["cpu"]) == (1.5, 2.5)
    assert first["ideal"] == ideal_speedup(SHAPE, 2, 64)
    assert second["ideal"] == 1.0
    assert "predicted" not in first
    assert speedups(runs, SHAPE, DeviceProfile.from_dict(RATES, "x"))[0]["predicted"] > 1
    assert speedups([runs[0], summary(GATHER, cpu=0.0)], SHAPE)[0]["cpu"] is None


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_turns_favour_nobody(count):
    rounds = [turns(count, repeat) for repeat in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert [order[0] for order in rounds] == [repeat % count for repeat in range(2 * count)]
    if count > 1:
        directions = [(order[1] - order[0]) % count for order in rounds]
        assert directions == [1, count - 1] * count


def test_configurations_are_the_product_without_repeats():
    found = configurations(("off", "sfa-cp", "off"), ("gather", "replicate"), ("balanced",))
    assert [c.label for c in found] == ["off", "sfa-cp/gather/balanced", "sfa-cp/replicate/balanced"]
    assert OFF.additional_config(cp_min_tokens=0) == {}
    assert Configuration("flashcomm1").additional_config() == {"enable_flashcomm1": True}
    section = GATHER.additional_config(cp_min_tokens=0)
    assert section["sfa_cp"] == {"weights": "gather", "partition": "balanced", "cp_min_tokens": 0}
    assert GATHER.planner_mode(3).prefetch_step == 3


def test_tables_line_up_and_say_where_there_is_nothing():
    runs = [summary(OFF, 2.0), summary(GATHER, 1.0), summary(OFF, 1.0, prompt=128) | {"bytes": None}]
    lines = table({"what": "prefill", "runs": runs, "speedup": speedups(runs, SHAPE)}).splitlines()
    assert len(lines) == 4
    assert lines[2].split()[:3] == ["sfa-cp/gather/balanced", "2", "64"]
    assert "2.00" in lines[2]
    assert lines[3].split().count("-") == 4
    assert "wall ms" in table({"what": "decode", "runs": runs, "speedup": []})


def test_machine_names_what_the_figures_depend_on():
    found = machine()
    assert found["cores"] >= 1
    assert {
        "cpu",
        "memory_gib",
        "system",
        "python",
        "torch",
        "vllm",
        "vllm-sfa-cp",
        "threads_per_rank",
    } <= set(found)


def plan(**changes):
    given = {
        "what": "prefill",
        "model": "base",
        "ranks": (2,),
        "prompts": (64,),
        "configurations": (OFF, GATHER),
    }
    return Plan(**given | changes)


def test_plans_that_no_engine_could_run():
    plan().check(BASE)
    with pytest.raises(UserError, match="8 heads do not divide over 3 ranks"):
        plan(ranks=(2, 3)).check(BASE)
    with pytest.raises(UserError, match="one rank has nothing to divide"):
        plan(ranks=(1,)).check(BASE)


def test_engines_get_room_for_the_longest_prompt_and_no_more():
    limits = bench.engine_limits(plan(chunk=512), GATHER, 1024)
    assert (limits["max_model_len"], limits["max_num_batched_tokens"]) == (1025, 512)
    assert limits["additional_config"]["sfa_cp"]["cp_min_tokens"] == 0
    assert bench.engine_limits(plan(), OFF, 1024)["max_num_batched_tokens"] == 1024
    given = plan(what="decode", prompts=(40, 100), repeats=2, warmup=1, steps=4, batch=3)
    decode = bench.engine_limits(given, GATHER, 100)
    assert decode["max_model_len"] == 100 + bench.decode_tokens(given, 100)
    assert "cp_min_tokens" not in decode["additional_config"]["sfa_cp"]  # decode runs as a server would
    assert decode["num_gpu_blocks_override"] * 16 >= 3 * decode["max_model_len"]


@pytest.mark.parametrize("chunk", [None, 8, 16, 4096])
@pytest.mark.parametrize(("batch", "length"), [(1, 64), (2, 64), (8, 2048), (8, 9), (8, 8), (8, 3)])
def test_the_first_request_of_a_batch_lasts_as_long_as_the_last(batch, length, chunk):
    """Against the scheduler's rule: running requests first, one token each, then prefill with what is left."""
    given = plan(what="decode", batch=batch, chunk=chunk, repeats=2, warmup=1, steps=4)
    budget = max(chunk or length, batch, 4)
    computed, produced = [0] * batch, [0] * batch
    while 0 in produced:
        left = budget
        for i in range(batch):
            tokens = min(left, 1 if produced[i] else length - computed[i])
            computed[i] += tokens
            left -= tokens
            produced[i] += computed[i] >= length and tokens > 0
    assert bench.decode_tokens(given, length) > produced[0] + 3 * 4


def test_prompts_are_fresh_and_repeatable():
    ids = bench.prompt(512, 1000, 7)
    assert ids == bench.prompt(512, 1000, 7) != bench.prompt(512, 1000, 8)
    assert min(ids) >= 2
    assert max(ids) < 512


@pytest.fixture
def measured(monkeypatch):
    """Cells that `bench.run` wants measured; each gets a summary at once."""
    asked = []

    def fake(given, folder, shape, ranks, lengths, finished, progress):
        assert Path(folder, "config.json").exists()
        for length in lengths:
            asked.append((ranks, length))
            finished([summary(c, ranks=ranks, prompt=length) for c in given.configurations])

    monkeypatch.setattr(bench, "_measure", fake)
    return asked


def test_a_report_has_its_parts_and_is_saved_after_every_cell(measured):
    saved = []
    report = bench.run(plan(prompts=(64, 128)), lambda r: saved.append(len(r["runs"])))
    assert {"machine", "model", "runs", "speedup"} <= set(report)
    assert report["model"] == {"name": "base", "dtype": "float32"}
    assert saved == [2, 4]
    assert [s["prompt"] for s in report["speedup"]] == [64, 128]
    json.dumps(report)


def test_resuming_keeps_whole_cells_and_measures_the_others(measured):
    earlier = bench.run(plan())
    half = summary(OFF, prompt=128, wall=7.0)  # a cell without one of its configurations is not whole
    report = bench.run(plan(prompts=(64, 128)), earlier={**earlier, "runs": [*earlier["runs"], half]})
    assert measured == [(2, 64), (2, 128)]
    assert [r["prompt"] for r in report["runs"]] == [64, 64, 128, 128]
    assert half not in report["runs"]


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"repeats": 9}, "options"), ({"dtype": "bfloat16"}, "model"), ({"what": "decode"}, "what")],
)
def test_resuming_another_measurement_is_refused(measured, changed, key):
    earlier = bench.run(plan())
    with pytest.raises(UserError, match=f"another '{key}'"):
        bench.run(plan(**changed), earlier=earlier)


def test_rounds_take_turns_and_warm_up_counts_for_memory_only(capsys):
    order = []

    def one(configuration, repeat):
        order.append((repeat, configuration))
        return [sample(10.0 if repeat == 0 else 1.0, peak_bytes=99 if repeat == 0 else 1)]

    with Progress(1.0) as progress:
        runs = bench._rounds(plan(repeats=2), BASE, 2, 64, one, progress)
    assert order == [(0, OFF), (0, GATHER), (1, GATHER), (1, OFF), (2, OFF), (2, GATHER)]
    assert [(r["wall_s_max"], r["peak_bytes"], r["repeats"]) for r in runs] == [(1.0, 99, 2)] * 2
    assert "warm-up" in capsys.readouterr().err


def test_a_rank_that_fails_is_an_error_with_its_log(monkeypatch):
    class Pool:
        def __init__(self, size, logs, limit):
            Path(logs, "rank0.log").write_text("Traceback\nValueError: inner reason\n")

        def run(self, *args):
            raise RankError("rank 1 failed:\nValueError: outer reason")

    monkeypatch.setattr(bench, "RankPool", lambda *args: nullcontext(Pool(*args)))
    with pytest.raises(UserError, match="2 ranks: ValueError: outer reason") as caught:
        bench.run(plan())
    assert "inner reason" in caught.value.hint


def test_reports_are_replaced_in_one_step(tmp_path):
    path = tmp_path / "report.json"
    bench.write(path, {"a": 1})
    bench.write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="cannot write"):
        bench.write(tmp_path / "no/report.json", {})


def test_progress_counts_work_and_guesses_the_rest(capsys, monkeypatch):
    clock = iter([0.0, 0.0, 30.0, 100.0, 130.0])  # made, begin, done, begin, done
    monkeypatch.setattr("vllm_sfa_cp.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Progress(10.0) as progress:
        progress.begin("first")
        progress.done(1, "first: ok")
        progress.begin("second")
        progress.done(9, "second: ok")
    assert capsys.readouterr().err.splitlines() == [
        "[ 10%] first: ok, about 4 min left",  # 30 s for a tenth
        "[100%] second: ok, about 0 s left",
    ]


def test_rank_shapes_hold_a_share_of_heads_and_width():
    cut = calibrate.rank_shape(SHAPE, 8)
    assert (cut.num_attention_heads, cut.intermediate_size, cut.moe_intermediate_size) == (8, 288, 72)
    assert cut.index_n_heads == SHAPE.index_n_heads
    with pytest.raises(UserError, match=r"num_attention_heads, .* do not divide over 5 ranks"):
        calibrate.rank_shape(SHAPE, 5)


def test_time_is_charged_to_the_innermost_part(monkeypatch):
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr(rank_calibration, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    timer = rank_calibration.PartTimer()
    with timer.part("rest"), timer.part("indexer_proj"), timer.part("q_b"):
        pass  # a rotary embedding inside the indexer is the indexer's
    assert timer.seconds == Counter(rest=20, indexer_proj=30)


def test_waiting_of_servers_is_read_by_rank():
    name = "vllm_sfa_cp_weight_wait_seconds_total"
    lines = [
        f"# TYPE {name} counter",
        f'{name}{{rank="0",series="q_b_proj"}} 0.25',
        f'{name}{{rank="0",series="o_proj"}} 0.5',
        f'{name}{{rank="1",series="o_proj"}} 1e-3',
        'other_total{rank="0"} 7',
    ]
    server = SimpleNamespace(get=lambda path: "\n".join(lines))
    assert bench_http._weight_wait(server) == {"0": 0.75, "1": 0.001}


WHATS = ("prefill", "decode", "serve")
SHORT = ["prefill", "--model", "base", "--prompt", "64"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["prefill"], "--model"),
        (["prefill", "--model", "base", "--modes", "off,fast"], "fast: choose from off, flashcomm1, sfa-cp"),
        (["prefill", "--model", "base", "--weights", "copy"], "copy: choose from"),
        (["prefill", "--model", "base", "--partition", "even"], "even: choose from"),
        (["prefill", "--model", "base", "--ranks", "0"], "is not a whole number from 1"),
        (["prefill", "--model", "base", "--ranks", "two"], "'two'"),
        (["prefill", "--model", "base", "--ranks", "1"], "one rank has nothing to divide"),
        (["prefill", "--model", "base", "--ranks", "3"], "8 heads do not divide over 3 ranks"),
        (["prefill", "--model", "base", "--prompt", "64,-1"], "is not a whole number from"),
        (["prefill", "--model", "base", "--warmup", "-1"], "is not a whole number from"),
        (["prefill", "--model", "base", "--dtype", "int8"], "invalid choice"),
        (["prefill", "--model", "nowhere"], "cannot read nowhere"),
        (["prefill", "--model", "base"], "8193 positions are needed, and the model has 4096"),
        (["serve", "--model", "base", "--prompt", "4090"], "4098 positions are needed"),
        (["decode", "--model", "base", "--prompt", "4096"], "positions are needed"),
        (["prefill", "--model", "base", "--prefetch-step", "9"], "from 0 to 8"),
        (["prefill", "--model", "base", "--prompt", "1,"], "'' is not a whole number from 1"),
        ([*SHORT, "--device-profile", "nowhere"], "cannot read nowhere"),
        ([*SHORT, "--resume"], "--resume continues a file"),
        (["prefill", "--model", "base", "--batch", "2"], "--batch"),
        (["serve", "--model", "base", "--kernels"], "--kernels"),
        (["calibrate", "--model", "base", "--ranks", "3"], "do not divide over 3 ranks"),
    ],
)
def test_usage_errors_exit_2_before_anything_starts(arguments, message, capsys, measured):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert measured == []


@pytest.mark.parametrize(("text", "message"), [("{", "cannot read"), ("[]", "not a benchmark report")])
def test_files_that_cannot_be_resumed(text, message, tmp_path, capsys, measured):
    path = tmp_path / "report.json"
    path.write_text(text)
    assert cli.main(["bench", *SHORT, "--resume", "--json", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == text


def test_data_goes_to_stdout_and_the_table_to_people(capsys, measured, tmp_path):
    arguments = ["bench", *SHORT, "--json"]
    for stdout in ([], ["-"]):
        assert cli.main([*arguments, *stdout]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["runs"][0]["mode"] == "off"
        assert "wall x" in err
    assert cli.main([*arguments, str(tmp_path / "r.json")]) == 0
    assert "wall x" in capsys.readouterr().out
    assert cli.main([*arguments, str(tmp_path / "r.json"), "--resume"]) == 0
    assert measured == [(2, 64)] * 3


def test_plots_without_matplotlib_name_a_mend_that_exists(monkeypatch, capsys, measured, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", *SHORT, "--plot", str(tmp_path / "x.png")]) == 1
    hint = capsys.readouterr().err.splitlines()[1]
    assert (ROOT / hint.split()[-1]).read_text().count("matplotlib==") == 2
    assert measured == []  # said before the measurement, not after it


@pytest.fixture
def report():
    runs = [
        summary(c, w, ranks, prompt)
        for ranks in (2, 4)
        for prompt in (64, 128)
        for c, w in ((OFF, 2), (GATHER, 1))
    ]
    model = {"name": "base", "dtype": "float32"}
    return {"what": "prefill", "model": model, "runs": runs, "speedup": speedups(runs, BASE)}


def test_plots_are_written_with_their_note(report, tmp_path):
    pytest.importorskip("matplotlib")
    profile = DeviceProfile.from_dict(RATES, "x")
    plots.draw_speedups(report, BASE, tmp_path / "speed.png", profile, note="digest-1")
    plots.draw_lines({"a": [(1, 2), (3, 4)]}, tmp_path / "lines.png", "x", "y", note="digest-2")
    plots.draw_bars({"g": {"a": 1.0, "b": 2.0}, "h": {"a": 1.0}}, tmp_path / "bars.png", "y", 1.1, "digest-3")
    for name, note in (("speed", b"digest-1"), ("lines", b"digest-2"), ("bars", b"digest-3")):
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert note in data


def test_times_of_a_decode_are_drawn_too(report, tmp_path):
    pytest.importorskip("matplotlib")
    plots.draw_times({**report, "what": "decode"}, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="nothing to plot"):
        plots.draw_times({"what": "decode", "runs": []}, tmp_path / "x.png")


def test_the_ideal_is_of_what_was_measured():
    runs = [summary(OFF), summary(GATHER), summary(Configuration("sfa-cp", "broadcast", "balanced"))]
    ideals = {what: [row["ideal"] for row in speedups(runs, SHAPE, what=what)] for what in WHATS}
    assert min(ideals["prefill"]) > 1
    assert ideals["decode"] == [1.0, None]  # decode steps of gather take the TP path
    assert ideals["serve"] == [None, None]


def test_plots_that_cannot_be_drawn(report, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="no speed-up to plot"):
        plots.draw_speedups({**report, "speedup": []}, BASE, tmp_path / "x.png")
    with pytest.raises(UserError, match="cannot write"):
        plots.draw_speedups(report, BASE, tmp_path / "no/x.png")
    with pytest.raises(UserError, match="cannot write"):
        plots.draw_lines({"a": [(1, 2)]}, tmp_path / "x.nonsense", "x", "y")


def test_work_of_a_cell_grows_with_everything_that_is_asked_for():
    base = bench._work(plan(), SHAPE, 2, 1024)
    assert bench._work(plan(repeats=11), SHAPE, 2, 1024) == pytest.approx(2 * base)
    assert bench._work(plan(configurations=(OFF,)), SHAPE, 2, 1024) == pytest.approx(base / 2)
    assert bench._work(plan(), SHAPE, 2, 4096) > 4 * base
    decode = replace(plan(), what="decode")
    assert bench._work(replace(decode, steps=16), SHAPE, 2, 64) == pytest.approx(
        2 * bench._work(decode, SHAPE, 2, 64)
    )
