"""The K and V pools of all layers as one value: what both paths of ``kv_write`` write into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark import pointers
from dspark.ops import arguments
from dspark.ops.launch import WIDEST_ACCESS


@dataclass(frozen=True, eq=False)
class KVPoolTable:
    """K and V pools of L layers, each ``[S, NK, D]``: one row per slot. Holds the tensors, so they stay alive.

    The tensors share shape and device; dtype and strides are free (what the kernel needs is checked by the operation).
    K and V may be interleaved views of one buffer. valid: bool ``[S]`` or None; set for every row that is written, so
    that a reader can refuse a row that never was (fault F1-5).
    ``ValueError`` for ranks, shapes, devices or counts that differ, and for elements that share memory.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    valid: torch.Tensor | None

    def __init__(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], valid: torch.Tensor | None = None
    ) -> None:
        object.__setattr__(self, "valid", valid)
        object.__setattr__(self, "keys", tuple(keys))
        object.__setattr__(self, "values", tuple(values))
        if len(self.keys) != len(self.values):
            raise ValueError(f"values: got {len(self.values)} layers, need {len(self.keys)}, the layers of keys")
        tensors = {f"{name}[{layer}]": tensor for name, pools in self._named() for layer, tensor in enumerate(pools)}
        for name, tensor in tensors.items():
            arguments.require_rank(name, tensor, 3)
            arguments.require_shape(name, tensor, tuple(self.keys[0].shape), "[S, NK, D] of keys[0]")
            arguments.require_writable(name, tensor)
        if valid is not None:
            arguments.require_shape("valid", valid, (self.rows,), "[S] of keys[0]")
            arguments.require_dtype("valid", valid, (torch.bool,))
            tensors["valid"] = valid
        if tensors:
            arguments.require_one_device(**tensors)

    @classmethod
    def unchecked(
        cls, keys: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], valid: torch.Tensor | None
    ) -> KVPoolTable:
        """A table of tensors that are known to be as the constructor requires."""
        table = object.__new__(cls)
        table.__dict__.update(keys=keys, values=values, valid=valid)
        return table

    def _named(self) -> tuple[tuple[str, tuple[torch.Tensor, ...]], ...]:
        return (("keys", self.keys), ("values", self.values))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.keys)

    @property
    def rows(self) -> int:
        """S; 0 without layers."""
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The distinct dtypes, in order of appearance."""
        return tuple(dict.fromkeys(tensor.dtype for tensor in self.keys + self.values))

    @property
    def inner_strides(self) -> tuple[tuple[int, int], ...]:
        """The distinct (head, element) strides, in order of appearance."""
        return tuple(dict.fromkeys((tensor.stride(1), tensor.stride(2)) for tensor in self.keys + self.values))

    def aligned_bytes(self) -> int:
        """The largest power of two, at most 16, that divides every pool's address and row stride in bytes.

        16 is the widest access of a GPU. The stride of a pool of one row is never used, so it may be anything.
        """
        words = WIDEST_ACCESS
        for tensor in self.keys + self.values:
            words |= tensor.data_ptr() | (tensor.stride(0) * tensor.element_size() if self.rows > 1 else 0)
        return words & -words

    def layout(self) -> tuple[tuple[torch.dtype, tuple[int, ...], int], ...]:
        """dtype, strides and address of each tensor: with the shape, all that a kernel needs to know of them."""
        return tuple([(tensor.dtype, tensor.stride(), tensor.data_ptr()) for tensor in self.keys + self.values])

    def pointer_table(self, device: torch.device) -> torch.Tensor:
        """int64 ``[L, 4]`` on ``device``: K address, V address, K row stride, V row stride (in elements)."""
        layers = zip(self.keys, self.values, strict=True)
        return pointers.table([(k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)) for k, v in layers], device)
