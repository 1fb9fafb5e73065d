"""Every series up to 61 layers: the right layer ahead, no window overwritten early, every forward alike."""

import subprocess
import sys
from itertools import pairwise

import pytest
from vllm_sfa_cp.weights.series import Action, Schedule, WindowError, WindowState

STAGES = [(start, length) for start in range(61) for length in range(1, 62 - start)]
AHEAD = range(4)


class Device:
    """Windows with contents; a fetch fills one, and refuses to while the content is unused."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.holds: dict[int, int] = {}
        self.unused: set[int] = set()
        self.fetches = 0

    def fetch(self, layer: int, window: int) -> None:
        assert window in range(self.schedule.num_windows)
        assert self.holds.get(window) not in self.unused, "overwritten before its use"
        self.holds[window] = layer
        self.unused.add(layer)
        self.fetches += 1

    def forward(self) -> None:
        used = []
        for action, layer, window in self.schedule.events():
            if action is Action.FETCH:
                self.fetch(layer, window)
            else:
                assert self.holds[window] == layer, "used without being fetched"
            if action is Action.RELEASE:
                self.unused.discard(layer)
                used.append(layer)
        assert used == list(self.schedule.layers)


@pytest.mark.parametrize("ahead", AHEAD)
def test_no_window_is_overwritten_before_use_in_three_forwards(ahead):
    for start, length in STAGES:
        schedule = Schedule(start, length, ahead)
        assert schedule.num_windows == min(ahead + 1, length)
        device = Device(schedule)
        for layer in schedule.prologue:
            device.fetch(layer, schedule.window(layer))
        for _ in range(3):
            device.forward()
            if not schedule.resident:
                assert device.unused == set(schedule.prologue)
        assert device.fetches == (length if schedule.resident else 3 * length + ahead)


@pytest.mark.parametrize("ahead", AHEAD)
def test_self_contained_forwards(ahead):
    for start, length in STAGES:
        schedule = Schedule(start, length, ahead, carry=False)
        device = Device(schedule)
        for _ in range(2):
            for layer in schedule.prologue:
                device.fetch(layer, schedule.window(layer))
            device.forward()
            assert not device.unused
        assert device.fetches == 2 * length


@pytest.mark.parametrize("ahead", AHEAD)
def test_fetched_next_is_the_layer_ahead_inside_the_stage(ahead):
    for start, length in STAGES:
        schedule = Schedule(start, length, ahead)
        for layer in schedule.layers:
            assert schedule.next_layer(layer) == [*schedule.layers][(layer - start + ahead) % length]
        if schedule.resident:
            assert all(not schedule.before(layer) and not schedule.after(layer) for layer in schedule.layers)
            continue
        for layer in schedule.layers[: length - ahead]:
            assert schedule.before(layer) == (schedule.next_layer(layer),)
        if length % (ahead + 1) == 0:  # the formula holds round the end of the forward, too
            for layer in schedule.layers:
                assert schedule.before(layer) == (schedule.next_layer(layer),)
                assert schedule.after(layer) == ()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_put_off_fetch_is_issued_right_after_the_use_of_its_holder(ahead):
    for start, length in STAGES:
        schedule = Schedule(start, length, ahead)
        for holder in schedule.layers:
            for layer in schedule.after(holder):
                assert schedule.window(layer) == schedule.window(holder)
                rank_in_next = length + layer - start
                assert 1 <= rank_in_next - (holder - start) <= ahead  # a whole layer between the two uses


def test_events_do_not_depend_on_history_or_rank():
    for ahead in AHEAD:
        assert len({tuple(Schedule(3, 61, ahead).events()) for _ in range(3)}) == 1


@pytest.mark.parametrize("size", range(1, 17))
def test_owners_share_the_layers_evenly(size):
    for start, length in STAGES:
        schedule = Schedule(start, length, 1)
        owners = [schedule.owner(layer, size) for layer in schedule.layers]
        assert owners[0] == 0
        assert all((b - a) % size == 1 % size for a, b in pairwise(owners))
        kept = [list(schedule.owned(rank, size)) for rank in range(size)]
        assert all(owners[layer - start] == rank for rank in range(size) for layer in kept[rank])
        assert sum(map(len, kept)) == length
        assert max(map(len, kept)) == -(-length // size)


def run_layers(state: WindowState, layers: range) -> list[int]:
    """Drive a state as a source does; returns the layers fetched."""
    fetched: list[int] = []
    for layer in layers:
        fetched += state.enter(layer)
        state.wait(layer)
        fetched += state.leave(layer)
    return fetched


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("ahead", AHEAD)
def test_state_follows_every_schedule_through_aborts_and_reloads(ahead, carry):
    for start, length in STAGES:
        if start not in (0, 5, 30):
            continue
        schedule = Schedule(start, length, ahead, carry)
        state = WindowState(schedule)
        fetches = [event.layer for event in schedule.events() if event.action is Action.FETCH]
        cold = [*schedule.prologue, *fetches]
        warm = fetches if carry else cold
        assert run_layers(state, schedule.layers) == cold
        assert run_layers(state, schedule.layers) == warm
        assert not state.aborted
        stop = start + length // 2
        run_layers(state, range(start, stop))
        state.enter(stop)
        assert state.aborted
        with pytest.raises(WindowError):
            state.prime()
        state.reset()
        assert run_layers(state, schedule.layers) == cold
        assert set(state.reset()) == (set(schedule.prologue) if carry and not schedule.resident else set())
        assert list(state.prime()) == list(schedule.prologue)
        assert run_layers(state, schedule.layers) == fetches


def test_wait_tells_whether_the_fetch_is_still_to_be_awaited():
    state = WindowState(Schedule(0, 1, 0))
    assert state.enter(0) == (0,)
    assert [state.wait(0), state.wait(0)] == [True, False]
    assert state.leave(0) == ()
    assert state.enter(0) == ()
    assert state.wait(0) is False


def test_state_refuses_what_would_compute_with_wrong_weights():
    state = WindowState(Schedule(2, 5, 1))
    with pytest.raises(WindowError, match="layer 3 entered when layer 2 was to be done"):
        state.enter(3)
    with pytest.raises(WindowError, match="layer 2 is used but was not fetched"):
        state.wait(2)
    assert state.enter(2) == (2, 3)
    with pytest.raises(WindowError, match="left before it was used"):
        state.leave(2)
    with pytest.raises(
        WindowError, match="layer 4 would overwrite layer 2 in window 0, which is being fetched"
    ):
        state._fetch(4)
    state.wait(2)
    with pytest.raises(WindowError, match="which is waiting for its use"):
        state._fetch(4)
    assert state.leave(2) == ()
    with pytest.raises(WindowError, match="layer 2 is used but was not fetched"):
        state.wait(2)
    assert state.reset() == (3,)


@pytest.mark.parametrize(("layer"), [1, 66, -1])
def test_layers_outside_the_stage_are_not_in_the_series(layer):
    schedule = Schedule(5, 61, 1)
    for call in (schedule.window, schedule.next_layer, schedule.before, schedule.after):
        with pytest.raises(IndexError, match=rf"layer {layer} is not in the series \[5, 66\)"):
            call(layer)


@pytest.mark.parametrize("bad", [(-1, 3, 1), (0, 0, 1), (0, 3, -1)])
def test_values_out_of_range(bad):
    with pytest.raises(ValueError, match="no series"):
        Schedule(*bad)


def test_needs_no_torch():
    code = "import sys, vllm_sfa_cp.weights.series; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
