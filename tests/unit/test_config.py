"""Settings: every key, every error with its mend, and what the engine's configuration decides."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_sfa_cp import config as sfa_config
from vllm_sfa_cp.config import ENV_FLASHCOMM1, ConfigError, SfaCpConfig, parse, resolve
from vllm_sfa_cp.shapes import SHAPES, release_config

ON = {ENV_FLASHCOMM1: "1"}
CP = {"enable_sfa_cp": True}


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def engine_config(
    additional: Any, size: int = 2, *, hf: HfConfig | None = None, kv_role: str | None = None, **changes: Any
) -> SimpleNamespace:
    """The attributes of a VllmConfig that `resolve` reads. `changes` by attribute or parallel attribute."""
    parallel = {
        "tensor_parallel_size": size,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
    }
    base = {
        "additional_config": additional,
        "model_config": SimpleNamespace(
            hf_config=hf or HfConfig(**release_config(SHAPES["base"], "float32"))
        ),
        "speculative_config": None,
        "lora_config": None,
        "kv_transfer_config": SimpleNamespace(kv_role=kv_role) if kv_role else None,
        "load_config": SimpleNamespace(load_format="auto"),
    }
    for name, value in changes.items():
        assert name in parallel or name in base
        (parallel if name in parallel else base)[name] = value
    return SimpleNamespace(**base, parallel_config=SimpleNamespace(**parallel))


@pytest.mark.parametrize(
    ("additional", "environ", "mode"),
    [
        ({}, {}, "off"),
        (None, {}, "off"),
        ({}, {ENV_FLASHCOMM1: "0"}, "off"),
        ({}, {ENV_FLASHCOMM1: ""}, "off"),
        ({}, ON, "flashcomm1"),
        ({}, {ENV_FLASHCOMM1: " True "}, "flashcomm1"),
        ({"enable_flashcomm1": True}, {}, "flashcomm1"),
        ({"enable_sfa_cp": False}, ON, "flashcomm1"),
        (CP, ON, "sfa-cp"),
        ({**CP, "enable_flashcomm1": True}, {}, "sfa-cp"),
        # Other plugins' keys, and configurations that are not mappings, are none of our business.
        ({"torchair_graph_config": {"enabled": True}, "mystery": 3}, {}, "off"),
        (SimpleNamespace(enable_sfa_cp=True), {}, "off"),
    ],
)
def test_modes(additional, environ, mode):
    assert parse(additional, environ).mode == mode


#: One valid value per key, none of them the default.
SECTION = {
    "partition": "contiguous",
    "weights": "replicate",
    "prefetch_step": 3,
    "shared": ["o_proj"],
    "cp_min_tokens": 7,
    "ops": "ascend",
}


def test_every_key_of_the_section_is_read():
    assert SECTION.keys() == sfa_config._SECTION.keys()
    plain = parse({}, {})
    for key, value in SECTION.items():
        got = parse({"sfa_cp": {key: value}}, {})
        want = tuple(value) if key == "shared" else value
        assert getattr(plain, key) != want
        assert got == replace(plain, **{key: want})


def test_shared_is_ordered_and_may_be_empty():
    assert parse({"sfa_cp": {"shared": ["o_proj", "kv_b_proj", "q_b_proj"]}}, {}).shared == (
        "q_b_proj",
        "kv_b_proj",
        "o_proj",
    )
    assert parse({"sfa_cp": {"shared": []}}, {}).shared == ()


def test_layer_sharding_is_the_releases_name_for_broadcast():
    got = parse({"layer_sharding": ["o_proj", "q_b_proj"]}, {})
    assert (got.shared, got.weights) == (("q_b_proj", "o_proj"), "broadcast")
    both = {"layer_sharding": ["o_proj"], "sfa_cp": {"shared": ["o_proj"], "weights": "gather"}}
    assert parse(both, {}).weights == "gather"


@pytest.mark.parametrize(
    ("additional", "environ", "message"),
    [
        (CP, {}, f"needs FlashComm1; set {ENV_FLASHCOMM1}=1"),
        (CP, {ENV_FLASHCOMM1: "0"}, f"set {ENV_FLASHCOMM1}=1"),
        ({**CP, "enable_flashcomm1": False}, {}, '"enable_flashcomm1": true in additional_config'),
        ({}, {ENV_FLASHCOMM1: "yes"}, "is not a switch; set it to 0 or 1"),
        ({"enable_sfa_cp": "true"}, ON, "\"enable_sfa_cp\" must be true or false, not 'true'"),
        ({"enable_flashcomm1": 1}, {}, '"enable_flashcomm1" must be true or false, not 1'),
        ({"enable_sfa_pc": True}, ON, 'unknown key "enable_sfa_pc"; did you mean "enable_sfa_cp"'),
        ({"sfa_cpp": {}}, ON, 'did you mean "sfa_cp"'),
        ({"sfa_cp": True}, ON, '"sfa_cp" must be an object, not True'),
        ({"sfa_cp": {"weight": "gather"}}, ON, 'unknown key "weight"; valid keys: cp_min_tokens, ops, part'),
        ({"sfa_cp": {"partition": "zigzag"}}, ON, "must be one of contiguous, balanced, not 'zigzag'"),
        ({"sfa_cp": {"weights": None}}, ON, "must be one of replicate, broadcast, gather, not None"),
        ({"sfa_cp": {"prefetch_step": -1}}, ON, "must be an integer from 0 to 8, not -1"),
        ({"sfa_cp": {"prefetch_step": True}}, ON, "must be an integer from 0 to 8, not True"),
        ({"sfa_cp": {"prefetch_step": 1.0}}, ON, "must be an integer"),
        ({"sfa_cp": {"cp_min_tokens": "8"}}, ON, "must be an integer from 0, not '8'"),
        ({"sfa_cp": {"shared": "o_proj"}}, ON, "must be a list with names from q_b_proj, kv_b_proj, o_proj"),
        ({"sfa_cp": {"shared": ["o_proj", "o_proj"]}}, ON, "must be a list with names"),
        ({"sfa_cp": {"shared": ["wq_b"]}}, ON, "must be a list with names"),
        ({"sfa_cp": {"ops": "cuda"}}, ON, "must be one of reference, ascend"),
        ({"layer_sharding": ["o"]}, ON, '"layer_sharding" must be a list with names'),
        (
            {"layer_sharding": ["o_proj"], "sfa_cp": {"shared": ["q_b_proj"]}},
            ON,
            "name different layers; keep one of them",
        ),
    ],
)
def test_errors_name_the_setting_and_the_mend(additional, environ, message):
    with pytest.raises(ConfigError) as err:
        parse(additional, environ)
    assert message in str(err.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([[]], "shared"),
        ([{}], "shared"),
        ([1, 2], "shared"),
        ([], "partition"),
        ({}, "weights"),
        ([1], "ops"),
    ],
)
def test_values_of_any_json_type_are_refused_in_words(value, kind):
    with pytest.raises(ConfigError, match=f'"{kind}" must be'):
        parse({"sfa_cp": {kind: value}}, {})


def test_one_rank_runs_as_off():
    assert resolve(engine_config(CP, 1), ON).mode == "off"
    assert resolve(engine_config({}, 1), ON).mode == "off"


@pytest.mark.parametrize(("additional", "mode"), [(CP, "sfa-cp"), ({}, "flashcomm1")])
def test_a_model_without_an_indexer_is_refused_by_type(additional, mode):
    with pytest.raises(ConfigError, match=f'{mode} needs a model with a lightning indexer.*"qwen3"'):
        resolve(engine_config(additional, hf=HfConfig(model_type="qwen3")), ON)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"enable_dbo": True}, "dual-batch overlap"),
    ],
)
def test_combinations_that_are_not_supported(change, feature):
    for additional in (CP, {}):
        with pytest.raises(ConfigError, match=f"does not support {feature} yet; switch one of the two off"):
            resolve(engine_config(additional, **change), ON)
    resolve(engine_config({}, **change), {})  # off is upstream's business


@pytest.mark.parametrize(
    ("kv_role", "source"),
    [(None, "gather"), ("kv_producer", "broadcast"), ("kv_consumer", "gather"), ("kv_both", "gather")],
)
def test_weight_source_by_role(kv_role, source):
    """C15: only a pure producer counts as prefill-only."""
    assert resolve(engine_config(CP, kv_role=kv_role), ON).weights == source
    given = {**CP, "sfa_cp": {"weights": "replicate"}}
    assert resolve(engine_config(given, kv_role=kv_role), ON).weights == "replicate"


def test_loaders_that_bypass_the_layers():
    """C17."""
    for load_format in ("sharded_state", "runai_streamer_sharded", "tensorizer"):
        with pytest.raises(ConfigError, match=f"{load_format}.*load_format auto"):
            resolve(engine_config(CP, load_config=SimpleNamespace(load_format=load_format)), ON)
    dummy = SimpleNamespace(load_format="dummy")
    with pytest.raises(ConfigError, match='use "weights": "gather" or "replicate"'):
        resolve(engine_config({**CP, "sfa_cp": {"weights": "broadcast"}}, load_config=dummy), ON)
    assert resolve(engine_config(CP, load_config=dummy), ON).weights == "gather"


def test_the_planner_sets_the_threshold_unless_it_is_given():
    planned = resolve(engine_config(CP), ON).cp_min_tokens
    assert planned is not None
    assert planned > 0
    assert resolve(engine_config({**CP, "sfa_cp": {"cp_min_tokens": 9}}), ON).cp_min_tokens == 9
    assert resolve(engine_config({**CP, "sfa_cp": {"weights": "replicate"}}), ON).cp_min_tokens is None


@pytest.mark.parametrize(
    ("config", "decode", "short", "long"),
    [
        (SfaCpConfig(True, True, weights="gather", cp_min_tokens=10), True, True, False),
        (SfaCpConfig(True, True, weights="gather"), True, False, False),
        (
            SfaCpConfig(True, True, weights="gather", cp_min_tokens=10, shared=("o_proj",)),
            False,
            False,
            False,
        ),
        (SfaCpConfig(True, True, weights="replicate", cp_min_tokens=10), False, False, False),
        (SfaCpConfig(True, True, weights="broadcast", cp_min_tokens=10), False, False, False),
        (SfaCpConfig(False, True, weights="gather", cp_min_tokens=10), False, False, False),
    ],
)
def test_which_steps_take_the_tp_path(config, decode, short, long):
    assert config.takes_tp_path(50, 1) is decode
    assert config.takes_tp_path(9, 9) is short
    assert config.takes_tp_path(10, 10) is long


def test_the_result_is_frozen_and_hashable():
    config = resolve(engine_config({**CP, "sfa_cp": SECTION}), ON)
    with pytest.raises(AttributeError):
        config.partition = "balanced"  # type: ignore[misc]
    assert hash(config) == hash(resolve(engine_config({**CP, "sfa_cp": SECTION}), ON))
