"""Block FP8: the format, and vLLM's own linear and MoE layers with the reference methods in them."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from vllm_sfa_cp.block_fp8 import BLOCK, QUANTIZATION_CONFIG, dequantise, quantise
from vllm_sfa_cp.serving import free_port

vllm = pytest.importorskip("vllm")


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(7)


def randn(rng, *shape):
    return torch.randn(shape, generator=rng)


class TestFormat:
    @pytest.mark.parametrize("shape", [(128, 128), (256, 384), (96, 256), (1, 1), (130, 257)])
    def test_error_of_every_element_is_within_the_format(self, rng, shape):
        w = randn(rng, *shape) * 3
        q, s = quantise(w)
        assert q.shape == w.shape
        assert q.dtype == torch.float8_e4m3fn
        assert s.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        wide = s.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
        # Three mantissa bits: half a step is 2**-4 of the value, or half a subnormal step.
        assert ((dequantise(q, s) - w).abs() <= torch.maximum(w.abs() * 2**-4, wide * 2**-10)).all()

    def test_each_block_uses_its_own_scale(self):
        w = torch.ones(256, 256)
        w[:128, 128:] = 1e-3
        w[128:, :128] = 1e3
        w[128:, 128:] = 0
        q, s = quantise(w)
        torch.testing.assert_close(dequantise(q, s), w, rtol=1e-6, atol=0)
        assert s[1, 1] == 1

    def test_every_code(self):
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        number = ~codes.float().isnan()
        assert int(number.sum()) == 254
        got = dequantise(codes[None], torch.ones(1, 2))[0]
        assert torch.equal(got[number], codes.float()[number])
        assert torch.equal(got[number].signbit(), codes.float()[number].signbit())

    def test_rounds_once(self, rng):
        q, s = quantise(randn(rng, 160, 200))
        assert torch.equal(dequantise(q, s, torch.bfloat16), dequantise(q, s).bfloat16())


@pytest.fixture(scope="module")
def engine():
    """vLLM's process groups and a current config, in this one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm_sfa_cp.layers.fp8_config import register

    register()
    config = VllmConfig()
    with set_current_vllm_config(config):
        method = f"tcp://127.0.0.1:{free_port()}"
        parallel_state.init_distributed_environment(1, 0, method, 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield config
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@contextmanager
def as_rank(rank, size):
    """Layers built inside believe to be one rank of a larger tensor-parallel group."""
    import vllm.distributed as distributed
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    with ExitStack() as stack:
        for module in (linear, parameter, distributed):
            for name, value in (
                ("get_tensor_model_parallel_rank", rank),
                ("get_tensor_model_parallel_world_size", size),
            ):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda value=value: value))
        yield


def quant_config():
    from vllm_sfa_cp.layers.fp8_config import BlockFp8Config

    return BlockFp8Config.from_config(QUANTIZATION_CONFIG)


def load(layer, weight, scale, *shard):
    for param, value in ((layer.weight, weight), (layer.weight_scale_inv, scale)):
        param.weight_loader(param, value, *shard)


class TestSelection:
    def test_block_checkpoints_are_ours_and_others_upstreams(self):
        from vllm.model_executor.layers.quantization import get_quantization_config
        from vllm_sfa_cp.layers.fp8_config import NAME, BlockFp8Config, register

        register()
        register()
        assert get_quantization_config(NAME) is BlockFp8Config
        take = BlockFp8Config.override_quantization_method
        assert take(QUANTIZATION_CONFIG, None) == NAME
        assert take(QUANTIZATION_CONFIG, "fp8") == NAME
        assert take({"quant_method": "fp8", "activation_scheme": "dynamic"}, None) is None
        assert take({"quant_method": "awq", "weight_block_size": [128, 128]}, None) is None

    def test_static_activations_are_refused(self):
        from vllm_sfa_cp.layers.fp8_config import BlockFp8Config

        with pytest.raises(ValueError, match="static"):
            BlockFp8Config.from_config({**QUANTIZATION_CONFIG, "activation_scheme": "static"})

    def test_ignored_layers_stay_plain(self, engine):
        from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
        from vllm_sfa_cp.layers.fp8_config import BlockFp8Config

        config = BlockFp8Config.from_config({**QUANTIZATION_CONFIG, "ignored_layers": ["a.b"]})
        layer = ReplicatedLinear(128, 128, bias=False, quant_config=config, prefix="a.b")
        assert isinstance(layer.quant_method, UnquantizedLinearMethod)


