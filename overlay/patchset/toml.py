"""Reading `upstream.toml` on every supported Python.

The file keeps to the subset of TOML whose values are JSON too (strings, integers, arrays on one line),
because Python 3.10 has no `tomllib` and nothing may be installed yet. Lint checks that both readings agree.
"""

import json
from typing import Any


def loads(text: str) -> dict[str, Any]:
    """Parse the subset. Raises ValueError naming the line that is outside of it."""
    top: dict[str, Any] = {}
    table = top
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            table = top.setdefault(line[1:-1].strip(), {})
            continue
        key, equals, value = line.partition("=")
        try:
            if not equals:
                raise ValueError
            table[key.strip()] = json.loads(value)
        except ValueError:
            raise ValueError(f"line {number}: expected 'key = value' with a JSON value") from None
    return top
