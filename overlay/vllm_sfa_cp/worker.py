"""The CPU worker: upstream's, told that the residual stream is sharded."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_sfa_cp import config as sfa_config


class SfaCpuWorker(CPUWorker):
    """Selected by the platform through `worker_cls`."""

    def init_device(self) -> None:
        """See upstream. vLLM's own switch for sequence parallelism makes the runner pad steps to a multiple of
        the TP size and exchange sharded rows between pipeline stages. It is set here and not in the engine's
        configuration because there it would ask for a compiled graph pass, which does not run."""
        if sfa_config.resolve(self.vllm_config).mode != "off":
            self.vllm_config.compilation_config.pass_config.enable_sp = True
        super().init_device()
