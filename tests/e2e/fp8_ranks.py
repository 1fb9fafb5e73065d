"""What the rank processes of test_fp8.py run."""

from typing import Any

import engines


def run(**kwargs: Any) -> list:
    """engines.run with block FP8 registered, as the plugin does it."""
    from vllm_sfa_cp.layers.fp8_config import register

    register()
    return engines.run(**kwargs)
