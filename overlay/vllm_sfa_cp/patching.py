"""The registry of monkey patches: each names its target, the fingerprint it was written for, and its reason.

The last resort of four ways to change upstream (extension point, subclass, patch file, monkey patch). A patch
whose target is not the expected code refuses; nothing is replaced then. Applying twice changes nothing.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchset.fingerprint import SymbolGone, fingerprint

_ORIGINAL = "__sfa_cp_original__"


class PatchError(RuntimeError):
    """A monkey patch does not fit the vLLM that is installed."""


@dataclass(frozen=True)
class MonkeyPatch:
    """target: upstream function or method, `module:Qualname`. fingerprint: of the code it was written for (see
    `patchset.fingerprint`). wrapper: ours, `module:function`; called with the original, returns the replacement.
    platform: `any`, or the name of the only platform it is meant for."""

    target: str
    fingerprint: str
    wrapper: str
    reason: str
    platform: str = "any"

    def apply(self) -> None:
        """Replace the target, also where other modules have already bound its name. PatchError: refused."""
        owner, name = _resolve(self.target)
        original = getattr(owner, name)
        if hasattr(original, _ORIGINAL):
            return
        self.check()
        replacement = _load(self.wrapper)(original)
        setattr(replacement, _ORIGINAL, original)
        setattr(owner, name, replacement)
        if owner is sys.modules.get(self.target.partition(":")[0]):
            _rebind(original, replacement)

    def check(self) -> None:
        """PatchError unless the installed target is the code this patch was written for."""
        import vllm

        root = Path(vllm.__file__).parents[1]
        try:
            found = fingerprint(root, self.target)
        except SymbolGone as err:
            found = str(err)
        if found != self.fingerprint:
            raise PatchError(
                f"monkey patch of {self.target} refused: expected fingerprint {self.fingerprint}, found {found} in "
                f"vLLM {vllm.__version__}; run ci/check_drift.py to see what moved"
            )

    @property
    def active(self) -> bool:
        """Whether this process runs the replacement."""
        owner, name = _resolve(self.target)
        return hasattr(getattr(owner, name), _ORIGINAL)


PATCHES = (
    MonkeyPatch(
        target="vllm.config.cache:CacheConfig.verify_with_parallel_config",
        fingerprint="8a86839bc9695174f5713ecc4550128e5caf9a70",
        wrapper="vllm_sfa_cp.platforms.cpu_defaults:without_swap_space",
        reason="4 GiB of swap space per rank are counted against the machine's memory although a CPU swaps "
        "nothing: 8 ranks do not start on 24 GiB. No hook runs before this check.",
        platform="cpu",
    ),
    MonkeyPatch(
        target="vllm.v1.metrics.prometheus:get_prometheus_registry",
        fingerprint="7fff01425e5cca0a211960988723470d3d6a0607",
        wrapper="vllm_sfa_cp.weights.metrics:with_weight_counters",
        reason="The counters of shared weights belong on /metrics, whichever registry the API server serves.",
    ),
)


def apply_all(platform: str) -> None:
    """Apply every patch meant for the platform. PatchError: the first that refuses."""
    for patch in PATCHES:
        if patch.platform in ("any", platform):
            patch.apply()


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _resolve(target: str) -> tuple[Any, str]:
    """The object that holds the target, and the target's name in it. PatchError: it does not exist."""
    module, _, qualname = target.partition(":")
    *path, name = qualname.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in path:
            owner = getattr(owner, part)
        getattr(owner, name)
    except (ImportError, AttributeError) as err:
        raise PatchError(
            f"monkey patch target {target} does not exist: {err}; run ci/check_drift.py to see what moved"
        ) from err
    return owner, name


def _rebind(original: Any, replacement: Any) -> None:
    """`from module import name` copied the original into other modules; replace it there too."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vllm":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)
