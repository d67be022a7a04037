"""``state_scatter`` as one Triton kernel: all layers and both sets in one launch, which all types share that are walked
alike (dense ones of any dtype; windows of one K).

Tile, one program: one index row, BLOCK_LAYERS layers, BLOCK_WORDS words of one type's entry. A row that writes nothing
ends after its indices.

                     words of the entry, dense in the destination
                   +---------------------------------------------+
          layers   |  dst[layer, slot] = src[layer, source, step] |   once for the commit set, once for the track set
                   +---------------------------------------------+

Words are raw bits of 2 or 4 bytes, so dtypes do not matter and a NaN keeps its payload. Where every address, stride and
length of a type is a multiple of 16 bytes, that is declared, and one access moves 16 bytes. A source entry that is not
dense (a window of longer rows) is read at (word // INNER) * outer stride + (word % INNER) * inner stride, word by word;
what is declared then is the destination's.

Order. Programs run in any order and side by side, so "the track set comes after the commit set" cannot rest on it. A
commit row therefore looks through the track set, and gives way where a track row writes its slot. Then only the track
row's programs write that slot, and the result is that of the commit set followed by the track set.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dspark import faults, pointers
from dspark.ops.dependent_launch.kernel import wait_for_prerequisite_grids
from dspark.ops.index_math.kernel import nonnegative_quotient
from dspark.ops.launch import WIDEST_ACCESS, Launch, blocks, power_of_two, tile_elements
from dspark.ops.state_scatter.checks import SLOT_FAULT, SOURCE_FAULT, STEP_FAULT, Pair, RowSet

# Bytes and warps of a program. The interpreter pays per program; on a GPU, many small ones hide each other's chain of
# loads (indices, type, addresses, words). Of seven to nine tried on an H200: within 3 % of the best from 1 to 256 rows.
GPU_TILE = 4096
GPU_WINDOW_TILE = 2048
GPU_WARPS = 4
# Windows are read word by word. Where they are written 16 bytes at once, fewer threads with more words each are better.
GPU_WINDOW_WARPS = 2
# Words of an entry, and those of its last tile that are not there, as an int32 counts them.
NARROW_WORDS = (1 << 31) - (1 << 24)
INTERPRETER_TILE = 1 << 22
# Track rows that a commit row compares with its slot at a time.
GPU_ROWS = 128
INTERPRETER_ROWS = 1 << 12


@triton.jit
def judged(
    fault_ptr,
    reports,
    slot,
    source,
    step,
    slots,
    requests,
    width,
    SLOT_MASK: tl.constexpr,
    SOURCE_MASK: tl.constexpr,
    STEP_MASK: tl.constexpr,
):
    """Whether a row is written: nothing is negative (else it is skipped), nothing beyond its tensor (else a fault)."""
    bits = (slot >= slots).to(tl.int64) * SLOT_MASK
    bits = bits | ((source >= requests).to(tl.int64) * SOURCE_MASK)
    bits = bits | ((step >= width).to(tl.int64) * STEP_MASK)
    named = (slot >= 0) & (source >= 0) & (step >= 0)
    if reports:
        tl.atomic_or(fault_ptr, bits, mask=named & (bits != 0), sem="relaxed")
    return named & (bits == 0)


@triton.jit
def copy_tile(
    dst_layers,
    src_layers,
    word,
    offset,
    live,
    WORD: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
):
    """Copy words of one entry of each layer; addresses ``[BLOCK_LAYERS]`` int64, word and offset ``[BLOCK_WORDS]``."""
    dst_ptr = tl.multiple_of(dst_layers.to(tl.pointer_type(WORD)), ALIGNED_BYTES)
    src_ptr = tl.multiple_of(src_layers.to(tl.pointer_type(WORD)), SOURCE_BYTES)
    bits = tl.load(src_ptr[:, None] + offset[None, :], mask=live, other=0).to(WORD)
    tl.store(dst_ptr[:, None] + word[None, :], bits, mask=live)


@triton.jit
def state_scatter_kernel(
    table_ptr,
    slots_ptr,
    steps_ptr,
    sources_ptr,
    track_slots_ptr,
    track_steps_ptr,
    fault_ptr,
    rows,
    types,
    layers,
    slots,
    requests,
    width,
    slots_stride,
    steps_stride,
    sources_stride,
    track_slots_stride,
    track_steps_stride,
    HAS_SOURCES: tl.constexpr,
    HAS_TRACK: tl.constexpr,
    TYPE_WORDS: tl.constexpr,
    INNER: tl.constexpr,
    NARROW: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED_WORDS: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    BLOCK_LAYERS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_TYPES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SLOT_MASK: tl.constexpr,
    SOURCE_MASK: tl.constexpr,
    STEP_MASK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)
    # The rows of a chunk follow each other: of one row, which Triton knows, nothing is divided.
    chunk = nonnegative_quotient(tl.program_id(0), rows)
    row = tl.program_id(0) - chunk * rows
    candidate = tl.arange(0, BLOCK_TYPES)
    first_chunks = tl.load(table_ptr + candidate * TYPE_WORDS, mask=candidate < types, other=1 << 40).to(tl.int64)
    type_ptr = table_ptr + (tl.sum((first_chunks <= chunk).to(tl.int32), axis=0) - 1) * TYPE_WORDS
    reports = (chunk == 0) & (tl.program_id(1) == 0)
    slot = tl.load(slots_ptr + row * slots_stride).to(tl.int64)
    step = tl.load(steps_ptr + row * steps_stride).to(tl.int64)
    source = row
    if HAS_SOURCES:
        source = tl.load(sources_ptr + row * sources_stride).to(tl.int64)
    commits = judged(fault_ptr, reports, slot, source, step, slots, requests, width, SLOT_MASK, SOURCE_MASK, STEP_MASK)
    tracks = row < 0
    if HAS_TRACK:
        track_slot = tl.load(track_slots_ptr + row * track_slots_stride).to(tl.int64)
        track_step = tl.load(track_steps_ptr + row * track_steps_stride).to(tl.int64)
        tracks = judged(
            fault_ptr, reports, track_slot, row, track_step, slots, requests, width, SLOT_MASK, SOURCE_MASK, STEP_MASK
        )
        if commits:
            other = tl.arange(0, BLOCK_ROWS).to(tl.int64)
            # Rows beyond the sources are not written, so they take nothing from a commit row either.
            end = tl.minimum(rows, requests)
            overwritten = tl.zeros([BLOCK_ROWS], tl.int32)
            first = row * 0
            while first < end:
                present = other + first < end
                slot_ptr = track_slots_ptr + (other + first) * track_slots_stride
                step_ptr = track_steps_ptr + (other + first) * track_steps_stride
                same = tl.load(slot_ptr, mask=present, other=-1).to(tl.int64) == slot
                other_step = tl.load(step_ptr, mask=present, other=-1).to(tl.int64)
                overwritten = overwritten | (same & (other_step >= 0) & (other_step < width)).to(tl.int32)
                first += BLOCK_ROWS
            commits = tl.max(overwritten, axis=0) == 0

    if commits | tracks:
        word = (chunk - tl.load(type_ptr).to(tl.int64)) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS).to(tl.int64)
        layer = tl.program_id(1).to(tl.int64) * BLOCK_LAYERS + tl.arange(0, BLOCK_LAYERS).to(tl.int64)
        words = tl.multiple_of(tl.load(type_ptr + 1).to(tl.int64), ALIGNED_WORDS)
        live = (layer < layers)[:, None] & (word < words)[None, :]
        dst_layers = tl.load(type_ptr + 2).to(tl.int64) + layer * tl.load(type_ptr + 3).to(tl.int64)
        slot_stride = tl.load(type_ptr + 4).to(tl.int64)
        src_layers = tl.load(type_ptr + 5).to(tl.int64) + layer * tl.load(type_ptr + 6).to(tl.int64)
        source_stride = tl.load(type_ptr + 7).to(tl.int64)
        step_stride = tl.load(type_ptr + 8).to(tl.int64)
        offset = word
        if INNER > 0:
            # Of 32 bits where they hold every word: a 64-bit quotient costs more than the copy of what it finds.
            outer = nonnegative_quotient(word.to(tl.int32) if NARROW else word, INNER)
            offset = outer * tl.load(type_ptr + 9).to(tl.int64)
            offset += (word - outer * INNER) * tl.load(type_ptr + 10).to(tl.int64)
        if commits:
            dst_entry = dst_layers + slot * slot_stride
            src_entry = src_layers + (source * source_stride + step * step_stride)
            copy_tile(dst_entry, src_entry, word, offset, live, WORD, ALIGNED_BYTES, SOURCE_BYTES)
        if HAS_TRACK and tracks:
            dst_entry = dst_layers + track_slot * slot_stride
            src_entry = src_layers + (row * source_stride + track_step * step_stride)
            copy_tile(dst_entry, src_entry, word, offset, live, WORD, ALIGNED_BYTES, SOURCE_BYTES)


class Walk(NamedTuple):
    """How the words of an entry are walked; types that walk alike share a launch."""

    word_bytes: int
    inner: int
    """0: source and destination are dense; else the words of a source's inner dimension."""
    aligned_bytes: int
    """What divides every address, stride and length; where the source is not dense, those of the destination."""


