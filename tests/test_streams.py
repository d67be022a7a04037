"""What `conformance.fixtures.streams` promises: published vectors, laws of the draws, and digests that pin them.

Bounds on samples are five standard errors of the statistic, computed beside each; the streams are fixed, so a test that
passes once passes always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.fixtures.streams import Stream, philox4x32_10

ONES = 0xFFFFFFFF
DRAWS = 100_000


def words_of(*words: int) -> NDArray[np.uint32]:
    return np.array(words, dtype=np.uint32)


# Random123's kat_vectors for philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    pytest.param(
        words_of(0, 0, 0, 0),
        words_of(0, 0),
        words_of(0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        id="zeros",
    ),
    pytest.param(
        words_of(ONES, ONES, ONES, ONES),
        words_of(ONES, ONES),
        words_of(0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        id="ones",
    ),
    pytest.param(
        words_of(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        words_of(0xA4093822, 0x299F31D0),
        words_of(0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        id="digits-of-pi",
    ),
]


# The generator.


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(
    counter: NDArray[np.uint32], key: NDArray[np.uint32], want: NDArray[np.uint32]
) -> None:
    result = philox4x32_10(counter, key)
    assert result.dtype == np.uint32
    assert result.tolist() == want.tolist()


def test_philox_takes_many_counters_and_many_keys() -> None:
    counters, keys, want = (np.stack(column) for column in zip(*(p.values for p in KNOWN_ANSWERS), strict=True))
    assert (philox4x32_10(counters, keys) == want).all()
    every_pair = philox4x32_10(counters[:, None], keys[None])
    assert every_pair.shape == (3, 3, 4)
    assert (every_pair[[0, 1, 2], [0, 1, 2]] == want).all()
    assert (every_pair[:, 1] == philox4x32_10(counters, keys[1])).all()


@pytest.mark.parametrize(
    ("counter", "key", "argument"),
    [
        (np.zeros(4, dtype=np.int64), words_of(0, 0), "counter"),
        (words_of(0, 0, 0), words_of(0, 0), "counter"),
        (words_of(0, 0, 0, 0), words_of(0, 0, 0), "key"),
    ],
)
def test_philox_names_a_wrong_argument(counter: Any, key: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}: got .* need uint32"):
        philox4x32_10(counter, key)


# Streams.


def test_words_are_the_blocks_of_the_counter_under_the_hash_of_the_key() -> None:
    digest = hashlib.sha256(b"accept/w=8").digest()
    key = words_of(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))
    blocks = [philox4x32_10(words_of(block, 0, 0, 0), key) for block in range(3)]
    assert Stream("accept/w=8").words(12).tolist() == np.concatenate(blocks).tolist()


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(pieces=st.lists(st.integers(0, 9), max_size=12))
def test_words_drawn_in_pieces_are_the_words_drawn_at_once(pieces: list[int]) -> None:
    stream = Stream("pieces")
    drawn = [word for piece in pieces for word in stream.words(piece).tolist()]
    assert drawn == Stream("pieces").words(sum(pieces)).tolist()


def test_a_position_beyond_32_bits_reaches_the_second_counter_word() -> None:
    stream = Stream("far")
    stream._position = 4 * 2**32 - 4
    key = stream._philox_key
    want = [philox4x32_10(words_of(*counter, 0, 0), key) for counter in ((ONES, 0), (0, 1), (1, 1))]
    assert stream.words(12).tolist() == np.concatenate(want).tolist()


def test_equal_keys_agree_and_other_keys_share_no_word() -> None:
    keys = ["a", "b", "a/b", "a/", "A", "kv_write/bf16", "kv_write/bf17", "é"]
    draws = {key: Stream(key).words(1000) for key in keys}
    assert all((Stream(key).words(1000) == draw).all() for key, draw in draws.items())
    # 8000 words of 2**32 are expected to give 0.007 coincidences.
    assert len(set(np.concatenate(list(draws.values())).tolist())) == 8000


def test_a_child_depends_on_its_name_only() -> None:
    parent = Stream("case")
    before = parent.child("weights").words(8)
    parent.words(5)
    assert (parent.child("weights").words(8) == before).all()
    assert (Stream("case/weights").words(8) == before).all()
    assert not (parent.child("hidden").words(8) == before).any()
    assert not (Stream("case").words(8) == before).any()
    assert repr(parent) == "Stream('case', position=5)"


# The laws of the draws.


def test_words_have_every_bit_set_half_of_the_time() -> None:
    words = Stream("bits of words").words(DRAWS)
    shares = ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(axis=0)
    assert np.abs(shares - 0.5).max() < 5 * 0.5 / DRAWS**0.5


def test_uniform_has_the_moments_of_the_unit_interval() -> None:
    values = Stream("uniform").uniform(DRAWS)
    assert values.dtype == np.float64
    assert ((values >= 0.0) & (values < 1.0)).all()
    # Variance of a uniform is 1/12, that of its squared deviation 1/180.
    assert abs(values.mean() - 0.5) < 5 * (1 / 12 / DRAWS) ** 0.5
    assert abs(values.var() - 1 / 12) < 5 * (1 / 180 / DRAWS) ** 0.5
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / DRAWS**0.5
    counts = np.bincount((values * 100).astype(int), minlength=100)
    assert np.abs(counts - DRAWS / 100).max() < 5 * (DRAWS / 100) ** 0.5


def test_uniform_uses_all_53_bits() -> None:
    scaled = Stream("uniform").uniform(DRAWS) * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert abs((scaled % 2).mean() - 0.5) < 5 * 0.5 / DRAWS**0.5


def test_normal_has_mean_0_variance_1_and_ends_at_6() -> None:
    values = Stream("normal").normal(DRAWS)
    assert values.dtype == np.float64
    # Kurtosis 2.9: the variance of the square is 1.9; that of the fourth power is below 105, a Gaussian's 8th moment.
    assert abs(values.mean()) < 5 / DRAWS**0.5
    assert abs(values.var() - 1) < 5 * (1.9 / DRAWS) ** 0.5
    assert abs((values**4).mean() - 2.9) < 5 * (105 / DRAWS) ** 0.5
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / DRAWS**0.5
    assert abs((values > 0).mean() - 0.5) < 5 * 0.5 / DRAWS**0.5
    assert 3.5 < np.abs(values).max() < 6.0


def test_normal_is_exact_and_never_zero() -> None:
    scaled = Stream("normal").normal(DRAWS) * 2.0**49
    assert (scaled % 2 == 1).all()


def test_normal_reaches_its_ends_symmetrically(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = []
    for word in (0, ONES):
        monkeypatch.setattr(Stream, "words", lambda self, n, word=word: np.full(n, word, dtype=np.uint32))
        extremes.append(float(Stream("ends").normal(1)[0]))
    assert extremes[0] == -extremes[1]
    assert 5.9999 < extremes[1] < 6.0


@pytest.mark.parametrize(
    ("low", "high"),
    [
        pytest.param(0, 1, id="one-value"),
        pytest.param(-3, 4, id="small"),
        pytest.param(0, 2**31, id="int32"),
        pytest.param(2**62, 2**62 + 3, id="large-and-narrow"),
        pytest.param(-(2**63), 2**63 - 1, id="all-but-one"),
        pytest.param(-(2**63), 2**63, id="all-of-int64"),
        pytest.param(-(2**62), 2**62 + 1, id="half-of-the-words-are-rejected"),
        pytest.param(2**63 - 1, 2**63, id="the-last-value"),
    ],
)
def test_integers_stay_in_their_range_and_fill_it(low: int, high: int) -> None:
    values = Stream(f"integers/{low}/{high}").integers(low, high, 20_000)
    assert values.dtype == np.int64
    as_ints = values.tolist()
    assert low <= min(as_ints)
    assert max(as_ints) < high
    count = high - low
    width = -(-count // 8)
    slots = np.bincount([(value - low) // width for value in as_ints])
    assert slots.size == -(-count // width)
    share = width / count  # of every slot but the last, which may be narrower
    assert np.abs(slots[: count // width] - 20_000 * share).max() <= 5 * (20_000 * share * (1 - share)) ** 0.5


def test_integers_reject_rather_than_favour_the_low_values() -> None:
    # A range of three quarters of the 64-bit words, plainly reduced, would put half of the draws into the lower third.
    count = 3 * 2**62
    values = Stream("rejection").integers(-(2**63), -(2**63) + count, DRAWS)
    share = (values < -(2**63) + 2**62).mean()
    assert abs(share - 1 / 3) < 5 * (2 / 9 / DRAWS) ** 0.5


def test_integers_reject_the_incomplete_run_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2**64 is 6 more than a multiple of 10.
    supply = iter([2**64 - 7, 2**64 - 6, 2**64 - 1, 14, 25])
    monkeypatch.setattr(Stream, "_long_words", lambda self, n: np.array([next(supply) for _ in range(n)], np.uint64))
    assert Stream("incomplete run").integers(0, 10, 3).tolist() == [9, 4, 5]


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (-(2**63) - 1, 0), (0, 2**63 + 1)])
def test_integers_refuse_an_empty_or_impossible_range(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"low, high: got {low}, {high}"):
        Stream("range").integers(low, high, 1)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_permutation_holds_every_index_once(n: int) -> None:
    order = Stream("permutation").permutation(n)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


def test_permutation_keeps_the_order_of_equal_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "words", lambda self, n: np.arange(n, dtype=np.uint32) // 2 % 2)
    assert Stream("ties").permutation(1000).tolist() == [*range(0, 1000, 2), *range(1, 1000, 2)]


def test_every_permutation_is_equally_likely() -> None:
    stream = Stream("permutations of three")
    counts = np.bincount([int(stream.permutation(3) @ [9, 3, 1]) for _ in range(6000)])
    counts = counts[counts > 0]
    assert counts.size == 6
    assert np.abs(counts - 1000).max() < 5 * (1000 * 5 / 6) ** 0.5


def test_choice_draws_members_with_replacement() -> None:
    picks = Stream("choice").choice([0.0, -0.0, float("inf"), 2.5], (50, 40))
    assert picks.shape == (50, 40)
    assert picks.dtype == np.float64
    counts = [((picks == 0) & ~np.signbit(picks)).sum(), ((picks == 0) & np.signbit(picks)).sum()]
    counts += [(picks == value).sum() for value in (np.inf, 2.5)]
    assert sum(counts) == 2000
    assert max(abs(count - 500) for count in counts) < 5 * (500 * 3 / 4) ** 0.5
    assert set(Stream("choice").choice(["int32", "int64"], 100).tolist()) == {"int32", "int64"}
    for values in ([], [[1, 2]]):
        with pytest.raises(ValueError, match="values: got shape"):
            Stream("choice").choice(values, 3)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_bits_are_the_words_low_bytes_first(dtype: type[np.unsignedinteger[Any]]) -> None:
    size = np.dtype(dtype).itemsize
    patterns = Stream("bits").bits(dtype, (3, 5))
    assert patterns.shape == (3, 5)
    assert patterns.dtype == dtype
    data = b"".join(int(word).to_bytes(4, "little") for word in Stream("bits").words(-(-15 * size // 4)))
    want = [int.from_bytes(data[size * i : size * (i + 1)], "little") for i in range(15)]
    assert patterns.reshape(-1).tolist() == want


@pytest.mark.parametrize("dtype", [np.int16, np.float32, bool])
def test_bits_refuse_a_dtype_that_is_not_unsigned(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype: got .* need an unsigned integer"):
        Stream("bits").bits(dtype, 1)


SHAPED: list[Callable[[Stream, Any], NDArray[Any]]] = [
    lambda stream, shape: stream.uniform(shape),
    lambda stream, shape: stream.normal(shape),
    lambda stream, shape: stream.integers(0, 10, shape),
    lambda stream, shape: stream.choice([1, 2], shape),
    lambda stream, shape: stream.bits(np.uint16, shape),
]


@pytest.mark.parametrize("draw", SHAPED, ids=("uniform", "normal", "integers", "choice", "bits"))
def test_shapes(draw: Callable[[Stream, Any], NDArray[Any]]) -> None:
    for shape in ((), (0,), (3, 0, 2), (2, 3)):
        assert draw(Stream("shape"), shape).shape == shape
    assert draw(Stream("shape"), 6).shape == (6,)
    assert (draw(Stream("shape"), (2, 3)).reshape(-1) == draw(Stream("shape"), 6)).all()
    with pytest.raises(ValueError, match="size: got"):
        draw(Stream("shape"), (2, -1))


def test_counts_and_names_are_checked() -> None:
    for draw in (Stream("x").words, Stream("x").permutation):
        with pytest.raises(ValueError, match="size: got -1"):
            draw(-1)
    with pytest.raises(ValueError, match="key: got an empty string"):
        Stream("")
    with pytest.raises(ValueError, match="name: got an empty string"):
        Stream("x").child("")


# Pins: a digest that changes here changes the inputs of every golden file.

PINNED: list[tuple[str, Callable[[Stream], NDArray[Any]], str]] = [
    ("words", lambda s: s.words(1001), "d40b4f8e1231769d"),
    ("uniform", lambda s: s.uniform((7, 11)), "b96cc10ef36e0d59"),
    ("normal", lambda s: s.normal((7, 11)), "abcc280cee283d0c"),
    ("integers", lambda s: s.integers(-5, 1000, (7, 11)), "fd3f50e06cea17df"),
    ("integers, rejecting", lambda s: s.integers(-(2**62), 2**62 + 1, (7, 11)), "dfb8ef8597bf0c39"),
    ("integers, full range", lambda s: s.integers(-(2**63), 2**63, 77), "b79241467ddfc5d1"),
    ("permutation", lambda s: s.permutation(101), "54163d0e4afd4f11"),
    ("choice", lambda s: s.choice([2, 3, 5, 7, 11], 77), "c49b790fc78c2ee0"),
    ("bits 8", lambda s: s.bits(np.uint8, 77), "500e795dbf2ecca7"),
    ("bits 16", lambda s: s.bits(np.uint16, 77), "7d187299cccf2be4"),
    ("bits 64", lambda s: s.bits(np.uint64, 77), "7530afc6bc9e8d06"),
    ("child", lambda s: s.child("child").words(77), "5e5a7b5418eb7dff"),
]


@pytest.mark.parametrize(("name", "draw", "digest"), PINNED, ids=[name for name, _, _ in PINNED])
def test_draws_are_pinned(name: str, draw: Callable[[Stream], NDArray[Any]], digest: str) -> None:
    stream = Stream(f"pinned/{name}")
    values = np.concatenate((draw(stream).reshape(-1), draw(stream).reshape(-1)))
    little_endian = values.astype(values.dtype.newbyteorder("<")).tobytes()
    assert hashlib.sha256(little_endian).hexdigest()[:16] == digest
