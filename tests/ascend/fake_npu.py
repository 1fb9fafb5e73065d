"""Stands in for torch_npu in other processes.

Put tests/ on PYTHONPATH and set VLLM_SFA_CP_TORCH_NPU=ascend.fake_npu.
"""

from typing import Any

from ascend.contract import build


def __getattr__(name: str) -> Any:
    return getattr(build(), name)
