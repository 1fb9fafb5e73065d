"""Which platform this process runs on, and why. Decided once; `doctor` prints the reason."""

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

CPU = "vllm_sfa_cp.platforms.cpu.SfaCpCpuPlatform"
ASCEND = "vllm_sfa_cp.platforms.ascend.SfaCpAscendPlatform"
OURS = "sfa_cp"


@dataclass(frozen=True)
class Choice:
    """qualname: platform class to hand to vLLM, None to step aside. active: whether the overlay registers its
    models and patches in this process. reason: one sentence for people."""

    qualname: str | None
    active: bool
    reason: str

    @property
    def device(self) -> str:
        """`npu` or `cpu`: which monkey patches and kernels apply."""
        return "cpu" if self.qualname == CPU else "npu"


@cache
def choose() -> Choice:
    """Look at what is installed and decide. Imports no accelerator package to do so."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and OURS not in allowed.split(","):
        return Choice(None, False, f"VLLM_PLUGINS={allowed} does not name {OURS}")
    npu = importlib.util.find_spec("torch_npu") is not None
    others = sorted({p.name for p in entry_points(group="vllm.platform_plugins")} - {OURS})
    if allowed is not None:
        others = [name for name in others if name in allowed.split(",")]
    if others:
        if npu and "ascend" in others:
            return Choice(None, True, "vllm-ascend owns the platform; the overlay adds its SFA backend to it")
        return Choice(None, False, f"platform plugin {', '.join(others)} is installed and owns the platform")
    if npu:
        return Choice(ASCEND, True, "torch_npu is installed and no other NPU platform plugin is")
    from vllm.platforms import builtin_platform_plugins

    for name, detect in builtin_platform_plugins.items():
        if name != "cpu" and detect() is not None:
            return Choice(None, False, f"vLLM detected the {name} platform")
    return Choice(CPU, True, "no accelerator and no other platform plugin was found")
