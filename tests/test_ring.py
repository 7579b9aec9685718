"""Places in a ring that never change, whatever the sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localllm.offload.ring import least_ring_bytes, ring

sizes = st.lists(st.integers(1, 50).map(lambda pages: pages * 4096), min_size=1, max_size=40)


@given(sizes, st.integers(0, 200))
def test_nobody_writes_over_what_reach_says_is_still_there(sizes: list[int], extra_pages: int) -> None:
    """Page for page, over three laps: whom a run takes its place from came that long before it."""
    places = ring(sizes, max(sizes) + extra_pages * 4096)
    owner: dict[int, int] = {}
    for number in range(3 * len(sizes)):
        run = number % len(sizes)
        pages = range(places.offsets[run] // 4096, (places.offsets[run] + sizes[run]) // 4096)
        assert places.offsets[run] + sizes[run] <= places.num_bytes
        last = max((owner[page] for page in pages if page in owner), default=None)
        if last is not None and number >= len(sizes):
            assert number - last == places.reach[run]
        elif last is not None:
            assert number - last >= places.reach[run]
        owner |= dict.fromkeys(pages, number)


@given(sizes)
def test_the_least_ring_lets_the_next_run_be_read_while_one_is_used(sizes: list[int]) -> None:
    least = least_ring_bytes(sizes)
    assert max(sizes) <= least <= sum(sizes)
    if len(sizes) > 1:
        assert min(ring(sizes, least).reach) > 1


def test_blocks_of_two_sizes_in_turn_need_hardly_more_than_one_of_each() -> None:
    attention, mlp = 24 << 20, 99 << 20
    assert least_ring_bytes([attention, mlp] * 20) == attention + mlp
    assert least_ring_bytes([attention, *[mlp] * 3] * 20) <= 2 * mlp + attention
