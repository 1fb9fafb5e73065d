"""What rank processes do in the engine tests of the Ascend kernels. Imported inside `RankPool`."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import scenarios
from ascend import contract


def _refuse(*_: Any) -> None:
    raise AssertionError("a reference kernel ran in place of an Ascend one")


def rounds(**kwargs: Any) -> dict[str, Any]:
    """`scenarios.rounds` with all prompts in flight, twice; "calls": how often each operator was called by it.

    The reference kernels raise."""
    from vllm_sfa_cp.ops.reference import ReferenceOps

    contract.CALLS.clear()
    with ExitStack() as stack:
        for name in ("write_latent", "write_indexer_key", "indexer_topk", "sparse_mla", "value_up"):
            stack.enter_context(mock.patch.object(ReferenceOps, name, _refuse))
        report = scenarios.rounds(plan=["together", "together again"], **kwargs)
    return {**report, "calls": dict(contract.CALLS)}
