"""The operator contract of torch-npu, read from its wheel, and how it differs between versions.

torch-npu cannot be imported without Ascend's CANN, but its wheel names every operator: the schema strings it
registers are in `libtorch_npu.so`. Needs pip and the package index on first use; no torch.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .source import cache_dir

PINNED = "2.9.0.post9"
DIGESTS = {PINNED: "aac3e1b6a22755731fceceed502c3234cdf0b994c44a3bb1b165c6be7c52efd4"}
# Operators that ops/ascend.py calls, and the arguments it passes (never None).
CALLED: Mapping[str, tuple[str, ...]] = {
    "npu_interleave_rope": ("x", "cos", "sin"),
    "npu_kv_rmsnorm_rope_cache": (
        *("kv", "gamma", "cos", "sin", "index", "k_cache", "ckv_cache"),
        *("epsilon", "cache_mode", "is_output_kv"),
    ),
    "npu_lightning_indexer": (
        *("query", "key", "weights", "actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"),
        *("layout_query", "layout_key", "sparse_count", "sparse_mode"),
    ),
    "npu_scatter_nd_update_": ("input", "indices", "updates"),
    "npu_sparse_flash_attention": (
        *("query", "key", "value", "sparse_indices", "scale_value", "block_table"),
        *("actual_seq_lengths_query", "actual_seq_lengths_kv", "query_rope", "key_rope"),
        *("sparse_block_size", "layout_query", "layout_kv", "sparse_mode", "attention_mode"),
    ),
    "npu_transpose_batchmatmul": ("input", "weight", "perm_x1", "perm_y"),
}
_LIBRARY = "torch_npu/lib/libtorch_npu.so"
# A schema string: printable, terminated by NUL, "name(arguments) -> returns".
_SCHEMA = re.compile(
    rb"(?<=\x00)([a-z_][a-z0-9_]*(?:\.[a-z0-9_]+)?\([\x20-\x7e]*\) -> [\x20-\x7e]+)(?=\x00)", re.I
)
# The interpreter and platforms whose wheel is read: schemas are the same in all of one version.
_TAGS = (
    *("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--only-binary=:all:"),
    *(f"--platform={tag}_x86_64" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "linux")),
)


class Unavailable(Exception):
    """The wheel of a version could not be obtained or is not what was pinned. The message says which."""


@dataclass(frozen=True)
class Argument:
    """One argument of a schema: type and default as written, e.g. `Tensor?` and `None`."""

    type: str
    default: str | None
    keyword_only: bool


def wheel(version: str = PINNED, timeout: float = 300) -> Path:
    """The cached wheel of torch-npu `version`, downloaded by name when absent or damaged.

    timeout: seconds for the download. Raises Unavailable.
    """
    folder = cache_dir() / "torch-npu" / version
    for path in sorted(folder.glob("*.whl")):
        if _intact(path, version):
            return path
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", *_TAGS]
        command += ["--disable-pip-version-check", f"--dest={scratch}", f"torch-npu=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"torch-npu {version}: no download within {timeout:.0f} s") from None
        found = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(found) != 1:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise Unavailable(f"torch-npu {version}: {lines[-1] if lines else 'pip downloaded nothing'}")
        if not _intact(found[0], version):
            raise Unavailable(f"torch-npu {version}: the downloaded wheel has not the pinned sha256")
        return Path(shutil.move(found[0], folder / found[0].name))


def schemas(path: Path) -> dict[str, str]:
    """Operator name -> schema string, as the wheel at `path` registers them. Overloads keep their suffix."""
    with zipfile.ZipFile(path) as archive:
        data = archive.read(_LIBRARY)
    texts = (match.decode() for match in _SCHEMA.findall(data))
    return {text.partition("(")[0]: text for text in texts}


def arguments(schema: str) -> dict[str, Argument]:
    """Argument name -> what the schema says of it, in order."""
    inner = schema[schema.index("(") + 1 : schema.rindex(") -> ")]
    found: dict[str, Argument] = {}
    keyword_only = False
    for part in _split(inner):
        if part == "*":
            keyword_only = True
            continue
        declaration, equals, default = part.partition("=")
        kind, _, name = declaration.rpartition(" ")
        found[name] = Argument(kind, default if equals else None, keyword_only)
    return found


def differences(old: str, new: str, passed: Collection[str]) -> list[str]:
    """What changed between two schemas of an operator that is called with arguments `passed`, none None.

    A line that starts with "breaks: " breaks such a call; the others are for a person to read.
    """
    before, after = arguments(old), arguments(new)
    lines = []
    for name, argument in before.items():
        breaks = "breaks: " if name in passed else ""
        if name not in after:
            lines.append(f"{breaks}argument {name} is gone")
            continue
        now = after[name]
        if now.type != argument.type:
            harmless = now.type == argument.type.removesuffix("?") or now.type == argument.type + "?"
            lines.append(
                f"{'' if harmless else breaks}argument {name} was {argument.type}, is {now.type}",
            )
        if now.default != argument.default:
            required = now.default is None and name not in passed
            lines.append(
                f"{'breaks: ' if required else ''}default of {name} was {argument.default}, is {now.default}"
            )
    for name, argument in after.items():
        if name not in before:
            required = argument.default is None
            lines.append(f"{'breaks: ' if required else ''}new argument {argument.type} {name}")
    if _positional(after, before) != _positional(before, after):
        lines.append("breaks: the positional arguments changed")
    if _returns(old) != _returns(new):
        lines.append(f"breaks: returned {_returns(old)}, returns {_returns(new)}")
    return lines


def compare_schemas(
    versions: Iterable[str], operators: Mapping[str, tuple[str, ...]] = CALLED
) -> dict[str, object]:
    """Compare the operators we call in each of `versions` with the pinned version.

    Returns a JSON-ready report: `pinned`, `breaking` (true if a difference breaks our calls), and per version
    `{"version", "sha256", "unavailable": reason or None, "operators": {name: {"present", "differences"}}}`,
    where only operators that differ are listed.
    """
    path = wheel(PINNED)
    base = schemas(path)
    entries: list[dict[str, object]] = []
    breaking = False
    for version in versions:
        changed: dict[str, dict[str, object]] = {}
        entry: dict[str, object] = {
            "version": version,
            "sha256": None,
            "unavailable": None,
            "operators": changed,
        }
        entries.append(entry)
        try:
            path = wheel(version)
            found = schemas(path)
        except Unavailable as problem:
            entry["unavailable"] = str(problem)
            continue
        entry["sha256"] = _sha256(path)
        for name, passed in operators.items():
            lines = ["breaks: the operator is not registered"]
            if name in found:
                lines = differences(base[name], found[name], passed)
            if lines:
                changed[name] = {"present": name in found, "differences": lines}
            breaking |= any(line.startswith("breaks: ") for line in lines)
    return {"pinned": PINNED, "breaking": breaking, "versions": entries}


def _positional(arguments: Mapping[str, Argument], shared: Mapping[str, Argument]) -> list[str]:
    return [name for name, a in arguments.items() if name in shared and not a.keyword_only]


def _returns(schema: str) -> str:
    return schema[schema.rindex(") -> ") + 5 :]


def _split(text: str) -> Iterator[str]:
    """Split an argument list at the commas outside brackets and quotes."""
    part, depth, quote = "", 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "," and not depth:
            yield part.strip()
            part = ""
            continue
        part += char
    if part.strip():
        yield part.strip()


def _intact(path: Path, version: str) -> bool:
    return zipfile.is_zipfile(path) and DIGESTS.get(version) in (None, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()