class TestLinear:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_replicated(self, engine, rng, dtype):
        from vllm.model_executor.layers.linear import ReplicatedLinear

        q, s = quantise(randn(rng, 200, 320))
        layer = ReplicatedLinear(320, 200, bias=False, quant_config=quant_config(), prefix="wk")
        load(layer, q, s)
        layer.quant_method.process_weights_after_loading(layer)
        x = randn(rng, 5, 320).to(dtype)
        out, _ = layer(x)
        assert out.dtype == dtype
        torch.testing.assert_close(out, x @ dequantise(q, s, dtype).T)
        assert {n for n, _ in layer.named_parameters()} == set(layer.quant_method.weight_tensors)

    def test_identity_gives_the_dequantised_weight(self, engine, rng):
        """MLA derives W_UK and W_UV by multiplying kv_b_proj with an identity."""
        from vllm.model_executor.layers.linear import ColumnParallelLinear

        q, s = quantise(randn(rng, 512, 96))
        layer = ColumnParallelLinear(96, 512, bias=False, quant_config=quant_config(), prefix="kv_b_proj")
        load(layer, q, s)
        assert torch.equal(layer.quant_method.apply(layer, torch.eye(96)).T, dequantise(q, s))

    def test_chunks_change_nothing(self, engine, rng, monkeypatch):
        from vllm_sfa_cp.layers import fp8

        q, s = quantise(randn(rng, 700, 256))
        x = randn(rng, 2, 3, 256)
        whole = fp8.fp8_linear(x, q, s, (BLOCK, BLOCK))
        monkeypatch.setattr(fp8, "CHUNK_ELEMENTS", 2 * 128 * 256)
        torch.testing.assert_close(fp8.fp8_linear(x, q, s, (BLOCK, BLOCK)), whole)
        assert whole.shape == (2, 3, 700)

    def test_merged_with_ragged_last_part(self, engine, rng):
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear

        parts = [quantise(randn(rng, n, 256)) for n in (256, 96)]
        layer = MergedColumnParallelLinear(
            256, [256, 96], bias=False, quant_config=quant_config(), prefix="qkv_a", disable_tp=True
        )
        for i, part in enumerate(parts):
            load(layer, *part, i)
        x = randn(rng, 4, 256)
        torch.testing.assert_close(layer(x)[0], x @ torch.cat([dequantise(*p) for p in parts]).T)

    @pytest.mark.parametrize("size", [2, 4])
    def test_tensor_parallel_shards(self, engine, rng, size):
        from vllm.model_executor.layers.linear import (
            ColumnParallelLinear,
            MergedColumnParallelLinear,
            RowParallelLinear,
        )

        column, row = quantise(randn(rng, 512, 200)), quantise(randn(rng, 200, 512))
        gate, up = quantise(randn(rng, 512, 200)), quantise(randn(rng, 512, 200))
        x, wide = randn(rng, 3, 200), randn(rng, 3, 512)
        outs, merged, total = [], [], torch.zeros(3, 200)
        for rank in range(size):
            with as_rank(rank, size):
                options = {"bias": False, "quant_config": quant_config()}
                c = ColumnParallelLinear(200, 512, prefix=f"q_b.{rank}", **options)
                m = MergedColumnParallelLinear(200, [512, 512], prefix=f"gate_up.{rank}", **options)
                r = RowParallelLinear(512, 200, prefix=f"o.{rank}", reduce_results=False, **options)
            load(c, *column)
            load(m, *gate, 0)
            load(m, *up, 1)
            load(r, *row)
            outs.append(c(x)[0])
            merged.append(m(x)[0].chunk(2, dim=-1))
            part = 512 // size
            total += r(wide[:, rank * part : (rank + 1) * part])[0]
        torch.testing.assert_close(torch.cat(outs, -1), x @ dequantise(*column).T)
        for i, half in enumerate((gate, up)):
            torch.testing.assert_close(torch.cat([m[i] for m in merged], -1), x @ dequantise(*half).T)
        torch.testing.assert_close(total, wide @ dequantise(*row).T, rtol=1e-4, atol=1e-4)

    def test_shards_that_cut_blocks_are_refused(self, engine):
        from vllm.model_executor.layers.linear import ColumnParallelLinear

        with as_rank(0, 2), pytest.raises(ValueError, match="not divisible"):
            ColumnParallelLinear(128, 128, bias=False, quant_config=quant_config(), prefix="q_b")

    @pytest.mark.parametrize("missing", ["weight", "weight_scale_inv"])
    def test_a_missing_tensor_is_named(self, engine, rng, missing):
        from vllm.model_executor.layers.linear import ReplicatedLinear

        q, s = quantise(randn(rng, 128, 128))
        layer = ReplicatedLinear(128, 128, bias=False, quant_config=quant_config(), prefix="l.wk")
        param = layer.weight if missing != "weight" else layer.weight_scale_inv
        param.weight_loader(param, q if missing != "weight" else s)
        with pytest.raises(ValueError, match=rf"misses l\.wk\.{missing}"):
            layer.quant_method.process_weights_after_loading(layer)


