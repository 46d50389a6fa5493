"""How the dense product of sm_90a is cut: all of it is done, and blocks have about the same to do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer import hopper_fp8
from boleinfer.hopper import LONG, RANGES, Cut, cut, most_sums, run_of
from boleinfer.hopper_fp8 import tile

PUBLISHED = [  # features, k, slabs: of the 0.8B, 4B, 9B and 27B sizes
    *[(8192, 1024, 1), (1024, 2048, 1), (3584, 1024, 2), (1024, 3584, 1)],
    *[(12288, 2560, 1), (2560, 4096, 1), (9216, 2560, 2), (2560, 9216, 1)],
    *[(12288, 4096, 1), (4096, 4096, 1), (12288, 4096, 2), (4096, 12288, 1), (10240, 4096, 1)],
    *[(16384, 5120, 1), (5120, 6144, 1), (17408, 5120, 2), (5120, 17408, 1), (248320, 5120, 1)],
]


@given(
    st.lists(st.integers(1, 300_000), min_size=1, max_size=2),
    st.integers(1, 20_000),
    st.sampled_from([8, 16, 32, 64, 128]),
    st.integers(1, 144),
    st.sampled_from([1, 2]),
)
@settings(max_examples=200)
def test_tiles_are_whole_or_a_half_for_each_block(widths, Din, rows, processors, halves):
    c = cut(tuple(widths), 2 * Din, rows, processors, halves)
    tiles = c.tiles(*widths)
    assert c.features * tiles >= sum(widths) and c.features <= 192
    assert c.features // c.groups(rows) % (8 * halves) == 0 and c.features <= 112 * c.groups(rows) * -(-rows // 64)
    assert (c.whole, c.parts) in ((tiles, 1), (0, 2))
    run = run_of(c.features, rows, 2 * Din)
    assert run == 1 or (-(-Din // 64) % (run * RANGES) == 0 and run * (rows + c.features) * 128 * 5 <= LONG)
    if c.parts > 1:
        assert 2 * tiles <= processors and -(-Din // 64) >= RANGES  # no range without chunks
        assert c.sum_bytes(max(64, rows)) // 4 * tiles <= most_sums(rows, max(widths))


@given(st.integers(1, 300_000), st.integers(16, 20_000), st.sampled_from([8, 16, 32, 64, 128]), st.integers(1, 144))
def test_the_same_of_fp8(width, Din, R, processors):
    rows, row_tiles = min(R, 64), max(R // 64, 1)
    c = hopper_fp8.cut(width, Din, rows, row_tiles, processors)
    tiles = c.tiles(width)
    assert c.features in (64, 128, 192) and c.features * tiles >= width and 0 <= c.whole <= tiles
    assert (c.whole == tiles) == (c.parts == 1)
    if c.parts > 1:
        units = row_tiles * (tiles - c.whole) * c.parts
        assert c.whole % processors == 0 and units <= processors and -(-Din // 128) >= RANGES
        assert c.sum_bytes(R) // 4 * c.kept() * (tiles - c.whole) <= most_sums(R, width)


def test_parts_have_whole_ranges_and_the_first_one_adds_up_its_own():
    for parts in range(1, RANGES + 1):
        first, *others = [(p * RANGES // parts, (p + 1) * RANGES // parts) for p in range(parts)]
        assert Cut(192, 0, parts).kept() == 1 + sum(end - begin for begin, end in others)


@pytest.mark.parametrize("width,Din,slabs", PUBLISHED)
def test_blocks_of_published_sizes_have_little_more_than_their_share(width, Din, slabs):
    c = cut((width * slabs,), 2 * Din, 8, 132, slabs)
    rounds, left = divmod(c.tiles(width * slabs), 132)
    most = (rounds + (1 / c.parts if left else 0)) * c.features * Din * 2
    alone = rounds == 0 and c.parts == 1  # multiprocessors without a tile leave their bandwidth to the others
    share = (1.4 if alone else 1.25) * width * slabs * Din * 2 / 132
    assert c.features <= 32 or most < max(share, 160_000)


def test_tiles():
    assert Cut(192, 0, 2).tiles(12288) == 64 and Cut(192, 0, 2).tiles(12288, 64) == 65
    assert Cut(128, 0, 1).tiles(129) == 2


@pytest.mark.parametrize("width,slabs", [(w, s) for w, _, s in PUBLISHED if w < 200_000] + [(67584, 1), (2048, 1)])
def test_tiles_of_few_rows_are_shared_evenly(width, slabs):
    features = tile(width, slabs, 132)
    tiles = -(-width // features)
    rounds = -(-tiles // 132)
    assert features % 8 == 0 and features <= 256 and slabs * features <= 272
    assert width > 0.8 * rounds * 132 * features or features == 8
