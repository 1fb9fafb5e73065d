"""The full q_b/kv_b/o projection on every rank."""

from vllm.model_executor.layers.linear import ReplicatedLinear


class FullLinear(ReplicatedLinear):
    """vLLM's ReplicatedLinear under the attribute names that MLA reads off a parallel linear."""

    def __init__(self, input_size: int, output_size: int, *args, **kwargs) -> None:
        super().__init__(input_size, output_size, *args, **kwargs)
        self.input_size_per_partition = input_size
        self.output_size_per_partition = output_size
