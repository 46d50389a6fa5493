"""How the dense product of sm_90a is cut: all of it is done, and blocks have about the same to do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boleinfer.hopper import MOST_PARTS, Cut, cut, most_sums

PUBLISHED = [  # features, k, slabs: of the 0.8B, 4B, 9B and 27B sizes
    *[(8192, 1024, 1), (1024, 2048, 1), (3584, 1024, 2), (1024, 3584, 1)],
    *[(12288, 2560, 1), (2560, 4096, 1), (9216, 2560, 2), (2560, 9216, 1)],
    *[(12288, 4096, 1), (4096, 4096, 1), (12288, 4096, 2), (4096, 12288, 1), (10240, 4096, 1)],
    *[(16384, 5120, 1), (5120, 6144, 1), (17408, 5120, 2), (5120, 17408, 1), (248320, 5120, 1)],
]


@given(
    st.lists(st.integers(1, 300_000), min_size=1, max_size=2),
    st.integers(1, 20_000),
    st.booleans(),
    st.integers(1, 144),
)
@settings(max_examples=200, deadline=None)
def test_what_is_left_is_at_most_one_piece_a_block(widths, Din, gated, processors):
    c = cut(tuple(widths), 2 * Din, 1 + gated, processors)
    tiles = c.tiles(*widths)
    assert 64 * c.groups * tiles >= sum(widths) and 1 <= c.groups <= 3 - gated
    assert 0 <= c.whole <= tiles and 1 <= c.parts <= MOST_PARTS
    assert (c.whole == tiles) == (c.parts == 1)
    if c.parts > 1:
        assert c.whole % processors == 0 and (tiles - c.whole) * c.parts <= processors
        pieces = (tiles - c.whole) * c.parts * 64 * c.groups * (1 + gated)
        assert processors > 144 or 128 * pieces <= most_sums(128, max(widths) * (1 + gated))


@pytest.mark.parametrize("width,Din,slabs", PUBLISHED)
def test_blocks_of_published_sizes_have_little_more_than_their_share(width, Din, slabs):
    c = cut((width,), 2 * Din, slabs, 132)
    rounds, left = divmod(c.tiles(width), 132)
    most = (rounds + (1 / c.parts if left else 0)) * 64 * c.groups * slabs * Din * 2
    assert most < max(1.25 * width * slabs * Din * 2 / 132, 160_000)


def test_tiles():
    assert Cut(3, 0, 2).tiles(12288) == 64 and Cut(3, 0, 2).tiles(12288, 64) == 65 and Cut(2, 0, 1).tiles(129) == 2
