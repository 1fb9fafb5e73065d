"""Fixtures of the apply tests; the fake upstream itself is in tests/fake_upstream.py."""

from fake_upstream import case, fake, make, tree

__all__ = ["case", "fake", "make", "tree"]
