"""state_scatter: bad input is refused before anything is written, with an error that names the argument
(CONTRACTS.md sections 8 and 9)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ..fixtures.calls.state_scatter import OP
from ..fixtures.guard import Arena
from ..fixtures.implementations.ops import (
    fused_conv_window_scatter_multi,
    fused_conv_window_scatter_with_mask,
    fused_mamba_state_scatter_with_mask,
    scatter_mamba_states_after_mtp_verify,
)
from ..fixtures.ledger import Label, expect_equal, expect_raises

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]
FUNCTIONS: dict[str, Callable[..., None]] = {
    "mamba": fused_mamba_state_scatter_with_mask,
    "window": fused_conv_window_scatter_with_mask,
    "multi": fused_conv_window_scatter_multi,
    "verify": scatter_mamba_states_after_mtp_verify,
}


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16, device: Any = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def good(function: str, device: torch.device) -> Arguments:
    """A call that writes ones over zeros: L = 2, S = 5, Rq = 3, W = 4."""

    def pair(*entry: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ones(2, 5, *entry, device=device) * 0, ones(2, 3, 4, *entry, device=device)

    def rows() -> torch.Tensor:
        return torch.arange(3, device=device)

    if function in ("mamba", "window"):
        dst, src = pair(6, 3)
        return {"dst": dst, "src": src, "dst_indices_raw": rows(), "step_indices_raw": rows()}
    if function == "multi":
        index = ("dst_indices_raw", "step_indices_raw", "dst_indices2_raw", "step_indices2_raw")
        return {"pairs": [pair(6, 3), pair(4, 3)], **{name: rows() for name in index}}
    ssm, conv = pair(2, 3, 4), [pair(6, 3), pair(4, 3)]
    caches = SimpleNamespace(
        temporal=ssm[0],
        intermediate_ssm=ssm[1],
        conv=[dst for dst, _ in conv],
        intermediate_conv_window=[src for _, src in conv],
    )
    index = ("state_indices_tensor", "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track")
    return {"mamba_caches": caches, **{name: rows() for name in index}}


def destinations(arguments: Arguments) -> list[torch.Tensor]:
    """Everything that a call may write."""
    if "mamba_caches" in arguments:
        caches = arguments["mamba_caches"]
        return [caches.temporal, *caches.conv]
    return [dst for dst, _ in arguments["pairs"]] if "pairs" in arguments else [arguments["dst"]]


def changed(name: str, change: Callable[[torch.Tensor], object]) -> Change:
    return lambda a: {name: change(a[name])}


def sources(make: Callable[[torch.Tensor], object]) -> Change:
    return lambda a: {"src_indices_raw": make(a["dst_indices_raw"])}


def pair_changed(at: int, change: Callable[[torch.Tensor, torch.Tensor], object]) -> Change:
    return lambda a: {"pairs": [change(*pair) if index == at else pair for index, pair in enumerate(a["pairs"])]}


def cache_changed(**changes: Callable[[Any], object]) -> Change:
    def change(arguments: Arguments) -> Arguments:
        caches = arguments["mamba_caches"]
        replaced = {name: make(getattr(caches, name)) for name, make in changes.items()}
        return {"mamba_caches": SimpleNamespace(**{**vars(caches), **replaced})}

    return change


INDEX_ERRORS: dict[str, tuple[tuple[str, ...], Callable[[torch.Tensor], object]]] = {
    "of-two-dimensions": (("1 dimension",), lambda index: index[:, None]),
    "too-short": (("(2,)", "(3,)"), lambda index: index[:2]),
    "floating": (("float32",), lambda index: index.float()),
    "bool": (("bool",), lambda index: index.bool()),
    "uint8": (("uint8",), lambda index: index.to(torch.uint8)),
    "int16": (("int16",), lambda index: index.short()),
    "a-list": (("list",), lambda index: index.tolist()),
    "on-another-device": (("device meta",), lambda index: index.to("meta")),
}
PAIR_ERRORS: dict[str, tuple[tuple[str, ...], Change]] = {
    "layer-counts": (("src", "(2, 3, 4, 6, 3)", "layers"), changed("dst", lambda dst: dst[:1])),
    "window-dims": (("src", "(2, 3, 4, 6, 3)", "(2, 3, 4, 6, 2)"), changed("dst", lambda dst: dst[..., :2].clone())),
    "window-dims-swapped": (("src", "(2, 3, 4, 3, 6)"), changed("dst", lambda dst: dst.mT.contiguous())),
    "dtypes-that-differ": (("src", "float16", "bfloat16"), changed("src", lambda src: src.half())),
    "source-without-steps": (("src", "dimensions"), changed("src", lambda src: src[:, :, 0])),
    "source-a-list": (("src", "list"), changed("src", lambda src: src.tolist())),
    "destination-a-list": (("dst", "list"), changed("dst", lambda dst: dst.tolist())),
    "slots-share-memory": (("dst", "strides"), changed("dst", lambda dst: dst[:, :1].expand(2, 5, 6, 3))),
    "layers-share-memory": (("dst", "strides"), changed("dst", lambda dst: dst[:1].expand(2, 5, 6, 3))),
    "slots-overlap": (("dst", "(90, 17, 3, 1)"), changed("dst", lambda d: d.as_strided((2, 5, 6, 3), (90, 17, 3, 1)))),
    "destination-requires-grad": (("dst", "requires grad"), changed("dst", lambda dst: dst.requires_grad_())),
    "source-requires-grad": (("src", "requires grad"), changed("src", lambda src: src.requires_grad_())),
    "source-on-another-device": (("src", "device meta"), changed("src", lambda src: src.to("meta"))),
    "destination-on-another-device": (("src", "need meta"), changed("dst", lambda dst: dst.to("meta"))),
    "unknown-path": (("path", "'triton'"), lambda a: {"path": "triton"}),
    **{f"sources-{id}": (("src_indices_raw", *names), sources(make)) for id, (names, make) in INDEX_ERRORS.items()},
}
INDICES = {
    "mamba": ("dst_indices_raw", "step_indices_raw"),
    "window": ("dst_indices_raw", "step_indices_raw"),
    "multi": ("dst_indices_raw", "step_indices_raw", "dst_indices2_raw", "step_indices2_raw"),
    "verify": ("state_indices_tensor", "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track"),
}
OTHER_ERRORS: dict[str, dict[str, tuple[tuple[str, ...], Change]]] = {
    "mamba": {
        "destination-without-slots": (("dst", "[L, S, *st]"), changed("dst", lambda dst: dst[0, 0, 0])),
    },
    "window": {
        "windows-of-one-dimension": (
            ("dst", "4 dimensions"),
            lambda a: {"dst": a["dst"][..., 0], "src": a["src"][..., 0]},
        ),
        "windows-of-three-dimensions": (
            ("dst", "4 dimensions"),
            lambda a: {"dst": a["dst"][..., None], "src": a["src"][..., None]},
        ),
    },
    "multi": {
        "no-pair": (("pairs[1]", "(dst, src)"), pair_changed(1, lambda dst, src: (dst,))),
        "a-tensor-for-a-pair": (("pairs[0]", "(dst, src)"), pair_changed(0, lambda dst, src: dst)),
        "layer-counts-in-a-pair": (("pairs[1][1]", "layers"), pair_changed(1, lambda dst, src: (dst[:1], src))),
        "layer-counts-of-two-pairs": (
            ("pairs[1][0]", "(1, 5)", "(2, 5)", "[L, S] of pairs[0][0]"),
            pair_changed(1, lambda dst, src: (dst[:1], src[:1])),
        ),
        "slots-of-two-pairs": (
            ("pairs[1][0]", "(2, 4)", "(2, 5)"),
            pair_changed(1, lambda dst, src: (dst[:, :4], src)),
        ),
        "steps-of-two-pairs": (
            ("pairs[1][1]", "(3, 3)", "(3, 4)", "[Rq, W] of pairs[0][1]"),
            pair_changed(1, lambda dst, src: (dst, src[:, :, :3])),
        ),
        "requests-of-two-pairs": (("pairs[1][1]", "(2, 4)"), pair_changed(1, lambda dst, src: (dst, src[:, :2]))),
        "windows-of-three-dimensions": (
            ("pairs[1][0]", "4 dimensions"),
            pair_changed(1, lambda dst, src: (dst[..., None], src[..., None])),
        ),
        "second-pair-on-another-device": (
            ("pairs[1][1]", "device meta"),
            pair_changed(1, lambda dst, src: (dst, src.to("meta"))),
        ),
        "half-a-track-set": (("dst_indices2_raw", "both or neither"), lambda a: {"dst_indices2_raw": None}),
        "the-other-half-of-a-track-set": (
            ("step_indices2_raw", "both or neither"),
            lambda a: {"step_indices2_raw": None},
        ),
        "a-shorter-track-set": (
            ("dst_indices2_raw", "2", "3"),
            lambda a: {name: a[name][:2] for name in ("dst_indices2_raw", "step_indices2_raw")},
        ),
    },
    "verify": {
        "fewer-windows-than-types": (
            ("intermediate_conv_window", "1", "2"),
            cache_changed(intermediate_conv_window=lambda windows: windows[:1]),
        ),
        "ssm-of-fewer-steps": (
            ("intermediate_conv_window[0]", "(3, 4)", "(3, 2)"),
            cache_changed(intermediate_ssm=lambda ssm: ssm[:, :, :2]),
        ),
        "ssm-of-more-layers": (
            ("conv[0]", "(2, 5)", "(4, 5)"),
            cache_changed(
                temporal=lambda state: torch.cat([state, state]), intermediate_ssm=lambda ssm: torch.cat([ssm, ssm])
            ),
        ),
        "ssm-dtypes-that-differ": (
            ("intermediate_ssm", "float32"),
            cache_changed(intermediate_ssm=lambda ssm: ssm.float()),
        ),
        "conv-dtypes-that-differ": (
            ("intermediate_conv_window[1]", "float16"),
            cache_changed(intermediate_conv_window=lambda windows: [windows[0], windows[1].half()]),
        ),
        "conv-requires-grad": (
            ("conv[1]", "requires grad"),
            cache_changed(conv=lambda conv: [conv[0], conv[1].clone().requires_grad_()]),
        ),
        "no-slots-given": (("state_indices_tensor", "NoneType"), lambda a: {"state_indices_tensor": None}),
        "half-a-track-set": (("mamba_steps_to_track", "both or neither"), lambda a: {"mamba_steps_to_track": None}),
    },
}


def bad_calls() -> dict[str, tuple[str, tuple[str, ...], Change]]:
    """Case id -> function, what the message names, and the change of a good call."""
    found: dict[str, tuple[str, tuple[str, ...], Change]] = {}
    for function in FUNCTIONS:
        table = dict(OTHER_ERRORS[function])
        if function in ("mamba", "window"):
            table |= PAIR_ERRORS
        for name in INDICES[function]:
            for id, (names, make) in INDEX_ERRORS.items():
                table[f"{name.replace('_', '-')}-{id}"] = (names, changed(name, make))
        found |= {f"{function}/{id}": (function, *bad) for id, bad in table.items()}
    return found


BAD_CALLS = bad_calls()


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, arena: Arena) -> None:
    function, names, change = BAD_CALLS[bad]
    arguments = good(function, arena.device)
    written = destinations(arguments)
    label = Label(OP, "error")
    expect_raises(label, ValueError, names, lambda: FUNCTIONS[function](**{**arguments, **change(arguments)}))
    untouched = all(not bool(dst.detach().any()) for dst in written)
    expect_equal(label, "nothing is written before the error", untouched, True)


@pytest.mark.parametrize("path", ["fused", "eager"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_good_call_is_good(function: str, path: str, arena: Arena) -> None:
    """Else the errors above could come from the call that they change; without grad mode nothing could be cut off."""
    arguments = good(function, arena.device)
    for dst in destinations(arguments):
        dst.requires_grad_()
    with torch.no_grad():
        FUNCTIONS[function](**arguments, path=path)
    for dst in destinations(arguments):
        expect_equal(
            Label(OP, path),
            "slots written",
            [bool(slot.all()) for slot in dst.transpose(0, 1)],
            [True] * 3 + [False] * 2,
        )
