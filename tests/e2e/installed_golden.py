"""Greedy tokens of the golden prompts by the vLLM of this interpreter, as one JSON line: MODEL LOGS."""

import json
import sys
from pathlib import Path

from vllm_sfa_cp.launch import RankPool
from vllm_sfa_cp.serving import SFA_CP_ENV


def main(model: str, logs: str) -> None:
    import importlib.util

    cases = json.loads(Path(model, "expected/tokens.json").read_text())
    common = {"model": model, "prompts": [case["prompt_token_ids"] for case in cases]}
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    found = {"vllm": spec.origin}
    with RankPool(2, logs) as pool:
        for name, size, extra in (("off@1", 1, {}), ("sfa-cp@2", 2, {"enable_sfa_cp": True})):
            kwargs = {**common, "tensor_parallel_size": size, "additional_config": extra}
            answers = pool.run(size, "engines:run", kwargs, SFA_CP_ENV if extra else {})[0][0]
            found[name] = [answer["tokens"] for answer in answers]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
