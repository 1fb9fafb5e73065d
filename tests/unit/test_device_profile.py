"""Rates of a device: what a profile may say, what the planner makes of it, and what calibration makes it from."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_sfa_cp import calibrate
from vllm_sfa_cp.device_profile import NOMINAL, PARTS, DeviceProfile
from vllm_sfa_cp.errors import UserError
from vllm_sfa_cp.planner import Mode, ModelShape, predict, step_flops

SHAPE = ModelShape.built_in("dsv32-128k/64")
OFF, GATHER = Mode("off"), Mode("sfa-cp", "gather", "balanced")
GOOD = {
    "name": "d",
    "flops": {"default": 1e12},
    "memory_bandwidth": 1e11,
    "link_bandwidth": 1e10,
    "latency": 0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "unknown fields: speed"),
        ({"flops": {"o": 1.0}}, "'default'"),
        ({"flops": []}, "must map 'default'"),
        ({"flops": {"default": 0}}, "default must be positive, not 0"),
        ({"flops": {"default": 1e12, "conv": 1e12}}, "unknown parts: conv"),
        ({"flops": {"default": 1e12, "o": {}}}, "flops: o is an empty table"),
        ({"flops": {"default": 1e12, "o": {"many": 1e12}}}, "o must be positive"),
        ({"flops": {"default": 1e12, "o": {"0": 1e12}}}, "o must be positive"),
        ({"flops": {"default": 1e12, "o": {"64": -1}}}, "o must be positive"),
        ({"shard_flops": []}, "shard_flops must map numbers of ranks"),
        ({"shard_flops": {"two": {}}}, "shard_flops must map numbers of ranks"),
        ({"shard_flops": {"2": 1.0}}, "shard_flops of 2 ranks must map"),
        ({"shard_flops": {"2": {"q_b": 0}}}, "q_b must be positive"),
        ({"whole_flops": {"2": {"conv": 1.0}}}, "whole_flops of 2 ranks has unknown parts: conv"),
        ({"link_bandwidth": "fast"}, "link_bandwidth must be a positive number, not 'fast'"),
        ({"link_bandwidth": 0}, "link_bandwidth must be a positive number, not 0"),
        ({"latency": -1}, "latency must be"),
        ({"latency": {"8": 0}}, "latency must be positive, not 0 at '8'"),
        ({"link_bandwidth": {"all": 1e9}}, "link_bandwidth must be positive, not 1000000000.0 at 'all'"),
        ({"step_overhead": None}, "step_overhead must be"),
        ({"overlap": 1.5}, "overlap is a share"),
    ],
)
def test_profiles_are_validated(change, message):
    with pytest.raises(UserError, match=message):
        DeviceProfile.from_dict(GOOD | change, "p.json")


def test_what_may_be_left_out():
    made = DeviceProfile.from_dict(GOOD | {"memory": None, "overlap": 0, "step_overhead": 0}, "p.json")
    assert made.rate("o") == 1e12
    with pytest.raises(UserError, match="lacks 'latency'"):
        DeviceProfile.from_dict({k: v for k, v in GOOD.items() if k != "latency"}, "p.json")


def test_rates_of_ranks_fall_back_to_the_device():
    profile = DeviceProfile.from_dict(
        GOOD
        | {"flops": {"default": 1.0, "o": 2.0}}
        | {"shard_flops": {"2": {"o": 3.0}}, "whole_flops": {"2": {"o": 4.0}, "4": {"q_b": 5.0}}},
        "p.json",
    )
    assert [profile.rate("o", 1, n, shard=True) for n in (1, 2, 4)] == [2.0, 3.0, 2.0]
    assert [profile.rate("o", 1, n) for n in (1, 2, 4)] == [2.0, 4.0, 2.0]
    assert profile.rate("q_b", 1, 2) == 1.0
    assert profile.rate("q_b", 1, 4) == 5.0


def test_links_may_depend_on_the_ranks():
    made = DeviceProfile.from_dict(
        GOOD | {"link_bandwidth": {"2": 1e9, "8": 4e9}, "latency": {"2": 1.0, "8": 4.0}}, "p.json"
    )
    assert made.collective_s(8e9, 3, 2) == 8 + 3
    assert made.collective_s(8e9, 3, 8) == 2 + 12
    assert made.collective_s(8e9, 3, 4) == pytest.approx(4 + 6)
    assert DeviceProfile.from_dict(GOOD, "p.json").collective_s(1e10, 3, 8) == 1


TABLE = {"16": 1e9, "256": 1.6e10, "4096": 4e9}


@given(st.integers(1, 20000))
def test_a_rate_between_two_entries_lies_between_them(tokens):
    profile = replace(NOMINAL, flops={"default": 1.0, "o": TABLE})
    rate = profile.rate("o", tokens)
    keys = sorted(map(int, TABLE))
    low = max((key for key in keys if key <= tokens), default=keys[0])
    high = min((key for key in keys if key >= tokens), default=keys[-1])
    edges = sorted((TABLE[str(low)], TABLE[str(high)]))
    assert edges[0] * (1 - 1e-9) <= rate <= edges[1] * (1 + 1e-9)


def test_a_table_is_a_power_law():
    profile = replace(NOMINAL, flops={"default": 1.0, "o": TABLE})
    assert [profile.rate("o", t) for t in (1, 16, 256, 4096, 9999)] == [1e9, 1e9, 1.6e10, 4e9, 4e9]
    assert profile.rate("o", 64) == pytest.approx(4e9)  # 16 x the rate for 16 x the tokens
    assert profile.rate("o", 1024) == pytest.approx(8e9)


def compute(mode, **profile):
    return predict(SHAPE, mode, 8, 8192, profile=replace(NOMINAL, **profile)).compute_s


@pytest.mark.parametrize(
    ("part", "mode", "tokens", "field"),
    [
        ("o", OFF, 8192, "shard_flops"),
        ("o", GATHER, 1024, "whole_flops"),
        ("experts", GATHER, 8192, "shard_flops"),
        ("qkv_a", OFF, 8192, "whole_flops"),
        ("qkv_a", GATHER, 1024, "whole_flops"),
        ("indexer_scores", GATHER, 8192, "whole_flops"),  # by the keys that the last token sees
        ("attention", GATHER, 8192, "whole_flops"),
        ("router", GATHER, 8192, "whole_flops"),
    ],
)
def test_every_part_has_the_rate_of_its_rows_and_heads(part, mode, tokens, field):
    """Only the entry of the right length, in the right table, changes the prediction."""
    base = compute(mode)
    table = {str(n): 1e14 for n in (512, 1024, 2048, 4096, 8192, 16384)}
    assert compute(mode, **{field: {"8": {part: table}}}) == pytest.approx(base)
    assert compute(mode, **{field: {"8": {part: table | {str(tokens): 5e13}}}}) > base * (1 + 1e-6)
    for wrong in set(table) - {str(tokens)}:
        assert compute(mode, **{field: {"8": {part: table | {wrong: 5e13}}}}) == pytest.approx(base)
    other = ({"shard_flops", "whole_flops"} - {field}).pop()
    assert compute(mode, **{other: {"8": {part: 5e13}}}) == pytest.approx(base)


def test_what_the_link_does_not_move_by_itself_is_not_hidden():
    beside, half, itself = (
        predict(SHAPE, GATHER, 8, 8192, profile=replace(NOMINAL, overlap=share)) for share in (1, 0.5, 0)
    )
    waiting = predict(SHAPE, replace(GATHER, prefetch_step=0), 8, 8192, profile=replace(NOMINAL, overlap=0.5))
    assert beside.weight_wait_s == itself.weight_wait_s == 0
    fetch = itself.collective_s - beside.collective_s
    assert fetch > 0
    assert half.collective_s == pytest.approx(beside.collective_s + fetch / 2)
    assert waiting.weight_wait_s == pytest.approx(fetch)
    assert waiting.seconds == pytest.approx(itself.seconds)


def times(shape, tokens, rate, overhead=0.5, rest=0.3, growth=0.0):
    """CPU seconds by part as `rank_calibration.parts` reports them."""
    found = {part: flops / rate for part, flops in step_flops(shape, tokens).items() if part != "lm_head"}
    found["w_ukv"] = found.pop("w_uk") + found.pop("w_uv")
    found["rest"] = rest + growth
    return found | {"total": sum(found.values()) + overhead}


def timed(shape, **rates):
    """rates: of `t<tokens>`."""
    return shape, {int(key[1:]): times(shape, int(key[1:]), rate) for key, rate in rates.items()}


def test_calibration_recovers_the_rates_that_made_the_times():
    cut = calibrate.rank_shape(SHAPE, 4)
    shared = {4: (timed(SHAPE, t16=1e10, t1024=4e10), timed(cut, t16=1e10, t4096=2e10))}
    made = calibrate.profile(timed(SHAPE, t16=1e10, t4096=3e10), shared)
    found = DeviceProfile.from_dict({k: v for k, v in GOOD.items() if k != "flops"} | made, "made")
    for part in PARTS:
        if part == "lm_head":
            continue
        assert found.rate(part, 4096) == pytest.approx(3e10, rel=1e-3)
        assert found.rate(part, 16) == pytest.approx(1e10, rel=1e-3)
    for part in ("q_b", "w_uk", "attention", "o"):
        assert found.rate(part, 1024, 4) == pytest.approx(4e10, rel=1e-3)
        assert found.rate(part, 4096, 4) == pytest.approx(4e10, rel=1e-3)
        assert found.rate(part, 4096, 4, shard=True) == pytest.approx(2e10, rel=1e-3)
    for part in (
        "qkv_a",
        "indexer_proj",
        "indexer_scores",
        "router",
    ):  # every rank has them whole in both runs
        assert found.rate(part, 1024, 4) == pytest.approx(4e10, rel=1e-3)
        assert found.rate(part, 4096, 4) == pytest.approx(2e10, rel=1e-3)
        assert part not in made["shard_flops"]["4"]
    assert found.rate("experts", 4096, 4, shard=True) == pytest.approx(2e10, rel=1e-3)
    assert "experts" not in made["whole_flops"]["4"]
    assert found.rate("q_b", 4096, 8, shard=True) == found.rate("q_b", 4096)  # not measured
    assert found.step_overhead == pytest.approx(0.5)
    assert found.layer_overhead == pytest.approx(0.1)


def test_the_residual_stream_counts_with_the_first_projection():
    def rates(growth):
        given = {16: times(SHAPE, 16, 3e10), 4096: times(SHAPE, 4096, 3e10, growth=growth)}
        return calibrate.profile((SHAPE, given), {})["flops"]

    plain, slower = rates(0.0), rates(1.0)
    took = step_flops(SHAPE, 4096)["qkv_a"] / 3e10
    assert slower["qkv_a"]["4096"] == pytest.approx(3e10 * took / (took + 1), rel=1e-3)
    rest = [{k: v for k, v in made.items() if k not in ("qkv_a", "default")} for made in (plain, slower)]
    assert rest[0] == rest[1]


def test_a_link_is_a_line_through_two_messages():
    """Times made from 2 GB/s and a millisecond per collective and rank give them back."""

    class Pool:
        def run(self, size, target, given):
            amount = given["rows"] * (size - 1) * given["width"] * 4
            return [{"all_gather": amount / 2e9 + size / 1e3, "all_reduce": 2 * amount / 2e9 + size / 1e3}]

    made = calibrate._links(Pool(), [2, 8], 8192, SHAPE, "float32")
    assert made["link_bandwidth"] == {"2": pytest.approx(2e9, rel=1e-3), "8": pytest.approx(2e9, rel=1e-3)}
    assert made["latency"] == {"2": pytest.approx(2e-3, rel=1e-3), "8": pytest.approx(8e-3, rel=1e-3)}
