"""A lean platform over `torch.npu`, for machines with torch_npu and without vllm-ascend. Not yet run on hardware.

Device, memory and worker hooks only: upstream's model runner does the rest, its `torch.cuda` calls redirected by
torch_npu's own `transfer_to_npu`. Eager mode, no graphs, no sleep mode. Where vllm-ascend is installed it owns the
platform, and the overlay only adds its attention backend (see `vllm_sfa_cp.platforms.choose`).
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.math_utils import round_up

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.weights import metrics

if TYPE_CHECKING:
    from vllm.attention.backends.registry import AttentionBackendEnum
    from vllm.config import VllmConfig

logger = init_logger("vllm.sfa_cp")

BLOCK_SIZE = 128  # keys per cache block where the user sets none, as on every other Ascend deployment


def problem() -> str | None:
    """Why torch_npu cannot be used in this process, in one line, or None. Imports torch_npu."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:  # a missing CANN shows up as any of the three
        return (
            f"torch_npu does not import: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
    if not _npu().is_available():
        return "torch_npu imports, but finds no device"
    return None


def _npu() -> Any:
    """`torch.npu`, which exists once torch_npu is imported."""
    return torch.npu  # type: ignore[attr-defined]


class SfaCpAscendPlatform(Platform):
    """Selected by the overlay's platform plugin."""

    _enum = PlatformEnum.OOT
    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    ray_device_key = "NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    dist_backend = "hccl"
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The sparse operators take 16-bit types only."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def import_kernels(cls) -> None:
        """Register torch_npu's operators; upstream's compiled kernels do not exist in this build."""
        importlib.import_module("torch_npu")

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return _npu().get_device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes."""
        return _npu().get_device_properties(device_id).total_memory

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Peak bytes allocated since the last call."""
        _npu().reset_peak_memory_stats(device)
        return _npu().max_memory_allocated(device)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        _npu().set_device(device)

    @classmethod
    def device_count(cls) -> int:
        return _npu().device_count()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum",
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        attn_type: str | None = None,
    ) -> str:
        """Qualified name of the backend for a layer. ValueError for anything but sparse MLA."""
        if use_mla and use_sparse:
            return "vllm_sfa_cp.backend.SfaBackend"
        raise ValueError(
            "the overlay's Ascend platform serves sparse MLA models (with index_topk in their config) only; "
            "install vllm-ascend for others"
        )

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Apply the defaults and validate the overlay's configuration. Runs in process 0 before any worker."""
        from vllm.config import CompilationMode, CUDAGraphMode

        given = vllm_config.additional_config
        if isinstance(given, dict):
            section = given.setdefault("sfa_cp", {})
            if isinstance(section, dict):
                section.setdefault("ops", "ascend")
        config = sfa_config.resolve(vllm_config)
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        if config.warning:
            logger.warning_once(config.warning)
        if config.enable_sfa_cp:
            metrics.make_dir()
        if vllm_config.model_config and vllm_config.model_config.dtype == torch.float32:
            raise ValueError(
                "the Ascend operators take bfloat16 or float16, not float32; set --dtype bfloat16"
            )
        if parallel.data_parallel_size > 1:
            raise ValueError(
                "the overlay's Ascend platform has no exchange of MoE tokens between data-parallel replicas; "
                "install vllm-ascend, or use --tensor-parallel-size alone"
            )
        if vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "the overlay's Ascend platform keeps the latents and the rotated keys of a layer as two planes of "
                "one cache, and a KV connector, which moves whole blocks, would tear them apart; install vllm-ascend "
                "for disaggregated prefill, or leave --kv-transfer-config out"
            )
        cache, compilation = vllm_config.cache_config, vllm_config.compilation_config
        if cache and not cache.block_size:
            cache.block_size = BLOCK_SIZE
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "vllm_sfa_cp.platforms.ascend_worker.SfaAscendWorker"
        # A forked child cannot use the device its parent has opened.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.custom_ops = ["none"]
        compilation.splitting_ops = []
        if config.mode != "off":
            # A full step is padded to a multiple of n, and the runner's buffers end at this number.
            n = parallel.tensor_parallel_size
            scheduler.max_num_batched_tokens = round_up(scheduler.max_num_batched_tokens, n)
