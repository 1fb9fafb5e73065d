"""The overlay's configuration: `--additional-config` and the environment become one frozen dataclass.

    --additional-config '{"enable_sfa_cp": true, "sfa_cp": {"weights": "gather", "prefetch_step": 1}}'

`additional_config` is shared by every vLLM plugin, so top-level keys that are not ours are left alone; inside
the section `sfa_cp` an unknown key is an error. Pure: no torch, no vLLM import.
"""

import difflib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args

ENV_FLASHCOMM1 = "VLLM_ASCEND_ENABLE_FLASHCOMM1"
MAX_PREFETCH_STEP = 8
#: Requests with fewer new tokens are split as `contiguous` does, also by `balanced`: position matters little to
#: their work, and blocks of a few rows only cost kernels their efficiency.
MIN_BALANCED_TOKENS = 256

PartitionKind = Literal["contiguous", "balanced"]
WeightSource = Literal["replicate", "broadcast", "gather"]
OpsName = Literal["reference", "ascend"]
SHAREABLE = ("q_b_proj", "kv_b_proj", "o_proj")


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the setting and the mend."""


@dataclass(frozen=True)
class SfaCpConfig:
    """What the overlay does in this engine. Built once per process from the same inputs.

    enable_sfa_cp:  context parallelism over the tensor-parallel group.
    flashcomm1:     residual stream sharded over ranks (always true with SFA-CP).
    partition:      which rank owns which token.
    weights:        where the full q_b/kv_b/o weights come from; None lets the role decide (see `resolve_weights`).
    prefetch_step:  layers fetched ahead, k; k + 1 windows per series.
    shared:         the projections that form series.
    cp_min_tokens:  steps with fewer tokens take the TP path (source `gather` only); None lets the planner decide.
    ops:            kernel set.
    """

    enable_sfa_cp: bool = False
    flashcomm1: bool = False
    partition: PartitionKind = "balanced"
    weights: WeightSource | None = None
    prefetch_step: int = 1
    shared: tuple[str, ...] = ("q_b_proj", "o_proj")
    cp_min_tokens: int | None = None
    ops: OpsName = "reference"

    @property
    def mode(self) -> str:
        """`off`, `flashcomm1` or `sfa-cp`."""
        return "sfa-cp" if self.enable_sfa_cp else "flashcomm1" if self.flashcomm1 else "off"

    @property
    def has_tp_path(self) -> bool:
        """Whether a step can run on TP shards of the projections, which only source `gather` keeps."""
        return self.enable_sfa_cp and self.weights == "gather" and {"q_b_proj", "o_proj"} <= set(self.shared)

    @property
    def warning(self) -> str | None:
        """What works, but hardly as it was meant."""
        if self.enable_sfa_cp and self.weights == "gather" and not self.has_tp_path:
            return (
                'decode-only steps fetch full weights too: their TP path needs q_b_proj and o_proj in "sfa_cp": '
                '{"shared": [...]}'
            )
        return None

    def takes_tp_path(self, tokens: int, max_query_len: int) -> bool:
        """Whether a step runs on the TP shards: decode-only steps, and those too small for CP to pay."""
        if not self.has_tp_path:
            return False
        return max_query_len <= 1 or tokens < (self.cp_min_tokens or 0)

    def resolve_weights(self, kv_role: str | None) -> WeightSource:
        """The weight source in force. A pure KV producer only prefills, so each layer's full weight can live
        on one rank; every other role (consumer, kv_both, none) also decodes and keeps TP shards."""
        if self.weights is not None:
            return self.weights
        return "broadcast" if kv_role == "kv_producer" else "gather"


# Key in section "sfa_cp" -> (what it must be, check). Kept beside the dataclass: one place to extend.
_SECTION: dict[str, tuple[str, Any]] = {
    "partition": ("one of contiguous, balanced", lambda v: v in get_args(PartitionKind)),
    "weights": ("one of replicate, broadcast, gather", lambda v: v in get_args(WeightSource)),
    "prefetch_step": (
        f"an integer from 0 to {MAX_PREFETCH_STEP}",
        lambda v: type(v) is int and 0 <= v <= MAX_PREFETCH_STEP,
    ),
    "shared": (
        f"a list with names from {', '.join(SHAREABLE)}",
        lambda v: isinstance(v, (list, tuple)) and all(n in SHAREABLE for n in v) and len(set(v)) == len(v),
    ),
    "cp_min_tokens": ("an integer from 0", lambda v: type(v) is int and v >= 0),
    "ops": ("one of reference, ascend", lambda v: v in get_args(OpsName)),
}
_TOP = ("enable_sfa_cp", "enable_flashcomm1", "sfa_cp", "layer_sharding")


def _env_flag(environ: Mapping[str, str]) -> bool:
    value = environ.get(ENV_FLASHCOMM1, "0").strip().lower()
    if value in ("1", "true"):
        return True
    if value in ("0", "false", ""):
        return False
    raise ConfigError(f"{ENV_FLASHCOMM1}={value!r} is not a switch; set it to 0 or 1")


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if type(value) is not bool:
        raise ConfigError(f'additional_config "{key}" must be true or false, not {value!r}')
    return value


def parse(additional_config: Any, environ: Mapping[str, str] = os.environ) -> SfaCpConfig:
    """Read and validate the settings.

    additional_config: vLLM's `VllmConfig.additional_config` (a mapping; anything else has none of our keys).
    Raises ConfigError: unknown key, wrong type or value, SFA-CP without FlashComm1.
    """
    given = additional_config if isinstance(additional_config, Mapping) else {}
    for key in given:
        near = difflib.get_close_matches(str(key), _TOP, n=1, cutoff=0.85)
        if near and key not in _TOP:
            raise ConfigError(f'additional_config has an unknown key "{key}"; did you mean "{near[0]}"?')

    section = given.get("sfa_cp", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'additional_config "sfa_cp" must be an object, not {section!r}')
    values: dict[str, Any] = {}
    for key, value in section.items():
        if key not in _SECTION:
            raise ConfigError(
                f'"sfa_cp" has an unknown key "{key}"; valid keys: {", ".join(sorted(_SECTION))}'
            )
        must, ok = _SECTION[key]
        if not ok(value):
            raise ConfigError(f'"sfa_cp": "{key}" must be {must}, not {value!r}')
        values[key] = tuple(value) if key == "shared" else value

    if "layer_sharding" in given:  # the name vllm-ascend's releases use for the same thing
        names = given["layer_sharding"]
        must, ok = _SECTION["shared"]
        if not ok(names):
            raise ConfigError(f'additional_config "layer_sharding" must be {must}, not {names!r}')
        if "shared" in values and set(values["shared"]) != set(names):
            raise ConfigError(
                '"layer_sharding" and "sfa_cp": "shared" name different layers; keep one of them'
            )
        values["shared"] = tuple(names)
        # There a sharded layer lives on one rank and is broadcast.
        values.setdefault("weights", "broadcast")
    values["shared"] = tuple(n for n in SHAREABLE if n in values.get("shared", SfaCpConfig.shared))

    enable = _flag(given, "enable_sfa_cp")
    flashcomm1 = _flag(given, "enable_flashcomm1") or _env_flag(environ)
    if enable and not flashcomm1:
        raise ConfigError(
            f'"enable_sfa_cp": true needs FlashComm1; set {ENV_FLASHCOMM1}=1 in the environment '
            'or "enable_flashcomm1": true in additional_config'
        )
    assert values.keys() <= {f.name for f in fields(SfaCpConfig)}
    return SfaCpConfig(enable_sfa_cp=enable, flashcomm1=flashcomm1, **values)


def resolve(vllm_config: Any, environ: Mapping[str, str] = os.environ) -> SfaCpConfig:
    """The settings in force for one engine: `parse`, then what the engine's own configuration decides.

    vllm_config: a `VllmConfig`; only attributes are read, so that this stays importable without vLLM.
    Raises ConfigError: a model or a combination that the asked-for mode does not support.
    """
    config = parse(vllm_config.additional_config, environ)
    if config.mode == "off":
        return config
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size == 1:
        return replace(config, enable_sfa_cp=False, flashcomm1=False)
    if model is not None and not hasattr(model.hf_config, "index_topk"):
        raise ConfigError(
            f"{config.mode} needs a model with a lightning indexer (index_topk), and model type "
            f'"{model.hf_config.model_type}" has none; turn "enable_sfa_cp" and FlashComm1 off for it'
        )
    unsupported = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "dual-batch overlap": parallel.enable_dbo,
    }
    for feature, asked in unsupported.items():
        if asked:
            raise ConfigError(f"{config.mode} does not support {feature} yet; switch one of the two off")
    transfer = vllm_config.kv_transfer_config
    config = replace(config, weights=config.resolve_weights(transfer.kv_role if transfer else None))
    if config.enable_sfa_cp:
        _check_loader(config, str(vllm_config.load_config.load_format))
    if config.has_tp_path and config.cp_min_tokens is None and model is not None:
        shape = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
        threshold = planned_threshold(shape, config, parallel.tensor_parallel_size)
        config = replace(config, cp_min_tokens=threshold)
    return config


@cache
def planned_threshold(hf_config: str, config: SfaCpConfig, size: int) -> int:
    """Fewest tokens of a step from which on CP is no slower than TP shards, as the planner sees it for this model
    (its config as JSON) and the kind of device the kernels are for; 0 for a model that the planner cannot judge."""
    from vllm_sfa_cp import planner
    from vllm_sfa_cp.device_profile import CPU_CORE, NOMINAL
    from vllm_sfa_cp.errors import UserError

    try:
        shape = planner.ModelShape.from_config(json.loads(hf_config))
    except UserError:
        return 0
    mode = planner.Mode("sfa-cp", "gather", config.partition, config.prefetch_step, config.shared)
    profile = CPU_CORE if config.ops == "reference" else NOMINAL
    found = planner.token_threshold(shape, mode, size, profile)
    return sys.maxsize if found is None else found


def _check_loader(config: SfaCpConfig, load_format: str) -> None:
    """ConfigError: a loader that fills parameters without asking the layer for its share."""
    if load_format in ("sharded_state", "runai_streamer_sharded", "tensorizer"):
        raise ConfigError(
            f"sfa-cp cannot load with load_format {load_format}: its files hold the shards of another layout, "
            "which would be cut to fit; load the original checkpoint with load_format auto"
        )
    if load_format == "dummy" and config.weights == "broadcast" and config.shared:
        raise ConfigError(
            'load_format dummy fills every parameter, and with "weights": "broadcast" most ranks have none; '
            'use "weights": "gather" or "replicate"'
        )
