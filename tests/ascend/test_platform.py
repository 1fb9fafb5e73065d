"""The Ascend platform against a stand-in for `torch.npu`: what it sets, what it refuses, and that it stays lazy."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm_sfa_cp.platforms import ascend

ROOT = Path(__file__).resolve().parents[2]


def settings(**changes: Any) -> Any:
    values = {
        "dtype": torch.bfloat16,
        "data_parallel_size": 1,
        "additional_config": {},
        "kv": None,
        **changes,
    }
    return SimpleNamespace(
        additional_config=values["additional_config"],
        model_config=SimpleNamespace(dtype=values["dtype"]),
        cache_config=SimpleNamespace(block_size=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2049),
        compilation_config=SimpleNamespace(),
        kv_transfer_config=values["kv"],
        parallel_config=SimpleNamespace(
            data_parallel_size=values["data_parallel_size"], tensor_parallel_size=4, worker_cls="auto"
        ),
    )


@pytest.fixture(autouse=True)
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlay's configuration without an engine behind it."""
    monkeypatch.setattr(ascend.sfa_config, "resolve", lambda c: ascend.sfa_config.parse(c.additional_config))
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_FLASHCOMM1", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def test_defaults() -> None:
    config = settings(additional_config={"enable_sfa_cp": True})
    ascend.SfaCpAscendPlatform.check_and_update_config(config)
    assert config.additional_config["sfa_cp"]["ops"] == "ascend"
    assert config.cache_config.block_size == 128
    assert config.scheduler_config.max_num_batched_tokens == 2052
    assert config.parallel_config.worker_cls.endswith("SfaAscendWorker")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "bfloat16"),
        ({"data_parallel_size": 2}, "vllm-ascend"),
        ({"kv": object()}, "tear them apart"),
    ],
)
def test_refuses_what_it_does_not_support(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ascend.SfaCpAscendPlatform.check_and_update_config(settings(**change))


def test_serves_sparse_mla_only() -> None:
    ask = ascend.SfaCpAscendPlatform.get_attn_backend_cls
    assert ask(None, 576, torch.bfloat16, None, 128, True, False, True).endswith("SfaBackend")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vllm-ascend"):
        ask(None, 128, torch.bfloat16, None, 128, False, False, False)  # type: ignore[arg-type]


def test_says_why_torch_npu_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert "torch_npu" in (ascend.problem() or "")
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: False), raising=False)
    assert ascend.problem() == "torch_npu imports, but finds no device"
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    assert ascend.problem() is None


def test_nothing_of_torch_npu_is_imported_without_need() -> None:
    code = (
        "import sys, vllm_sfa_cp, vllm_sfa_cp.plugin, vllm_sfa_cp.ops, vllm_sfa_cp.platforms;"
        "vllm_sfa_cp.ops.get_ops('reference');"
        "print([m for m in sys.modules if m.startswith('torch_npu')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "overlay", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_package_costs_nothing() -> None:
    """Beyond vLLM's own import: neither torch nor vLLM nor any kernel set comes with it."""
    code = (
        "import sys, time; begin = time.perf_counter(); import vllm_sfa_cp;"
        "print(time.perf_counter() - begin < 0.05, 'torch' in sys.modules, 'vllm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "overlay", capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False"]
