"""The CPU worker: upstream's, told that the residual stream is sharded."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.model import SfaDeepseekV32ForCausalLM
from vllm_sfa_cp.weights.link import create_weight_group
from vllm_sfa_cp.weights.resident import log_resident


class SfaCpuWorker(CPUWorker):
    """Selected by the platform through `worker_cls`."""

    def init_device(self) -> None:
        """See upstream. vLLM's own switch for sequence parallelism makes the runner pad steps to a multiple of
        the TP size and exchange sharded rows between pipeline stages. It is set here and not in the engine's
        configuration because there it would ask for a compiled graph pass, which does not run."""
        config = sfa_config.resolve(self.vllm_config)
        if config.mode != "off":
            self.vllm_config.compilation_config.pass_config.enable_sp = True
        super().init_device()
        if config.enable_sfa_cp and config.weights != "replicate":
            create_weight_group()

    def load_model(self, *args, **kwargs) -> None:
        """See upstream; logs what this rank keeps."""
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        if isinstance(model, SfaDeepseekV32ForCausalLM):
            model.loading_ended()
        log_resident(model)

    def sleep(self, level: int = 1) -> None:
        """See upstream. What the windows hold does not outlive the weights it was fetched from."""
        model = self.model_runner.get_model()
        if isinstance(model, SfaDeepseekV32ForCausalLM):
            model.model.weights_changed()
        super().sleep(level)
