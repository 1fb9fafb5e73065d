"""Which weight source a server gets, and which loaders it may use."""

from types import SimpleNamespace

import pytest
from vllm_sfa_cp.config import ConfigError, resolve

ON = {"enable_sfa_cp": True, "enable_flashcomm1": True}


def resolved(section=None, role=None, load_format="auto", **top):
    parallel = SimpleNamespace(
        tensor_parallel_size=2,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_dbo=False,
    )
    vllm_config = SimpleNamespace(
        additional_config=ON | top | {"sfa_cp": section or {}},
        parallel_config=parallel,
        model_config=None,
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=role and SimpleNamespace(kv_role=role),
        load_config=SimpleNamespace(load_format=load_format),
    )
    return resolve(vllm_config, {})


@pytest.mark.parametrize(
    ("role", "source"),
    [("kv_producer", "broadcast"), ("kv_consumer", "gather"), ("kv_both", "gather"), (None, "gather")],
)
def test_only_a_pure_producer_broadcasts_by_default(role, source):
    assert resolved(role=role).weights == source
    assert resolved({"weights": "replicate"}, role).weights == "replicate"


def test_gather_without_a_tp_path_is_warned_of():
    assert "q_b_proj and o_proj" in resolved({"shared": ["o_proj"]}).warning
    assert resolved().warning is None
    assert resolved({"weights": "broadcast", "shared": ["o_proj"]}).warning is None


@pytest.mark.parametrize(
    ("weights", "shared", "decode"),
    [
        ("gather", None, True),
        ("gather", ["o_proj"], False),
        ("broadcast", None, False),
        ("replicate", None, False),
    ],
)
def test_decode_steps_take_the_tp_path_where_every_shard_is_there(weights, shared, decode):
    config = resolved({"weights": weights} | ({"shared": shared} if shared else {}))
    assert config.takes_tp_path(8, 1) is decode
    assert not config.takes_tp_path(8, 2)


def test_the_name_of_vllm_ascends_releases():
    config = resolved(layer_sharding=["o_proj", "q_b_proj"])
    assert (config.weights, config.shared) == ("broadcast", ("q_b_proj", "o_proj"))


@pytest.mark.parametrize("weights", ["replicate", "broadcast", "gather"])
@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded", "tensorizer"])
def test_loaders_of_ready_made_shards_are_refused(weights, load_format):
    with pytest.raises(ConfigError, match=f"load_format {load_format}"):
        resolved({"weights": weights}, load_format=load_format)
    resolved(load_format=load_format, enable_sfa_cp=False)


@pytest.mark.parametrize(("weights", "fits"), [("replicate", True), ("broadcast", False), ("gather", True)])
def test_dummy_weights_need_a_weight_on_every_rank(weights, fits):
    if fits:
        assert resolved({"weights": weights}, load_format="dummy").weights == weights
    else:
        with pytest.raises(ConfigError, match="load_format dummy"):
            resolved({"weights": weights}, load_format="dummy")
