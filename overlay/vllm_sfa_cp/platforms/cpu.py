"""The CPU platform: upstream's, made to run sparse MLA without compiled kernels, and nothing a user must set."""

import os
from typing import TYPE_CHECKING

import psutil
import torch
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.math_utils import round_up

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.ops import get_ops
from vllm_sfa_cp.platforms import cpu_defaults
from vllm_sfa_cp.weights import metrics

if TYPE_CHECKING:
    from vllm.attention.backends.registry import AttentionBackendEnum
    from vllm.config import VllmConfig

logger = init_logger("vllm.sfa_cp")


class SfaCpCpuPlatform(CpuPlatform):
    """Differences from upstream's CPU platform, each with its reason beside it."""

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
        """Qualified name of the backend for a layer."""
        if use_mla and use_sparse:
            return "vllm_sfa_cp.backend.SfaBackend"
        return super().get_attn_backend_cls(
            selected_backend,
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            attn_type,
        )

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Upstream's has no data-parallel dispatch for MoE layers."""
        return "vllm_sfa_cp.platforms.cpu_communicator.SfaCpuCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Apply the defaults and validate the overlay's configuration. Runs in process 0 before any worker."""
        # vllm.config itself asks for the platform while it is being imported.
        from vllm.config import CompilationMode, CUDAGraphMode

        config = sfa_config.resolve(vllm_config)
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        cache, compilation = vllm_config.cache_config, vllm_config.compilation_config
        asked = sfa_config.parse(vllm_config.additional_config)
        if asked.mode != "off" and parallel.tensor_parallel_size == 1:
            logger.warning_once("%s needs tensor_parallel_size > 1; running as off", asked.mode)

        if config.warning:
            logger.warning_once(config.warning)
        get_ops(config.ops)  # refuses here, not in a worker, what cannot be imported

        ranks = parallel.world_size * parallel.data_parallel_size_local
        cpu_defaults.set_thread_variables(ranks)
        if config.enable_sfa_cp:
            metrics.make_dir()

        chunked, batched = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching = cache.enable_prefix_caching
        launcher = parallel.distributed_executor_backend
        given_cache_space = "VLLM_CPU_KVCACHE_SPACE" in os.environ
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "vllm_sfa_cp.worker.SfaCpuWorker"
        super().check_and_update_config(vllm_config)
        # Upstream switches these off for MLA on CPUs; the sparse backend supports them.
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, batched
        cache.enable_prefix_caching = prefix_caching
        if vllm_config.model_config and vllm_config.model_config.use_mla:  # it has just logged the contrary
            logger.info(
                "chunked prefill and prefix caching stay as they were asked for: %s, %s",
                chunked,
                prefix_caching,
            )
        if (
            launcher == "external_launcher"
        ):  # one engine per rank, started by the caller: needs nothing of "mp"
            parallel.distributed_executor_backend = launcher
        if not given_cache_space:
            cache.cpu_kvcache_space_bytes = cpu_defaults.cache_bytes(psutil.virtual_memory().total, ranks)

        # The compiled custom ops do not exist in this build, and tracing the reference kernels gains nothing.
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.custom_ops = ["none"]
        compilation.splitting_ops = []
        if config.mode != "off":
            # A full step is padded to a multiple of n, and the runner's buffers end at this number.
            n = parallel.tensor_parallel_size
            scheduler.max_num_batched_tokens = round_up(scheduler.max_num_batched_tokens, n)
            logger.info(
                "mode %s over %d ranks: partition %s, weights %s",
                config.mode,
                n,
                config.partition,
                config.weights,
            )
