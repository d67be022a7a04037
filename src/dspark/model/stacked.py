"""Parameters of all layers in one buffer, as views: a cross-layer product without a copy that could go stale.

Each layer's parameter *is* a slice of the buffer, so whatever copies into the parameter (``load_state_dict``,
``.data.copy_``, an optimizer) updates the product. What gives a parameter new storage (``.to(dtype)``, ``.cuda()``,
``to_empty``, ``assign=True``, deepcopy) breaks the views, and :class:`StackedLayers` makes them again. What it cannot
see (rebinding one layer's parameter) is found per call by :func:`stacked_view`, which returns None.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

STACKED = ("qkv_proj.weight", "k_norm.weight")
"""Parameters of an attention layer that a cross-layer operation reads for all layers at once."""


def stacked_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one ``[L, *shape]`` strided view of their common storage, or None where they have none.

    They must share dtype, shape, strides and one storage, and lie at equal positive distances in it; equal distances of
    addresses alone prove nothing, since two allocations can happen to lie so.
    """
    first = tensors[0]
    layout = (first.dtype, first.shape, first.stride(), _storage(first))
    if layout[3] is None or any((t.dtype, t.shape, t.stride(), _storage(t)) != layout for t in tensors[1:]):
        return None
    offsets = [tensor.storage_offset() for tensor in tensors]
    step = offsets[1] - offsets[0] if len(tensors) > 1 else 1
    if step <= 0 or any(after - before != step for before, after in itertools.pairwise(offsets)):
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (step, *first.stride()), offsets[0])


def _storage(tensor: torch.Tensor) -> tuple[str, int] | None:
    """What tells one storage from another; None for one without memory (meta, empty)."""
    if tensor.device.type == "meta":
        return None
    address = tensor.untyped_storage().data_ptr()
    return (str(tensor.device), address) if address else None


def stack(parameters: Sequence[nn.Parameter]) -> None:
    """Move the parameters, equal in shape, dtype and device, into one new buffer; each stays the same object."""
    with torch.no_grad():
        buffer = torch.stack([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, buffer, strict=True):
            parameter.data = part


class StackedLayers(nn.ModuleList):
    """Layers whose parameters named in ``names`` are views of one buffer each.

    names: dotted, relative to a layer; a name that not every layer has as a parameter is left alone.
    """

    def __init__(self, layers: Iterable[nn.Module], names: Sequence[str] = STACKED) -> None:
        super().__init__(layers)
        self.names = tuple(names)
        self.register_load_state_dict_post_hook(_restack_after_load)  # type: ignore[no-untyped-call]
        self.restack()

    def restack(self) -> None:
        """Make the views again where they are broken; what differs in shape, dtype or device is left alone."""
        for name in self.names:
            parameters = [self._parameter(layer, name) for layer in self]
            present = [parameter for parameter in parameters if parameter is not None]
            kinds = {(parameter.shape, parameter.dtype, parameter.device) for parameter in present}
            stackable = len(present) == len(parameters) and len(kinds) == 1 and present[0].device.type != "meta"
            if stackable and stacked_view(present) is None:
                stack(present)

    @staticmethod
    def _parameter(layer: nn.Module, name: str) -> nn.Parameter | None:
        found: Any = layer
        for part in name.split("."):
            found = getattr(found, part, None)
        return found if isinstance(found, nn.Parameter) else None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StackedLayers:
        # .to, .cuda, .half, to_empty and the like: each gives every parameter a storage of its own.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.restack()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StackedLayers:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.restack()
        return copied


def _restack_after_load(module: nn.Module, keys: object) -> None:
    """``load_state_dict(assign=True)`` binds new parameters; this hook also runs when a parent is loaded."""
    assert isinstance(module, StackedLayers)
    module.restack()
