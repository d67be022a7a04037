"""The draft's K and V pool: one row per slot and layer, with a storage format, reserved rows and a valid set."""

from __future__ import annotations

from typing import Any

import torch

from dspark.ops import arguments

STORAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


class StaleRowsError(RuntimeError):
    """Rows that hold no draft K and V would have been read; ``rows`` lists them."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        super().__init__(f"pool rows without draft K and V: {rows[:8]}{' ...' if len(rows) > 8 else ''}")


class KVPool:
    """K and V buffers ``[S, NK, D]`` of L layers.

    rows: S. dtype: how rows are stored; ``float8_e4m3fn`` divides by the layer's scale and saturates.
    reserved_rows: the first rows belong to nobody (padded lanes of a graph point there) and are never written.
    interleaved: K and V of a layer are views of one ``[S, 2, NK, D]`` buffer.
    valid_rows: bool ``[S]``, set for rows that were written since they were last freed.
    """

    def __init__(
        self,
        rows: int,
        layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        reserved_rows: int = 0,
        interleaved: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value, low in (("rows", rows, 1), ("layers", layers, 1), ("reserved_rows", reserved_rows, 0)):
            arguments.require_int(name, value, low)
        if dtype not in STORAGE_DTYPES:
            raise ValueError(f"dtype: got {dtype}, need one of {', '.join(map(str, STORAGE_DTYPES))}")
        self.rows, self.reserved_rows, self.dtype = rows, reserved_rows, dtype
        self.valid_rows = torch.zeros(rows, dtype=torch.bool, device=device)
        if interleaved:
            both = [torch.zeros(rows, 2, num_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(layers)]
            self._keys, self._values = [b[:, 0] for b in both], [b[:, 1] for b in both]
        else:
            shape = (rows, num_kv_heads, head_dim)
            self._keys, self._values = (
                [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2)
            )

    @property
    def layers(self) -> int:
        """L."""
        return len(self._keys)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """K ``[S, NK, D]`` of a layer, in the storage dtype."""
        return self._keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """V ``[S, NK, D]`` of a layer, in the storage dtype."""
        return self._values[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both."""
        return self._keys[layer_id], self._values[layer_id]

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Store rows ``cache_k, cache_v [T, NK, D]`` at ``loc [T]`` of ``layer`` (``layer_id``), and mark them valid.

        A negative or reserved loc is skipped, never taken from the end (fault F1-7). The inputs are not modified.
        k_scale, v_scale: what fp8 storage divides by (None: 1); refused for other storage.
        """
        kept = loc >= max(self.reserved_rows, 0)
        at = loc.to(torch.int64)[kept]
        self._keys[layer.layer_id][at] = self._stored(cache_k[kept], k_scale, "k_scale")
        self._values[layer.layer_id][at] = self._stored(cache_v[kept], v_scale, "v_scale")
        self.valid_rows[at] = True

    def _stored(self, rows: torch.Tensor, scale: float | None, name: str) -> torch.Tensor:
        if self.dtype != torch.float8_e4m3fn:
            if scale is not None:
                raise ValueError(f"{name}: got {scale}, need None: {self.dtype} rows are stored unscaled")
            return rows.to(self.dtype)
        wide = rows.to(torch.float32) / (1.0 if scale is None else scale)
        largest = torch.finfo(torch.float8_e4m3fn).max
        return wide.clamp(-largest, largest).to(torch.float8_e4m3fn)

    def free(self, rows: torch.Tensor) -> None:
        """The rows hold nobody's K and V from now on; negative ones are skipped."""
        self.valid_rows[rows.to(torch.int64)[rows >= 0]] = False

    def require_valid(self, rows: torch.Tensor) -> None:
        """Raise :class:`StaleRowsError` if a row that is about to be read was not written since it was freed (F1-5).

        A prefix that was restored from a cache has target K and V but no draft K and V. Waits for the device.
        """
        stale = rows[~self.valid_rows[rows.to(torch.int64)]]
        if stale.numel():
            raise StaleRowsError(stale.tolist())
