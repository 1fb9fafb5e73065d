"""SFA-CP: sparse flash attention with context parallelism for vLLM v0.12.0.

Importing this package imports neither torch nor vLLM; the entry points in `plugin` do that when vLLM asks.
"""

__version__ = "0.1.0"
SUPPORTED_VLLM = "0.12.0"
