"""The recurrent state of a hybrid target: the pool of committed states, and the per-step states of one verify step.

A request owns a slot of the :class:`StatePool`, and a second one while its state at interval boundaries is tracked. A
verify step leaves the state after *every* token of its window in :class:`VerifyStates`; once the target has accepted
some of them, :meth:`VerifyStates.commit` moves the right one of each request to its slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.ops import fused_commit_track_indices, scatter_mamba_states_after_mtp_verify

NO_SLOT = -1
"""What an index holds for a request without a slot; every operation skips it."""


@dataclass(frozen=True)
class StateLayout:
    """What one layer keeps of one request.

    conv_dims: channels of each type of short convolution. conv_kernel: K; a window holds the last K-1 inputs.
    dims_first: windows are ``(dim, K-1)``, else ``(K-1, dim)``. ssm_shape: st of the SSM state, None without one.
    """

    layers: int
    conv_dims: tuple[int, ...]
    conv_kernel: int
    dims_first: bool = True
    ssm_shape: tuple[int, ...] | None = None
    conv_dtype: torch.dtype = torch.bfloat16
    ssm_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.conv_kernel < 2:
            raise ValueError(f"conv_kernel: got {self.conv_kernel}, need at least 2, or there is no window to keep")

    @property
    def taps(self) -> int:
        """K-1."""
        return self.conv_kernel - 1

    def rows(self, dim: int, tokens: int) -> tuple[int, int]:
        """The shape of ``tokens`` inputs of ``dim`` channels."""
        return (dim, tokens) if self.dims_first else (tokens, dim)

    def channels_first(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., dim, tokens]`` of rows in this layout, and back: a view."""
        return rows if self.dims_first else rows.transpose(-1, -2)


class StatePool:
    """Committed states: ``conv[type] [L, S, *window]`` and ``temporal [L, S, *st]`` (no elements without SSM).

    state_indices, track_indices: int64 ``[requests]`` on the device, the slots of each request, ``NO_SLOT`` for none.
    Slots below ``reserved`` are never given to a request: padding rows of a captured graph may point there.
    """

    def __init__(
        self, layout: StateLayout, requests: int, slots: int, device: torch.device | str, *, reserved: int = 1
    ) -> None:
        self.layout = layout
        leading = (layout.layers, slots)
        self.conv = tuple(
            torch.zeros(*leading, *layout.rows(dim, layout.taps), dtype=layout.conv_dtype, device=device)
            for dim in layout.conv_dims
        )
        self.temporal = torch.zeros(*leading, *(layout.ssm_shape or (0,)), dtype=layout.ssm_dtype, device=device)
        self.state_indices = torch.full((requests,), NO_SLOT, dtype=torch.int64, device=device)
        self.track_indices = torch.full((requests,), NO_SLOT, dtype=torch.int64, device=device)
        self._free = list(range(slots - 1, reserved - 1, -1))
        self._owned: dict[int, tuple[int, ...]] = {}

    @property
    def requests(self) -> int:
        """Requests that can hold slots at a time."""
        return self.state_indices.numel()

    def admit(self, request: int, *, tracked: bool = False) -> None:
        """Give ``request`` a slot of zeros, the state of an empty sequence, and another one if it is ``tracked``.

        ``ValueError`` when it has one already; ``RuntimeError``, with nothing taken, when too few slots are free.
        """
        if request in self._owned:
            raise ValueError(f"request: got {request}, which has slots already, need one without")
        count = 2 if tracked else 1
        if len(self._free) < count:
            raise RuntimeError(f"state pool: {len(self._free)} slots are free, request {request} needs {count}")
        slots = tuple(self._free.pop() for _ in range(count))
        self._owned[request] = slots
        for states in (*self.conv, self.temporal):
            states[:, slots[0]] = 0
        self.state_indices[request] = slots[0]
        self.track_indices[request] = slots[1] if tracked else NO_SLOT

    def release(self, request: int) -> None:
        """Take the slots of ``request`` back. A batch that still holds it for a step then skips it (fault F3-3)."""
        self.state_indices[request] = NO_SLOT
        self.track_indices[request] = NO_SLOT
        self._free.extend(reversed(self._owned.pop(request)))


