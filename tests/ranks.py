"""The rank processes that engine tests share; see `vllm_sfa_cp.launch`."""

from vllm_sfa_cp.launch import RankError, RankPool
from vllm_sfa_cp.serving import free_port

__all__ = ["RankError", "RankPool", "free_port"]
