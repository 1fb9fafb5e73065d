"""Run the Ascend kernels on a real NPU and print one JSON report for the support table.

    python ci/npu_smoke.py > report.json

Needs CANN, torch, torch_npu and this repository; no vLLM, no model. Compares each kernel with the reference
kernels on the CPU at DeepSeek-V3.2's sizes, times it, and looks at what the documentation leaves open: the order
and ties of the selection, what rows outside every sequence hold, whether slot -1 is skipped. Exit code 0 if every
check that decides correctness passed, 1 otherwise, 2 where torch_npu cannot be used.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from vllm_sfa_cp.ops.ascend import AscendOps, planes
from vllm_sfa_cp.ops.interface import Segments
from vllm_sfa_cp.ops.reference import ReferenceOps

HEADS, LATENT, ROPE, INDEX_HEADS, INDEX_WIDTH, TOPK, BLOCK = 128, 512, 64, 64, 128, 2048, 128
TOLERANCE = 2e-2  # relative L2, bfloat16


class Report:
    """Collects checks; a check that raises is a failed check, with what it raised."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.checks: list[dict[str, Any]] = []

    def check(self, name: str, decides: bool, run: Callable[[], dict[str, Any]]) -> None:
        """`run` returns details with a key "passed". decides: a failure means the kernel set must not be used."""
        entry: dict[str, Any] = {"name": name, "decides": decides}
        try:
            entry |= run()
        except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
            entry |= {"passed": False, "error": f"{type(error).__name__}: {error}"}
        self.checks.append(entry)
        print(f"{'ok  ' if entry['passed'] else 'FAIL'} {name}", file=sys.stderr)

    @property
    def passed(self) -> bool:
        return all(c["passed"] for c in self.checks if c["decides"])


