"""The environment that runs the patched vLLM: made with `venv`, filled from exact lock files, checked by
content.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlparse

from .errors import Exit, PatchsetError
from .pin import Pin
from .ui import progress

MARKER = re.compile(r'python_version (<|>=|>) "3\.(\d+)"')
SUPPORTED = ((3, 10), (3, 14))  # from, below
OVERLAY = "vllm-sfa-cp"


class Environment:
    """A virtual environment, existing or to be made."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.bin = self.root / "bin"
        self.python = self.bin / "python"
        self.log = self.root / "sfa-cp-install.log"
        self.stamp = self.root / "sfa-cp-check.json"

    @property
    def exists(self) -> bool:
        """Whether a Python of a supported version answers there."""
        return self.python.exists() and self.site is not None

    @property
    def active(self) -> bool:
        """Whether this process runs in it."""
        return Path(sys.prefix).resolve() == self.root.resolve()

    @property
    def site(self) -> Path | None:
        """Its site-packages."""
        return next((p for p in sorted(self.root.glob("lib/python3.*/site-packages")) if p.is_dir()), None)

    @property
    def minor(self) -> int:
        """The minor version of its Python."""
        return int(self.site.parent.name.rpartition(".")[2]) if self.site else sys.version_info[1]

    def make(self) -> None:
        """Create it where absent, repair it where its Python is gone. Raises where something else is in the
        way.
        """
        if self.exists:
            return
        if self.root.exists() and any(self.root.iterdir()) and not (self.root / "pyvenv.cfg").is_file():
            raise PatchsetError(
                Exit.TARGET, f"{self.root} is not a virtual environment", "name another folder with --venv"
            )
        with progress(f"making {self.root}", None):
            done = subprocess.run(
                [sys.executable, "-m", "venv", "--clear", os.fspath(self.root)],
                capture_output=True,
                text=True,
                env=clean(),
                check=False,
            )
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
            hint = "install your system's venv package (python3-venv), or use another Python"
            raise PatchsetError(Exit.NOT_SO, f"{self.root} cannot be made: {said[-1]}", hint)

    def installed(self) -> dict[str, str]:
        """Normalised name -> version of every distribution, read from folder names."""
        out = {}
        for path in self.site.glob("*.dist-info") if self.site else ():
            name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
            out[normal(name)] = version
        return out

    def lacks(self, *locks: Path) -> list[str]:
        """Pins of the lock files that are not installed in exactly that version (a local suffix is allowed)."""
        have = self.installed()
        pins = (pin for lock in locks for pin in read_lock(lock, self.minor))
        return [f"{name}=={v}" for name, v in pins if have.get(name, "").partition("+")[0] != v]

    def install(self, title: str, *locks: Path) -> None:
        """Install lock files exactly; nothing that they do not name."""
        wanted = self.lacks(*locks)
        if not wanted:
            return
        arguments = ["--no-deps", *(part for lock in locks for part in ("-r", os.fspath(lock)))]
        self.pip(title, ["install", *arguments], total=len(wanted))

    def pip(
        self,
        title: str,
        arguments: list[str],
        total: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Run pip with progress; its output goes to the log."""
        pip_run(self.python, title, arguments, self.log, total, variables)

    def torch_problem(self) -> str | None:
        """Why torch is not the CPU build that is wanted, read without importing it."""
        path = self.site / "torch" / "version.py" if self.site else None
        if path is None or not path.is_file():
            return "torch is not installed"
        match = re.search(r"^cuda\b[^=]*= *(.+)$", path.read_text(encoding="utf-8"), re.M)
        if match and match[1].strip() not in ("None", "''"):
            return f"torch came out as a CUDA build ({match[1].strip()})"
        return None

    def vllm_is(self, pin: Pin, tree: Path) -> bool:
        """Whether the pinned vLLM is installed from `tree`, editable."""
        version = self.installed().get("vllm", "")
        return version.partition("+")[0] == pin.version and self._from("vllm") == tree.resolve()

    def install_vllm(self, pin: Pin, tree: Path) -> None:
        """Build and install `tree`, editable, without compiled kernels; the version must read as pinned."""
        variables = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": pin.version}
        arguments = ["install", "--no-build-isolation", "--no-deps", "-e", os.fspath(tree)]
        self.pip(f"building vLLM {pin.version}", arguments, variables=variables)
        if not self.vllm_is(pin, tree):
            found = self.installed().get("vllm", "nothing")
            raise PatchsetError(
                Exit.NOT_SO,
                f"vLLM installed as {found}, wanted {pin.version}",
                f"see {self.log}, then run this again",
            )

    def overlay_is(self, folder: Path) -> bool:
        """Whether the overlay is installed from `folder`, in its present version."""
        return (
            self.installed().get(OVERLAY) == overlay_version(folder)
            and self._from(OVERLAY) == folder.resolve()
        )

    def install_overlay(self, folder: Path) -> None:
        """Install the overlay, editable."""
        self.pip(
            "installing the overlay",
            ["install", "--no-build-isolation", "--no-deps", "-e", os.fspath(folder)],
        )

    def uninstall_overlay(self) -> bool:
        """Remove the overlay; False where it was not installed."""
        if not self.exists or OVERLAY not in self.installed():
            return False
        self.pip("removing the overlay", ["uninstall", "-y", OVERLAY])
        self.stamp.unlink(missing_ok=True)
        return True

    def checked(self, digest: str) -> bool:
        """Whether the self-check has passed for exactly this combination before."""
        try:
            return bool(json.loads(self.stamp.read_text(encoding="utf-8"))["passed"] == digest)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def note_check(self, digest: str) -> None:
        """Remember a passed self-check."""
        self.stamp.write_text(json.dumps({"passed": digest}) + "\n", encoding="utf-8")

    def _from(self, name: str) -> Path | None:
        pattern = f"{name.replace('-', '_')}-*.dist-info/direct_url.json"
        for path in self.site.glob(pattern) if self.site else ():
            try:
                url = json.loads(path.read_text(encoding="utf-8"))["url"]
            except (OSError, ValueError, KeyError):
                return None
            return Path(unquote(urlparse(url).path)).resolve()
        return None


def clean() -> dict[str, str]:
    """Our environment without what would leak this Python into another."""
    return {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")
    }


def pip_run(
    python: Path,
    title: str,
    arguments: list[str],
    log: Path,
    total: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m pip ARGUMENTS`. Raises with the last error line pip printed; stops pip when interrupted."""
    command = [os.fspath(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    last = ""
    with progress(title, total) as tick, log.open("a", encoding="utf-8") as record:
        record.write(f"$ {' '.join(command)}\n")
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**clean(), **(variables or {})},
        )
        try:
            for line in child.stdout or ():
                record.write(line)
                text = line.strip()
                if text.startswith(("ERROR", "error", "No module named")) or "No module named pip" in text:
                    last = last or text
                if text.startswith(("Collecting", "Requirement already")):
                    tick(1, text)
                elif text.startswith(("Downloading", "Using cached", "Installing")):
                    tick(0, text)
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if code:
        raise PatchsetError(
            Exit.NOT_SO,
            f"{title} failed: {last or f'pip ended with {code}'}",
            f"see {log}, then run this again",
        )


def read_lock(path: Path, minor: int) -> list[tuple[str, str]]:
    """(normalised name, version) of every pin that applies to Python 3.`minor`."""
    out = []
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        requirement, _, marker = line.partition(";")
        name, equals, version = requirement.strip().partition("==")
        condition = MARKER.fullmatch(marker.strip())
        if not equals or (marker and not condition):
            raise PatchsetError(
                Exit.PATCH, f"{path}: {line!r} is not an exact pin", "restore it from version control"
            )
        if condition:
            edge = int(condition[2])
            holds = {"<": minor < edge, ">=": minor >= edge, ">": minor > edge}[condition[1]]
            if not holds:
                continue
        out.append((normal(name), version))
    return out


def normal(name: str) -> str:
    """A distribution name in its normalised spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def overlay_version(folder: Path) -> str:
    """The version that overlay/pyproject.toml states."""
    match = re.search(r'^version = "([^"]+)"', (folder / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    return match[1] if match else ""


def digest_of(parts: Iterable[str], files: Iterable[Path]) -> str:
    """One hash over strings and the bytes of files."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def self_check(program: Path) -> Mapping[str, object]:
    """Run `vllm-sfa-cp doctor --json` and return its report. Raises where it crashes or finds anything."""
    if not program.is_file():
        raise PatchsetError(Exit.NOT_SO, f"{program} is missing", "run apply.py again without --no-install")
    with progress("self-check (imports vLLM, can take a minute)", None):
        done = subprocess.run(
            [os.fspath(program), "doctor", "--json"], capture_output=True, text=True, env=clean(), check=False
        )
    try:
        report = json.loads(done.stdout.strip().splitlines()[-1])
        healthy, found = bool(report["ok"]), [str(p) for p in report["problems"]]
    except (ValueError, IndexError, KeyError, TypeError) as problem:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise PatchsetError(
            Exit.NOT_SO, f"the self-check crashed: {said}", f"run {program} doctor"
        ) from problem
    if not healthy:
        first = found[0] if found else "no reason given"
        raise PatchsetError(
            Exit.NOT_SO, f"the self-check found: {first}", f"run {program} doctor", tuple(found)
        )
    return dict(report)
