"""What the overlay puts into vLLM in each process. Idempotent: vLLM may load general plugins repeatedly."""

from functools import cache

ARCHITECTURE = "DeepseekV32ForCausalLM"


@cache
def register_all(platform: str) -> None:
    """Register the model classes and apply the monkey patches meant for `platform` (cpu or npu); a mismatching
    fingerprint raises PatchError."""
    from vllm import ModelRegistry

    from vllm_sfa_cp import patching

    patching.apply_all(platform)
    # The class, not its name: vLLM would inspect a name in a subprocess that imports everything once more,
    # 10 s and more per process, where importing the module here takes 1.5 s.
    from vllm_sfa_cp.layers import fp8_config
    from vllm_sfa_cp.layers.fp8 import BlockFp8LinearMethod
    from vllm_sfa_cp.model import SfaDeepseekV32ForCausalLM
    from vllm_sfa_cp.weights import travel

    if platform == "cpu":  # an NPU has its own kernels and methods
        fp8_config.register()
    travel.register_method(BlockFp8LinearMethod)
    ModelRegistry.register_model(ARCHITECTURE, SfaDeepseekV32ForCausalLM)