def launch(rows: int, context: int, padding: int) -> dict[str, torch.Tensor]:
    """CPU tensors of one launch: a prefill chunk, an empty segment, a decode row, then padding rows."""
    generator = torch.Generator().manual_seed(7)
    counts, lengths = [rows - 1, 0, 1], [context, 0, context // 3]
    blocks = -(-context // BLOCK)
    table = torch.randperm(3 * blocks, generator=generator).view(3, blocks).int()

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    total = rows + padding
    return {
        "cu": torch.tensor(counts).cumsum(0).int(),
        "lens": torch.tensor(lengths).int(),
        "table": table,
        "q": randn(total, INDEX_HEADS, INDEX_WIDTH),
        "weights": randn(total, INDEX_HEADS).abs(),
        "keys": randn(3 * blocks * BLOCK, INDEX_WIDTH),
        "kv_c": randn(3 * blocks * BLOCK, LATENT),
        "k_pe": randn(3 * blocks * BLOCK, ROPE),
        "q_latent": randn(total, HEADS, LATENT),
        "q_pe": randn(total, HEADS, ROPE),
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.cpu().float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def within(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    error = relative(found, expected)
    return {"passed": error <= TOLERANCE, "relative_l2": error}


def run_checks(report: Report, npu: Any, rows: int, context: int, repeats: int) -> None:
    device, padding, scale = report.device, 5, 0.07
    data = launch(rows, context, padding)
    here = {name: tensor.to(device) for name, tensor in data.items()}
    ours, reference = AscendOps(ordered=True), ReferenceOps()
    slots = torch.arange(len(data["keys"]))
    blocks = len(slots) // BLOCK

    def caches(ops: Any, tensors: dict[str, torch.Tensor], where: str) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache = torch.zeros(blocks, BLOCK, INDEX_WIDTH, dtype=torch.bfloat16, device=where)
        kv_cache = torch.zeros(blocks, BLOCK, LATENT + ROPE, dtype=torch.bfloat16, device=where)
        ops.write_indexer_key(k_cache, tensors["keys"], slots.to(where))
        ops.write_latent(kv_cache, tensors["kv_c"], tensors["k_pe"], slots.to(where))
        return k_cache, kv_cache

    k_cache, kv_cache = caches(ours, here, device)
    k_reference, kv_reference = caches(reference, data, "cpu")
    segments = Segments(here["cu"], here["lens"], here["table"], context)
    cpu_segments = Segments(data["cu"], data["lens"], data["table"], context)
    expected = reference.indexer_topk(data["q"], data["weights"], k_reference, cpu_segments, TOPK)

    def timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
        result = run()
        npu.synchronize()
        walls = []
        for _ in range(repeats):
            start = time.perf_counter()
            result = run()
            npu.synchronize()
            walls.append((time.perf_counter() - start) * 1e3)
        return result, round(statistics.median(walls), 3)

    def writes() -> dict[str, Any]:
        latent, rope = planes(kv_cache, LATENT)
        stored = torch.cat((latent, rope), -1).cpu()
        same = torch.equal(stored, kv_reference) and torch.equal(k_cache.cpu(), k_reference)
        return {"passed": same}

    def skips() -> dict[str, Any]:
        before = k_cache.clone()
        ours.write_indexer_key(k_cache, here["keys"][:4], torch.full((4,), -1, device=device))
        return {"passed": torch.equal(before.cpu(), k_cache.cpu())}

    def select(ops: AscendOps) -> torch.Tensor:
        return ops.indexer_topk(here["q"], here["weights"], k_cache, segments, TOPK)

    def selection() -> dict[str, Any]:
        found, ms = timed(lambda: select(ours))
        found = found.cpu()
        valid = torch.equal(found >= 0, expected >= 0)
        common = sum(
            len(set(a.tolist()) & set(b.tolist()) - {-1}) for a, b in zip(found[:rows], expected[:rows])
        )
        share = common / int((expected >= 0).sum())
        return {"passed": valid and share > 0.98, "same_keys": share, "ms": ms}

    def order() -> dict[str, Any]:
        found, ms = timed(lambda: select(AscendOps(ordered=False)))
        ascending = bool((found[:rows, 1:] >= found[:rows, :-1]).cpu().all())
        return {"passed": True, "ascending_as_returned": ascending, "ms_without_sorting": ms}

    def ties() -> dict[str, Any]:
        flat = torch.zeros_like(k_cache)
        found = ours.indexer_topk(here["q"], here["weights"], flat, segments, TOPK).cpu()
        lowest = torch.arange(TOPK, dtype=torch.int32)
        return {"passed": torch.equal(found[rows - 2], lowest), "first": found[rows - 2, :8].tolist()}

    def attention() -> dict[str, Any]:
        cpu = reference.sparse_mla(
            data["q_latent"], data["q_pe"], kv_reference, expected, cpu_segments, scale
        )
        found, ms = timed(
            lambda: ours.sparse_mla(
                here["q_latent"], here["q_pe"], kv_cache, expected.to(device), segments, scale
            )
        )
        padded = found[rows:].cpu()
        return {**within(found, cpu), "padding_is_zero": not bool(padded.any()), "ms": ms}

    def value_up(heads: int) -> dict[str, Any]:
        w = torch.randn(heads, LATENT, 128).bfloat16()
        x = data["q_latent"][:, :heads].contiguous()
        cpu = torch.bmm(x.transpose(0, 1).float(), w.float()).transpose(0, 1).flatten(1)
        found, ms = timed(lambda: ours.value_up(x.to(device), w.to(device)))
        return {**within(found, cpu), "ms": ms}

    def fused() -> dict[str, Any]:
        kv, gamma = torch.cat((data["kv_c"], data["k_pe"]), -1)[:64], torch.rand(LATENT).bfloat16()
        angle = torch.rand(64, ROPE // 2) * 6
        cos, sin = (torch.cat((a, a), -1).bfloat16() for a in (angle.cos(), angle.sin()))
        q_pe = data["q_pe"][:64].contiguous()
        kv_c, k_pe = ours.norm_rope(
            *(t.to(device) for t in (kv, gamma, cos, sin)), torch.zeros_like(kv_cache), 1e-6
        )
        products = ours.rotate_query(*(t.to(device) for t in (q_pe, cos, sin))).float() @ k_pe.float().T
        turn = torch.complex(angle.cos(), angle.sin())

        def rotated(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * by).flatten(-2)

        plain = rotated(q_pe, turn[:, None]) @ rotated(kv[:, LATENT:], turn).T
        normed = torch.nn.functional.rms_norm(kv[:, :LATENT].float(), (LATENT,), gamma.float(), 1e-6)
        errors = {"norm": relative(kv_c, normed), "rope": relative(products, plain)}
        return {"passed": max(errors.values()) <= TOLERANCE, **errors}

    report.check("cache writes", True, writes)
    report.check("slot -1 writes nothing", True, skips)
    report.check("indexer selects the reference's keys", True, selection)
    report.check("order of the selection", False, order)
    report.check("ties go to the lowest position", False, ties)
    report.check("sparse attention equals the reference", True, attention)
    report.check("value projection, fused (64 heads)", True, lambda: value_up(64))
    report.check("value projection at 65536 (128 heads)", True, lambda: value_up(128))
    report.check("fused norm, rope and cache", False, fused)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        print(f"torch_npu cannot be imported: {error}", file=sys.stderr)
        return 2
    npu = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        print("torch_npu finds no device", file=sys.stderr)
        return 2
    npu.set_device(options.device)
    report = Report(f"npu:{options.device}")
    run_checks(report, npu, options.rows, options.context, options.repeats)
    cann = getattr(torch_npu.npu.utils, "get_cann_version", None)
    answer = {
        "passed": report.passed,
        "device": npu.get_device_name(options.device),
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "cann": str(cann()) if cann else None,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": options.rows,
        "context": options.context,
        "checks": report.checks,
    }
    print(json.dumps(answer, indent=1))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