class VerifyStates:
    """The states after each of the W tokens of a verify step, for every request row of ``pool``.

    intermediate_conv_window: for each type ``[L, R, W, *window]``, window t the K-1 inputs up to token t; overlapping
    views of rows of W+K-2 inputs with ``dedup``, else stored one by one. intermediate_ssm: ``[L, R, W, *st]``.
    With ``temporal`` and ``conv`` of the pool this is what ``scatter_mamba_states_after_mtp_verify`` takes.
    """

    def __init__(self, pool: StatePool, width: int, *, dedup: bool = True) -> None:
        layout = pool.layout
        self.pool = pool
        self.width = width
        self.temporal = pool.temporal
        self.conv = pool.conv
        leading = (layout.layers, pool.requests)
        self.intermediate_ssm = pool.temporal.new_zeros(*leading, width, *pool.temporal.shape[2:])
        self._rows: tuple[torch.Tensor, ...] | None = None
        if dedup:
            tokens = width + layout.taps - 1
            self._rows = tuple(
                states.new_zeros(*leading, *layout.rows(dim, tokens))
                for dim, states in zip(layout.conv_dims, pool.conv, strict=True)
            )
            self.intermediate_conv_window = tuple(self._windows(rows) for rows in self._rows)
        else:
            self.intermediate_conv_window = tuple(
                states.new_zeros(*leading, width, *states.shape[2:]) for states in pool.conv
            )

    def _windows(self, rows: torch.Tensor) -> torch.Tensor:
        """``[L, R, W, *window]``: one token further on is one step further on."""
        layout = self.pool.layout
        layers, requests, outer, inner = rows.stride()
        token = inner if layout.dims_first else outer
        window = layout.rows(layout.channels_first(rows).shape[-2], layout.taps)
        return rows.as_strided((*rows.shape[:2], self.width, *window), (layers, requests, token, outer, inner))

    def put_conv(self, kind: int, layer: int, inputs: torch.Tensor) -> None:
        """Store the windows after each of ``inputs [R, W, dim]``, which follow the committed window of each request."""
        layout = self.pool.layout
        slots = self.pool.state_indices.clamp(min=0)  # a request without a slot stores what nobody reads
        before = layout.channels_first(self.pool.conv[kind][layer, slots])
        # The oldest input of the committed window is in no window of this step.
        tokens = torch.cat([before[..., 1:], inputs.transpose(1, 2)], dim=-1)
        if self._rows is not None:
            layout.channels_first(self._rows[kind][layer]).copy_(tokens)
        else:
            windows = tokens.unfold(-1, layout.taps, 1).transpose(1, 2)
            layout.channels_first(self.intermediate_conv_window[kind][layer]).copy_(windows)

    def put_ssm(self, layer: int, states: torch.Tensor) -> None:
        """Store the SSM states ``[R, W, *st]`` after each token."""
        self.intermediate_ssm[layer].copy_(states)

    def commit(
        self,
        accept_index: torch.Tensor,
        accept_lens: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        track_interval: int = 0,
        *,
        path: str | None = None,
    ) -> None:
        """Move the state of each request's last accepted token to its slot, and that at an interval to its track slot.

        accept_index: ``[R, depth]`` flat node ids. accept_lens: ``[R]``. seq_lens: ``[R]`` lengths before the step, or
        None where nothing is tracked (conformance/CONTRACTS.md sections 7 and 8, with their errors and faults).
        """
        last, track = fused_commit_track_indices(
            accept_index, accept_lens, seq_lens, self.width, track_interval, path=path
        )
        self.commit_steps(last, track, path=path)

    def commit_steps(self, last: torch.Tensor, track: torch.Tensor | None, *, path: str | None = None) -> None:
        """:meth:`commit` where the steps ``[R]`` are known (conformance/CONTRACTS.md section 8, with its faults)."""
        track_slots = None if track is None else self.pool.track_indices
        scatter_mamba_states_after_mtp_verify(self, self.pool.state_indices, last, track_slots, track, path=path)
