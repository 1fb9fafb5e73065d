"""Git blob ids: the one hash by which file contents are named (patch index lines, manifest, stored
originals).
"""

import hashlib

ABSENT = "0" * 40  # what git writes for "no such file"


def blob_id(data: bytes | None) -> str:
    """The id git gives `data`, or `ABSENT` for None."""
    if data is None:
        return ABSENT
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
