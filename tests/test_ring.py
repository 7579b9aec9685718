"""Places in a ring that never change, whatever the sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localllm.offload.streaming.ring import Ring, ring_bytes

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(sizes, st.sampled_from([1, 4, 7]))
def test_nobody_writes_over_what_is_still_needed(sizes: list[int], align: int) -> None:
    """Over three laps: whom a run takes any of its bytes from came at least as long before it as `reach` says."""
    ring = Ring.of(sizes, align)
    assert ring.num_bytes == ring_bytes(sizes, align) < 2 * (max(sizes) + align) + align
    assert all(offset % align == 0 for offset, size in zip(ring.offsets, sizes, strict=True) if size >= 4 * align)
    owner: dict[int, int] = {}
    for number in range(3 * len(sizes)):
        run = number % len(sizes)
        place = range(ring.offsets[run], ring.offsets[run] + sizes[run])
        assert 0 <= place.start and place.stop <= ring.num_bytes
        last = max((owner[byte] for byte in place if byte in owner), default=None)
        assert last is None or number - last >= ring.reach[run] or len(sizes) == 1
        owner |= dict.fromkeys(place, number)


@given(sizes)
def test_the_next_run_is_read_while_one_is_used_but_across_the_end_of_an_odd_number(sizes: list[int]) -> None:
    ring = Ring.of(sizes)
    assert len(ring.offsets) == len(ring.reach) == len(sizes)
    assert all(reach == 2 for reach in ring.reach[1:])
    assert ring.reach[0] == (1 if len(sizes) % 2 else 2)
    assert ring.num_bytes == ring_bytes(sizes) <= max(sizes) * 2


def test_blocks_of_two_sizes_in_turn_need_one_of_each() -> None:
    assert ring_bytes([24, 99] * 20) == 123
    assert ring_bytes([24, 99, 99]) == 198
    assert ring_bytes([7]) == 7
    assert ring_bytes([]) == 0
