"""Fixtures of the apply tests; the fake upstream itself is in tests/fake_upstream.py."""

import fake_upstream
from fake_upstream import case, fake, make, tree

__all__ = ["case", "fake", "make", "tree"]

fake_upstream.TRAILERS = "Because.\n\nUpstream-Status: Pending\nRemove-when: upstream does it\n"
