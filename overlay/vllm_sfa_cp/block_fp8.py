"""The block-scaled FP8 format of DeepSeek releases: float8_e4m3fn weights and one float32 scale per block.

`weight[i, j]` stands for `weight[i, j] * weight_scale_inv[i // 128, j // 128]`; blocks at the right and
bottom edge may be smaller. Plain torch, every operation correctly rounded, so that the same input gives the
same bytes on every machine.
"""

import torch
from torch.nn import functional as F

BLOCK = 128
FP8_MAX = 448.0
QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a float [out, in] matrix into FP8 [out, in] and scales [ceil(out/128), ceil(in/128)]."""
    rows, cols = weight.shape
    padded = F.pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    scale[scale == 0] = 1.0
    scaled = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    return scaled.reshape(padded.shape)[:rows, :cols].to(torch.float8_e4m3fn).contiguous(), scale


def dequantise(
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    block: tuple[int, int] = (BLOCK, BLOCK),
) -> torch.Tensor:
    """The float [out, in] matrix that FP8 `weight` and block `scale` stand for.

    The product is formed in float32 and rounded once, whatever `dtype` is.
    """
    rows, cols = weight.shape
    block_n, block_k = block
    full = torch.empty(rows, cols, dtype=dtype, device=weight.device)
    wide = (scale * _WIDEN).repeat_interleave(block_k, dim=1)[:, :cols]
    for i in range(scale.shape[0]):
        part = slice(i * block_n, min((i + 1) * block_n, rows))
        full[part] = _widen(weight[part]).mul_(wide[i])
    return full


_WIDEN = 256.0


def _widen(weight: torch.Tensor) -> torch.Tensor:
    """FP8 as float32, divided by `_WIDEN`; NaN becomes a number.

    torch converts FP8 one element at a time. Moved up by seven bits the code is a float16 of the same sign
    and mantissa whose exponent bias is eight larger, subnormals included, and that conversion is vectorised.
    """
    bits = weight.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float()
