"""The package index as this machine's pip sees it: its address, and the certificates it trusts."""

import contextlib
import os
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pypi_simple


def client() -> "pypi_simple.PyPISimple":
    """A client of the index. ImportError: pypi-simple is not installed."""
    # Before requests is imported, which keeps the bundled certificates. pip has done the same for years:
    # behind a company's proxy only the system's store knows the certificate.
    with contextlib.suppress(ImportError):
        import truststore

        truststore.inject_into_ssl()
    import pypi_simple

    url = os.environ.get("PIP_INDEX_URL") or _configured()
    return pypi_simple.PyPISimple(url or pypi_simple.PYPI_SIMPLE_ENDPOINT)


@cache
def _configured() -> str | None:
    """The index of pip's configuration files."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None if asked.returncode == 0 else None
