"""Attention metadata of one step and its builder.

One metadata object serves a step's every layer: the tensors for the TP path (all rows, this rank's heads) and,
in a CP step, this rank's share of the rows. It is built once per step per attention group; nothing in it
aliases the runner's persistent buffers, so the next step may be prepared while this one runs.
"""

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backends.utils import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.ops.interface import Segments
from vllm_sfa_cp.partition import Partition, make_partition


@dataclass(frozen=True)
class CpMetadata:
    """This rank's part of a CP step.

    partition:    who owns which row.
    segments:     the local rows, for indexer and attention.
    slot_mapping: [T_pad] int64 in gathered order, -1 for padding: a cache write takes the all-gather's rows as
                  they come.
    """

    partition: Partition
    segments: Segments
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class SfaMetadata:
    """num_actual_tokens: T. slot_mapping: [T] int64. segments: one per request. cp: None in a TP step."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    segments: Segments
    cp: CpMetadata | None


class SfaMetadataBuilder(AttentionMetadataBuilder[SfaMetadata]):
    """Builds `SfaMetadata`. Per-step cost is O(requests) plus O(T) only for a balanced partition's order."""

    reorder_batch_threshold = None

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.config = sfa_config.resolve(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SfaMetadata:
        """See the base class. The block table, lengths and slots handed out are this step's own copies."""
        common = common_attn_metadata
        tokens, batch = common.num_actual_tokens, common.num_reqs
        starts = common.query_start_loc[: batch + 1].clone()
        seq_lens = common.seq_lens[:batch].clone()
        table = common.block_table_tensor[:batch].clone()
        slots = common.slot_mapping[:tokens].clone()
        cp = None
        if self.config.enable_sfa_cp and not self.config.takes_tp_path(tokens, common.max_query_len):
            group = get_tp_group()
            partition = make_partition(
                starts,
                seq_lens,
                num_tokens=tokens,
                rank=group.rank_in_group,
                size=group.world_size,
                kind=self.config.partition,
                query_start_loc_cpu=common.query_start_loc_cpu[: batch + 1],
            )
            segments = Segments(
                partition.cu_query_lens,
                partition.key_lens,
                table[partition.request_of_segment],
                common.max_seq_len,
            )
            cp = CpMetadata(partition, segments, partition.gathered_slots(slots))
        whole = Segments(starts[1:], seq_lens, table, common.max_seq_len)
        return SfaMetadata(tokens, slots, whole, cp)


class IndexerMetadataBuilder(AttentionMetadataBuilder[None]):
    """The indexer's cache needs a builder of its own kind to get cache blocks, but no metadata: the indexer
    reads that of its attention layer, so that both always describe the same batch."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> None:
        return None
