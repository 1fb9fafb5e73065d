"""What is pinned: one `upstream.toml` per supported vLLM release."""

import re
from dataclasses import dataclass
from pathlib import Path

from . import toml
from .errors import Exit, PatchsetError


@dataclass(frozen=True)
class Pin:
    """The pinned upstream of one patch set. `folder` holds upstream.toml, manifest, series and patches."""

    folder: Path
    tag: str
    version: str
    commit: str
    repository: str
    project: str
    sdist: str
    sdist_sha256: str
    manifest_sha256: str
    python: str


def supported(patches: Path) -> list[str]:
    """Tags that have a patch set, oldest first."""
    return sorted((p.parent.name for p in patches.glob("*/upstream.toml")), key=order)


def current(package: Path) -> str:
    """The tag that SUPPORTED_VLLM names in `package` (the overlay's), read as text. Raises where none does."""
    path = package / "__init__.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if found := re.search(r'^SUPPORTED_VLLM = "([^"]+)"$', text, re.M):
        return f"v{found[1]}"
    raise PatchsetError(
        Exit.PATCH,
        f"{path} has no line SUPPORTED_VLLM",
        "restore it from version control, or name a patch set with --vllm",
    )


def order(tag: str) -> tuple[list[int], bool, str]:
    """Numbers by value; 0.12.0rc1 comes before 0.12.0, 0.12.0.post1 after it."""
    rest = tag.removeprefix("v").lstrip("0123456789.")
    numbers = [int(n) for n in re.findall("[0-9]+", tag.removesuffix(rest))]
    return numbers, not rest.startswith(("a", "b", "rc")), rest


def load(patches: Path, version: str) -> Pin:
    """The pin for `version` ("v0.12.0" or "0.12.0"). Raises a usage error that lists what is supported."""
    tag = version if version.startswith("v") else f"v{version}"
    if tag not in supported(patches):
        known = ", ".join(supported(patches)) or "none"
        raise PatchsetError(Exit.USAGE, f"vLLM {version!r} has no patch set here", f"supported: {known}")
    path = patches / tag / "upstream.toml"
    try:
        data = toml.loads(path.read_text(encoding="utf-8"))
        pin = Pin(
            folder=path.parent,
            tag=data["tag"],
            version=data["version"],
            commit=data["git"]["commit"],
            repository=data["git"]["repository"],
            project=data["sdist"]["project"],
            sdist=data["sdist"]["filename"],
            sdist_sha256=data["sdist"]["sha256"],
            manifest_sha256=data["manifest"]["sha256"],
            python=data["python"],
        )
    except (ValueError, KeyError, TypeError) as problem:
        raise PatchsetError(
            Exit.PATCH, f"{path} is unusable: {problem}", "restore it from version control"
        ) from problem
    if pin.tag != tag:
        raise PatchsetError(Exit.PATCH, f"{path} pins {pin.tag}, its folder says {tag}", "rename the folder")
    return pin


def problems(pin: Pin) -> list[str]:
    """What a port leaves blank where it cannot know it; a clone and an sdist are compared with it."""
    out = []
    if not re.fullmatch("[0-9a-f]{64}", pin.sdist_sha256):
        out.append(f"the sdist's sha256 {pin.sdist_sha256!r} is not 64 hex digits; mend upstream.toml")
    if not re.fullmatch("[0-9a-f]{7,40}", pin.commit):
        out.append(f"the commit {pin.commit!r} is not 7 to 40 hex digits; mend upstream.toml")
    return out
