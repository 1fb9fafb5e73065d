"""The engine behind `apply.py`: obtain, verify, patch, report and revert a pinned vLLM.

Nothing here imports torch or vLLM, and everything that applying, reporting and reverting needs is the
standard library, because it runs before anything is installed.
"""
