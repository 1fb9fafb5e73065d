"""The two loops of the reference indexer that torch cannot fuse, compiled by numba (a dependency of vLLM).

Both run on the calling thread and release the GIL. The source fixes their order of additions, so a row's
result does not depend on the launch. Importing this module compiles them once per machine: numba caches the
result beside this file or in the user's cache directory; where it can write neither, once per process.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _compiled(*signatures: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        try:
            return numba.njit(list(signatures), cache=True, **options)(function)
        except RuntimeError:  # numba found no directory to cache in
            return numba.njit(list(signatures), **options)(function)

    return wrap


@_compiled("void(float32[:, :, ::1], float32[:, ::1], float32[:, ::1], int64)")
def weighted_relu_sum(products: Any, weights: Any, scores: Any, start: int) -> None:
    """scores[r, start + s] = sum_h weights[r, h] * relu(products[r, h, s]).

    products [rows, heads, keys] float32, heads a multiple of 4; weights [rows, heads]; scores [>= rows, any].
    """
    rows, heads, keys = products.shape
    zero = np.float32(0)
    for r in range(rows):
        out = scores[r, start : start + keys]
        out[:] = zero
        for h in range(0, heads, 4):
            a, b, c, d = products[r, h], products[r, h + 1], products[r, h + 2], products[r, h + 3]
            wa, wb, wc, wd = weights[r, h], weights[r, h + 1], weights[r, h + 2], weights[r, h + 3]
            for s in range(keys):
                xa, xb, xc, xd = a[s], b[s], c[s], d[s]
                xa = xa if xa > zero else zero
                xb = xb if xb > zero else zero
                xc = xc if xc > zero else zero
                xd = xd if xd > zero else zero
                out[s] += wa * xa + wb * xb + wc * xc + wd * xd


@_compiled("void(uint16[:, :, ::1], float32[:, ::1], float32[:, ::1], int64)")
def weighted_relu_sum_bf16(products: Any, weights: Any, scores: Any, start: int) -> None:
    """`weighted_relu_sum` over bfloat16 products, given as their bits; sums are float32."""
    rows, heads, keys = products.shape
    bits = np.empty((4, keys), np.uint32)
    lanes = bits.view(np.float32)
    sign = np.uint16(0x8000)
    zero = np.uint32(0)
    for r in range(rows):
        out = scores[r, start : start + keys]
        out[:] = np.float32(0)
        for h in range(0, heads, 4):
            for i in range(4):
                source, target = products[r, h + i], bits[i]
                for s in range(keys):
                    wide = np.uint32(source[s]) << np.uint32(16)
                    target[s] = wide if source[s] < sign else zero
            a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
            wa, wb, wc, wd = weights[r, h], weights[r, h + 1], weights[r, h + 2], weights[r, h + 3]
            for s in range(keys):
                out[s] += wa * a[s] + wb * b[s] + wc * c[s] + wd * d[s]


@_compiled("void(float32[:, ::1], int64[::1], int32[:, ::1])")
def select_topk(scores: Any, visible: Any, chosen: Any) -> None:
    """chosen[r] = positions of the topk largest of scores[r, :visible[r]], ascending; ties: the lowest.

    scores [>= rows, keys], visible [rows] > topk, chosen [rows, topk]. The threshold is found by bisection
    over the scores' bits, read as integers of the same order: every step is one branchless count, and at
    most 32 are needed, whatever the scores. NaN counts as the lowest score.
    """
    rows, topk = chosen.shape
    keys = np.empty(scores.shape[1], np.int32)
    places = np.empty(scores.shape[1] + 1, np.int32)
    infinity, lowest = np.int32(0x7F800000), np.int32(-0x7F800001)
    for r in range(rows):
        limit = visible[r]
        bits = scores[r].view(np.int32)
        low, high = np.int32(0x7FFFFFFF), lowest
        for s in range(limit):
            magnitude = bits[s] & np.int32(0x7FFFFFFF)
            key = np.int32(bits[s] if bits[s] >= 0 else -magnitude)
            key = key if magnitude <= infinity else lowest
            keys[s] = key
            low = key if key < low else low
            high = key if key > high else high
        # invariant: at least topk keys are >= bottom, fewer than topk are > top
        bottom, top, enough = np.int64(low), np.int64(high), limit
        while bottom < top and enough != topk:
            middle = np.int32((bottom + top + 1) >> 1)
            count = np.uint32(0)
            for s in range(limit):
                count += np.uint32(keys[s] >= middle)
            if count >= topk:
                bottom, enough = np.int64(middle), np.int64(count)
            else:
                top = np.int64(middle) - 1
        threshold = np.int32(bottom)
        kept = 0
        if enough == topk:
            for s in range(limit):
                places[kept] = s
                kept += keys[s] >= threshold
        else:  # ties at the threshold: room for the first few only
            room = topk
            for s in range(limit):
                room -= keys[s] > threshold
            for s in range(limit):
                equal = keys[s] == threshold
                places[kept] = s
                kept += (keys[s] > threshold) | (equal & (room > 0))
                room -= equal
        chosen[r] = places[:topk]
