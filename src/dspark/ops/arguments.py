"""Argument rules that every operation shares: what no path can compute is a ``ValueError`` that names the argument.

Each function raises before anything is written (conformance/CONTRACTS.md section 9, the row of errors).
"""

from __future__ import annotations

import struct

import torch

INDEX_DTYPES = (torch.int32, torch.int64)
"""Positions, locations and lengths."""
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Activations: bf16 is what the kernels take, the others are computed by the eager paths."""
SIGNED_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
"""Token ids: any signed width. bool and uint8 are masks and bytes, not ids."""


def require_tensor(name: str, value: object) -> None:
    """``value`` must be a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: got {type(value).__name__}, need a tensor")


def require_rank(name: str, tensor: torch.Tensor, rank: int) -> None:
    """``tensor`` must have ``rank`` dimensions: a multi-row positions tensor is not a flat one (fault F1-25)."""
    require_tensor(name, tensor)
    if tensor.dim() != rank:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need {rank} dimension{'s' if rank != 1 else ''}")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """``tensor`` must have exactly ``shape``; ``meaning`` says what the sizes are, e.g. ``[T] of qkv``."""
    require_rank(name, tensor, len(shape))
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need {shape}, {meaning}")


def require_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """``tensor`` must have one of the dtypes."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name}: got {str(tensor.dtype).removeprefix('torch.')}, need one of {names}")


def require_floating(name: str, tensor: torch.Tensor) -> None:
    """``tensor`` must have a floating dtype."""
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{name}: got {str(tensor.dtype).removeprefix('torch.')}, need a floating dtype")


def require_eps(name: str, value: object) -> float:
    """``value``, a finite number >= 0, rounded to fp32: what every path adds (CONTRACTS.md section 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3.0e38:
        raise ValueError(f"{name}: got {value!r}, need a finite number >= 0")
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def require_one_device(**tensors: torch.Tensor | None) -> None:
    """Every given tensor must be on the device of the first."""
    present = [(name, tensor.device) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    for name, device in present[1:]:
        if device != first:
            raise ValueError(f"{name}: got device {device}, need {first}, the device of {first_name}")


def require_no_grad(**tensors: torch.Tensor | None) -> None:
    """No path has a backward; with grad mode on, an input that requires grad would be silently cut off."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name}: got a tensor that requires grad, need torch.no_grad() or a detached tensor")


def require_writable(name: str, tensor: torch.Tensor) -> None:
    """Elements of an output must not share memory: a stride of 0 over more than one element is refused."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0 and tensor.numel():
            raise ValueError(
                f"{name}: got strides {tensor.stride()} for shape {tuple(tensor.shape)}, "
                "need one memory location per element"
            )


def require_rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    """R: ``rotary_dim``, or ``head_dim`` for None; even, 2..head_dim."""
    if rotary_dim is None:
        rotary_dim = head_dim
    require_int("rotary_dim", rotary_dim, 2)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim: got {rotary_dim}, need an even number of at most head_dim = {head_dim}")
    return rotary_dim


def require_window(name: str, lens: torch.Tensor, width: int, rows: int) -> None:
    """``lens [B]`` and the window's ``width`` W must describe ``rows`` rows: B * W = T (fault F1-20)."""
    require_int("locs_row_width", width, 1)
    require_rank(name, lens, 1)
    require_dtype(name, lens, INDEX_DTYPES)
    if lens.numel() * width != rows:
        raise ValueError(f"{name}: got {lens.numel()} requests of width {width}, need B * W = {rows} rows")


def require_int(name: str, value: object, low: int) -> int:
    """``value`` must be an int (not bool) of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}: got {value!r}, need an int >= {low}")
    return value
