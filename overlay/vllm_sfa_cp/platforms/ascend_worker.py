"""The Ascend worker: upstream's, on `npu` devices. Not yet run on hardware."""

import gc

import torch
from torch_npu.contrib import transfer_to_npu  # noqa: F401  (redirects torch.cuda for upstream's runner)
from vllm.model_executor import set_random_seed
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.model import SfaDeepseekV32ForCausalLM
from vllm_sfa_cp.weights.link import create_weight_group
from vllm_sfa_cp.weights.resident import log_resident


class AscendModelRunner(GPUModelRunner):
    """Upstream's runner without what only CUDA has."""

    def _init_device_properties(self) -> None:
        """Upstream sizes cascade attention by the number of multiprocessors; it is off here."""
        self.num_sms = None


class SfaAscendWorker(Worker):
    """Selected by the platform through `worker_cls`."""

    def init_device(self) -> None:
        """Open this rank's device, join the group, take the memory snapshot, make the runner."""
        config = sfa_config.resolve(self.vllm_config)
        if config.mode != "off":
            # Makes the runner pad steps to a multiple of the TP size and exchange sharded rows between stages.
            self.vllm_config.compilation_config.pass_config.enable_sp = True
        self.device = torch.device(f"npu:{self.local_rank}")
        current_platform.set_device(self.device)
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.cuda.empty_cache()
        self.init_snapshot = MemorySnapshot()
        share = self.cache_config.gpu_memory_utilization
        self.requested_memory = self.init_snapshot.total_memory * share
        if self.init_snapshot.free_memory < self.requested_memory:
            raise ValueError(
                f"free device memory is {self.init_snapshot.free_memory / 2**30:.1f} GiB, less than "
                f"--gpu-memory-utilization {share} of {self.init_snapshot.total_memory / 2**30:.1f} GiB"
            )
        self.model_runner = AscendModelRunner(self.vllm_config, self.device)
        self.model_runner.cascade_attn_enabled = False
        if config.enable_sfa_cp and config.weights != "replicate":
            create_weight_group()

    def load_model(self, *args, **kwargs) -> None:
        """See upstream; logs what this rank keeps."""
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        if isinstance(model, SfaDeepseekV32ForCausalLM):
            model.loading_ended()
        log_resident(model)