def walk_of(pair: Pair) -> tuple[Walk, tuple[int, ...]]:
    """The walk of a type, and its row of the table after the first chunk.

    Words per entry; in bytes the destination's address, layer and slot stride and the source's address, layer, row and
    step stride; in words the source's outer and inner stride.
    """
    size = pair.dst.element_size()
    addresses = [
        pair.dst.data_ptr(),
        *_byte_strides(pair.dst, 2),
        pair.src.data_ptr(),
        *_byte_strides(pair.src, 3),
    ]
    elements = math.prod(pair.entry)
    dimensions = pair.source_dimensions()
    dense = dimensions in ((), ((elements, 1),))
    everything = functools.reduce(operator.or_, addresses if dense else addresses[:3], elements * size)
    aligned = everything & -everything
    word = size if aligned < 4 or not dense else 4
    aligned = WIDEST_ACCESS if aligned >= WIDEST_ACCESS else word
    if dense:
        return Walk(word, 0, aligned), (elements * size // word, *addresses, 0, 0)
    (_, outer), (inner, inner_stride) = dimensions if len(dimensions) == 2 else (*dimensions, (1, 0))
    return Walk(word, inner, aligned), (elements, *addresses, outer, inner_stride)


def _byte_strides(tensor: torch.Tensor, count: int) -> list[int]:
    """The first ``count`` strides in bytes; 0 where the only index is 0, so that it cannot spoil an alignment."""
    size = tensor.element_size()
    return [tensor.stride(d) * size if tensor.shape[d] > 1 else 0 for d in range(count)]


def state_scatter_fused(launches: list[tuple[Launch, torch.Tensor]], sets: tuple[RowSet, ...]) -> None:
    """Copy the rows of one or two sets, the second without sources, with the launches of :func:`launches`."""
    commit = sets[0]
    slots, steps = (sets[1].slots, sets[1].steps) if len(sets) > 1 else (None, None)
    device = commit.slots.device
    indices = (commit.slots, commit.steps, commit.sources, slots, steps, faults.word(device))
    for launch, table in launches:
        launch(device, table, *indices)


def launches(pairs: tuple[Pair, ...], sets: tuple[RowSet, ...]) -> list[tuple[Launch, torch.Tensor]]:
    """What copies these pairs, each with the table that it reads; arguments are validated, eligible and not empty."""
    alike: dict[Walk, list[tuple[int, ...]]] = defaultdict(list)
    for pair in pairs:
        walk, words = walk_of(pair)
        alike[walk].append(words)
    return [_launch(walk, types, pairs[0], *sets) for walk, types in alike.items()]


def _launch(
    walk: Walk, types: list[tuple[int, ...]], pair: Pair, commit: RowSet, track: RowSet | None = None
) -> tuple[Launch, torch.Tensor]:
    """One launch for ``types``; layers, slots, requests and width are those of ``pair``, as of every type."""
    rows, (layers, slots), (requests, width) = commit.slots.numel(), pair.dst.shape[:2], pair.src.shape[1:3]
    tile = tile_elements(GPU_WINDOW_TILE if walk.inner else GPU_TILE, INTERPRETER_TILE) // walk.word_bytes
    block_words = min(tile, power_of_two(max(words[0] for words in types)))
    block_layers = min(tile // block_words, power_of_two(layers))
    counts = [blocks(words[0], block_words) for words in types]
    firsts = (sum(counts[:index]) for index in range(len(types)))
    table = pointers.table([(first, *words) for first, words in zip(firsts, types, strict=True)], commit.slots.device)
    warps = GPU_WINDOW_WARPS if walk.inner and walk.aligned_bytes == WIDEST_ACCESS else GPU_WARPS
    launch = Launch(
        state_scatter_kernel,
        (rows * sum(counts), blocks(layers, block_layers)),
        (
            rows,
            len(types),
            layers,
            slots,
            requests,
            width,
            commit.slots.stride(0),
            commit.steps.stride(0),
            commit.sources.stride(0) if commit.sources is not None else 0,
            track.slots.stride(0) if track is not None else 0,
            track.steps.stride(0) if track is not None else 0,
        ),
        {
            "HAS_SOURCES": commit.sources is not None,
            "HAS_TRACK": track is not None,
            "TYPE_WORDS": table.shape[1],
            "INNER": walk.inner,
            "NARROW": max(words[0] for words in types) <= NARROW_WORDS,
            "WORD": tl.int16 if walk.word_bytes == 2 else tl.int32,
            "ALIGNED_WORDS": walk.aligned_bytes // walk.word_bytes,
            "ALIGNED_BYTES": walk.aligned_bytes,
            "SOURCE_BYTES": walk.word_bytes if walk.inner else walk.aligned_bytes,
            "BLOCK_LAYERS": block_layers,
            "BLOCK_WORDS": block_words,
            "BLOCK_TYPES": power_of_two(len(types)),
            "BLOCK_ROWS": tile_elements(GPU_ROWS, INTERPRETER_ROWS),
            "SLOT_MASK": SLOT_FAULT,
            "SOURCE_MASK": SOURCE_FAULT,
            "STEP_MASK": STEP_FAULT,
        },
        {"num_warps": warps, "enable_fp_fusion": False},
    )
    return launch, table
