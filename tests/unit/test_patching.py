"""Monkey patches (case A25) on stand-ins for upstream's modules; the real ones are checked by every engine start."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from vllm_sfa_cp import patching
from vllm_sfa_cp.patching import PATCHES, MonkeyPatch, PatchError

PATCH = MonkeyPatch("vllm.stand_in:answer", "0" * 40, f"{__name__}:one_more", "for the test")


def one_more(original):
    return lambda: original() + 1


@pytest.fixture
def modules(monkeypatch):
    """A module that defines a function and a class, and one that has bound the function's name before."""

    class Owner:
        def method(self):
            return 1

    first, second = ModuleType("vllm.stand_in"), ModuleType("vllm.other_stand_in")
    first.answer = second.bound_before = lambda: 1
    first.Owner = Owner
    for module in (first, second):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return first, second


@pytest.fixture
def fits(monkeypatch):
    monkeypatch.setattr(MonkeyPatch, "check", lambda self: None)


@pytest.mark.usefixtures("fits")
def test_a_name_bound_before_is_replaced_and_applying_twice_is_not_recursion(modules):
    first, second = modules
    assert not PATCH.active
    for _ in range(2):
        PATCH.apply()
        assert PATCH.active
        assert (first.answer(), second.bound_before()) == (2, 2)


@pytest.mark.usefixtures("fits")
def test_a_method(modules):
    wrapper = f"{__name__}:method_and_one_more"
    replace(PATCH, target="vllm.stand_in:Owner.method", wrapper=wrapper).apply()
    assert modules[0].Owner().method() == 2
    assert modules[0].answer() == 1


def method_and_one_more(original):
    return lambda self: original(self) + 1


def test_one_that_does_not_fit_replaces_nothing(modules, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    sys.modules["vllm"].__file__ = "/nowhere/vllm/__init__.py"
    sys.modules["vllm"].__version__ = "0.0"
    with pytest.raises(
        PatchError, match=r"vllm\.stand_in:answer refused: expected fingerprint 0000.*in vLLM 0\.0"
    ):
        PATCH.apply()
    assert modules[0].answer() == 1
    for target in ("vllm.stand_in:gone", "vllm.nowhere_at_all:f"):
        with pytest.raises(PatchError, match="does not exist"):
            replace(PATCH, target=target).apply()


def test_no_two_have_one_target():
    """The second would find the first's replacement, take the work for done, and be missing without a word."""
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
    assert {patch.platform for patch in PATCHES} <= {"any", "cpu", "npu"}


def test_only_those_of_the_platform_are_applied(modules, monkeypatch):
    applied = []
    monkeypatch.setattr(MonkeyPatch, "apply", lambda self: applied.append(self.platform))
    monkeypatch.setattr(patching, "PATCHES", [replace(PATCH, platform=p) for p in ("cpu", "npu", "any")])
    patching.apply_all("npu")
    assert applied == ["npu", "any"]