def expert_outputs(x, w13, w2):
    gate, up = (x @ w13.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


class TestMoE:
    EXPERTS, HIDDEN, WIDTH, TOP = 4, 160, 256, 2

    def build(self, rng, prefix):
        from vllm.model_executor.layers.fused_moe import FusedMoE

        layer = FusedMoE(
            self.EXPERTS,
            self.TOP,
            self.HIDDEN,
            self.WIDTH,
            use_grouped_topk=True,
            num_expert_group=2,
            topk_group=1,
            scoring_func="sigmoid",
            e_score_correction_bias=torch.linspace(-0.1, 0.1, self.EXPERTS),
            quant_config=quant_config(),
            prefix=prefix,
        )
        weights = []
        for e in range(self.EXPERTS):
            parts = {s: quantise(randn(rng, self.WIDTH, self.HIDDEN)) for s in ("w1", "w3")}
            parts["w2"] = quantise(randn(rng, self.HIDDEN, self.WIDTH))
            weights.append(parts)
            for shard, (q, s) in parts.items():
                name = "w2" if shard == "w2" else "w13"
                for suffix, value in (("weight", q), ("weight_scale_inv", s)):
                    param = getattr(layer, f"{name}_{suffix}")
                    layer.weight_loader(param, value, f"{name}_{suffix}", shard, e)
        layer.quant_method.process_weights_after_loading(layer)
        return layer, weights

    def expected(self, layer, weights, x, logits, local=None):
        scores = logits.sigmoid()
        biased = scores + layer.e_score_correction_bias
        groups = biased.view(-1, 2, self.EXPERTS // 2)
        keep = groups.topk(2, -1).values.sum(-1).argmax(-1)
        out = torch.zeros_like(x)
        for t in range(x.shape[0]):
            base = int(keep[t]) * (self.EXPERTS // 2)
            ids = base + groups[t, keep[t]].topk(self.TOP).indices
            total = scores[t, ids].sum()
            for e in ids.tolist():
                if local is None or e in local:
                    w = {k: dequantise(*v) for k, v in weights[e].items()}
                    y = expert_outputs(x[t], torch.cat([w["w1"], w["w3"]]), w["w2"])
                    out[t] += scores[t, e] / total * y
        return out

    def apply(self, layer, x, logits, expert_map=None):
        return layer.quant_method.apply(
            layer,
            x,
            logits,
            self.TOP,
            True,
            use_grouped_topk=True,
            topk_group=1,
            num_expert_group=2,
            scoring_func="sigmoid",
            e_score_correction_bias=layer.e_score_correction_bias,
            expert_map=expert_map,
        )

    def test_matches_a_loop_over_tokens(self, engine, rng):
        layer, weights = self.build(rng, "moe.plain")
        x, logits = randn(rng, 9, self.HIDDEN), randn(rng, 9, self.EXPERTS)
        want = self.expected(layer, weights, x, logits)
        torch.testing.assert_close(self.apply(layer, x, logits), want, rtol=1e-4, atol=1e-3)
        assert self.apply(layer, x[:0], logits[:0]).shape == (0, self.HIDDEN)

    def test_expert_parallel_ranks_add_up(self, engine, rng):
        layer, weights = self.build(rng, "moe.ep")
        x, logits = randn(rng, 9, self.HIDDEN), randn(rng, 9, self.EXPERTS)
        for local in ((0, 1), (2, 3)):
            expert_map = torch.full((self.EXPERTS,), -1, dtype=torch.int32)
            expert_map[list(local)] = torch.arange(2, dtype=torch.int32)
            rank = torch.nn.Module()
            for name in layer.quant_method.weight_tensors:
                rank.register_buffer(name, getattr(layer, name)[list(local)])
            rank.quant_method, rank.e_score_correction_bias = (
                layer.quant_method,
                layer.e_score_correction_bias,
            )
            want = self.expected(layer, weights, x, logits, local)
            torch.testing.assert_close(self.apply(rank, x, logits, expert_map), want, rtol=1e-4, atol=1e-3)

    def test_widths_that_cut_blocks_are_refused(self, engine):
        from vllm.model_executor.layers.fused_moe import FusedMoE

        with pytest.raises(ValueError, match="enable-expert-parallel"):
            FusedMoE(4, 2, 128, 64, quant_config=quant_config(), prefix="moe.narrow")
