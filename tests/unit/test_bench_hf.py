"""ci/bench_hf.py without either engine: what a length that does not fit looks like, and who is asked for what."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))
import bench_hf
from bench_hf import OURS, THEIRS


def sample(wall, token=5):
    return {
        "wall_s": wall,
        "cpu_s": 2 * wall,
        "bytes": 0,
        "bytes_by_kind": {},
        "weight_wait_s": 0.0,
        "peak_bytes": 1000,
        "kernels": {},
        "token": token,
    }


class Sides:
    """Stands for both engines; transformers answers with `theirs`, round by round."""

    def __init__(self, theirs):
        self.theirs, self.asked = list(theirs), []

    def run(self, ranks, target, kwargs, env):
        self.asked.append((OURS, tuple(kwargs["prompt"])))
        return [sample(1.0)]

    def prefill(self, ids, trim, chunk):
        self.asked.append((THEIRS if chunk is None else chunk, tuple(ids)))
        return self.theirs.pop(0)


def compare(theirs, repeats=2, chunks=(None,)):
    sides = Sides(theirs)
    with Progress(1.0) as progress:
        return sides, bench_hf.compare(sides, sides, 512, 64, repeats, chunks, progress)


def test_both_sides_take_turns_with_the_same_fresh_prompts():
    sides, (mine, other) = compare([sample(9.0), sample(3.0), sample(4.0, token=6)])
    assert [side for side, _ in sides.asked] == [OURS, THEIRS, THEIRS, OURS, OURS, THEIRS]
    prompts = [ids for _, ids in sides.asked]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3] != prompts[4] == prompts[5]
    assert (mine["engine"], other["engine"]) == (OURS, THEIRS)
    assert (other["wall_s"], other["wall_s_min"], other["wall_s_max"]) == (
        3.5,
        3.0,
        4.0,
    )  # without the warm-up
    assert (other["tokens"], other["tokens_agree"]) == (3, 2)
    assert bench_hf.speedups([mine, other]) == [{"prompt": 64, "chunk": None, "wall": 3.5, "cpu": 3.5}]


@pytest.mark.parametrize("fits", [0, 1])
def test_a_length_without_memory_is_null_with_the_reason(fits):
    sides, runs = compare([*[sample(3.0)] * fits, {"error": "can't allocate memory"}])
    mine, other = runs
    assert [side for side, _ in sides.asked].count(THEIRS) == fits + 1  # not asked again
    assert mine["repeats"] == 2
    assert other["wall_s"] is None
    assert other["reason"] == "can't allocate memory"
    gains = bench_hf.speedups(runs)
    assert gains == [{"prompt": 64, "chunk": None, "wall": None, "cpu": None}]
    assert "can't allocate memory" in bench_hf.table({"runs": runs, "speedup": gains})


def test_what_does_not_fit_in_one_call_is_measured_in_chunks():
    """A chunk as long as the prompt would be the same call again."""
    sides, runs = compare([{"error": "no memory"}, *[sample(2.0)] * 3], chunks=(None, 16, 64))
    assert Counter(side for side, _ in sides.asked) == {OURS: 3, 16: 3, THEIRS: 1}
    gains = bench_hf.speedups(runs)
    assert [(row["chunk"], row["wall"]) for row in gains] == [(None, None), (16, 2.0)]
    text = bench_hf.table({"runs": runs, "speedup": gains})
    assert "no memory" in text
    assert "same for 3 of 3 prompts" in text


def test_a_missing_environment_is_asked_for_with_its_recipe(capsys):
    assert bench_hf.main(["--prompt", "64"]) == 2
    hint = capsys.readouterr().err.splitlines()[1]
    assert "pip install torch==2.13.0 transformers==5.24.0" in hint


def test_an_interpreter_that_cannot_serve_is_named(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(UserError, match="cannot run"):
        bench_hf.HuggingFace(tmp_path / "none", "x", 1, log)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named transformers >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match="no module named transformers"):
        bench_hf.HuggingFace(broken, "x", 1, log)
    assert bench_hf._available_bytes() > 0
