"""What the overlay puts into vLLM in each process. Idempotent: vLLM may load general plugins repeatedly."""

from functools import cache

ARCHITECTURE = "DeepseekV32ForCausalLM"


@cache
def register_all() -> None:
    """Register the model classes and apply the monkey patches; a mismatching fingerprint raises PatchError."""
    from vllm import ModelRegistry

    from vllm_sfa_cp import patching

    patching.apply_all()
    ModelRegistry.register_model(ARCHITECTURE, "vllm_sfa_cp.model:SfaDeepseekV32ForCausalLM")
