"""The simulated card by itself: what it must do as a card, torch and the driver do."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests.simulated_card.device import DEVICE, CardConfig, Faults
from tests.simulated_card.memory import MIB


@pytest.fixture
def card(simulated_card):
    with simulated_card() as card:
        yield card


def pinned(*values):
    tensor = torch.zeros(len(values), pin_memory=True)
    return tensor.copy_(torch.tensor(values, dtype=torch.float32))


def collected(**tensors):
    """The addresses that these had, which are nobody's now."""
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    tensors.clear()
    gc.collect()
    return addresses


# Streams


def test_work_is_done_when_somebody_waits_for_it(card):
    here, there = pinned(1.0, 2.0), torch.zeros(2, device=DEVICE)
    there.copy_(here, non_blocking=True)
    here[0] = 7.0  # before the copy has read it
    back = torch.zeros(2, pin_memory=True)
    back.copy_(there * 2, non_blocking=True)
    assert back.tolist() == [0, 0]
    torch.cuda.synchronize()
    assert back.tolist() == [14, 4]


def test_pageable_memory_is_read_at_once_and_written_before_the_call_returns(card):
    here, there = torch.tensor([1.0, 2.0]), torch.zeros(2, device=DEVICE)
    there.copy_(here, non_blocking=True)
    here[0] = 7.0
    back = torch.zeros(2)
    back.copy_(there, non_blocking=True)
    assert back.tolist() == [1, 2]


def test_a_stream_waits_for_another_where_an_event_says_so(simulated_card):
    for waits in (True, False):
        with simulated_card(CardConfig("copies-late")):
            here, there = pinned(5.0), torch.zeros(1, device=DEVICE)
            torch.cuda.synchronize()
            lane = torch.cuda.Stream(DEVICE)
            with torch.cuda.stream(lane):
                there.copy_(here, non_blocking=True)
                arrived = lane.record_event()
            if waits:
                torch.cuda.current_stream().wait_event(arrived)
            assert (there + 1).tolist() == [6.0 if waits else 1.0]


def test_a_slow_link_is_slow_on_the_clock_of_the_card(simulated_card):
    with simulated_card(CardConfig(link_gbs=0.5)):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        here = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
        began.record()
        here.to(DEVICE, non_blocking=True)
        ended.record()
        ended.synchronize()
        assert began.elapsed_time(ended) == pytest.approx(1e3 * MIB / 0.5e9)


# Memory


def test_memory_that_is_freed_is_the_next_ones_of_the_same_stream_alone(card):
    freed = collected(small=torch.empty(100, device=DEVICE))["small"]
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        assert torch.empty(100, device=DEVICE).data_ptr() != freed
    assert torch.empty(100, device=DEVICE).data_ptr() == freed


def test_pieces_that_are_freed_are_joined_again(card):
    parts = [torch.empty(MIB // 4, dtype=torch.uint8, device=DEVICE) for _ in range(8)]  # a segment
    freed, reserved = parts[0].data_ptr(), torch.cuda.memory_reserved()
    parts.clear()
    whole = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    assert whole.data_ptr() == freed and torch.cuda.memory_reserved() == reserved == 2 * MIB


def test_memory_holds_no_number_when_it_is_given_out(card):
    assert torch.empty(4, device=DEVICE).isnan().all() and torch.zeros(4, device=DEVICE).tolist() == [0] * 4
    assert torch.empty(4, dtype=torch.int64, device=DEVICE).tolist() == [-1] * 4


def test_what_is_free_counts_the_segments_that_torch_keeps_and_other_programs(card):
    free, total = torch.cuda.mem_get_info()
    held = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.cuda.mem_get_info() == (free - 20 * MIB, total) and torch.cuda.memory_allocated() == held.nbytes
    card.take(50 * MIB)
    assert torch.cuda.mem_get_info()[0] == free - 70 * MIB
    del held
    assert torch.cuda.memory_reserved() == 20 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free - 50 * MIB


def test_a_full_card_and_a_cap_end_in_torchs_error(card):
    card.take(torch.cuda.mem_get_info()[0] - 30 * MIB)
    held = torch.empty(12 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(20 * MIB, dtype=torch.uint8, device=DEVICE)
    del held
    torch.empty(20 * MIB, dtype=torch.uint8, device=DEVICE)  # in the place of what torch kept of the other
    torch.cuda.set_per_process_memory_fraction(0.0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(40 * MIB, dtype=torch.uint8, device=DEVICE)


def test_the_nth_allocation_fails_and_those_behind_it_do_not(card):
    card.set_faults(Faults(allocation=1, allocations=2))
    results = []
    for _ in range(4):
        try:
            results.append(torch.empty(1, device=DEVICE))
        except torch.OutOfMemoryError:
            results.append(None)
    assert [result is None for result in results] == [False, True, True, False]


# Page-locked memory


@pytest.mark.parametrize("limit", [0, MIB])
def test_the_driver_refuses_to_lock_more_than_it_may(limit, simulated_card):
    with simulated_card(CardConfig(lockable_bytes=limit)):
        memory = torch.zeros(MIB + 1, dtype=torch.uint8)
        assert torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 3) == 2
        assert not memory.is_pinned()
        with pytest.raises(RuntimeError, match="CUDA error: out of memory"):  # left behind by what was refused
            torch.zeros(1, device=DEVICE)
        assert torch.zeros(1, device=DEVICE).tolist() == [0]
        with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
            torch.zeros(MIB + 1, dtype=torch.uint8, pin_memory=True)
        if limit:
            assert torch.zeros(MIB, dtype=torch.uint8, pin_memory=True).is_pinned()
            assert torch.zeros(MIB, dtype=torch.uint8, pin_memory=True).is_pinned()  # in the place of the other


def test_an_error_that_stays_behind_is_of_the_thread_that_made_it(simulated_card):
    with simulated_card(CardConfig(lockable_bytes=0)):
        thread = threading.Thread(target=lambda: torch.cuda.cudart().cudaHostRegister(1 << 20, 4096, 3))
        thread.start()
        thread.join()
        assert torch.zeros(1, device=DEVICE).tolist() == [0]


def test_memory_that_is_on_its_way_is_not_unregistered(card):
    memory = torch.zeros(4096, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 3) == 0 and memory[7:].is_pinned()
    there = memory.to(DEVICE, non_blocking=True)
    with pytest.raises(RuntimeError, match="still being read"):
        runtime.cudaHostUnregister(memory.data_ptr())
    assert card.broken_rules.pop()
    assert there.tolist() == [0] * 4096
    assert runtime.cudaHostUnregister(memory.data_ptr()) == 0


# What is not allowed, and what goes wrong


def test_tensors_of_two_devices_are_an_error(card):
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.zeros(2, device=DEVICE) + torch.zeros(2)
    assert card.broken_rules.pop()
    assert (torch.zeros(2, device=DEVICE) + torch.tensor(1.0)).tolist() == [1, 1]  # a number is taken from anywhere


def captured(graph, stream, launch):
    with torch.cuda.stream(stream):
        graph.capture_begin(None, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()


def test_a_graph_computes_again_over_the_addresses_that_it_was_captured_with(card):
    x, y = torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    captured(graph, torch.cuda.Stream(DEVICE), lambda: y.copy_((x + 1) * 2))
    assert y.tolist() == [0, 0]
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 2] * 2


def test_a_graphs_memory_is_its_pools_until_the_last_graph_is_gone(card):
    graph = torch.cuda.CUDAGraph()
    torch.empty(1, device=DEVICE)
    captured(graph, torch.cuda.Stream(DEVICE), lambda: torch.empty(1, device=DEVICE))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 2 * MIB
    del graph
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


@pytest.mark.parametrize("fault", [Faults(allocation=0), Faults(graph=0)])
def test_a_capture_finds_no_memory(fault, card):
    x, graph = torch.zeros(1, device=DEVICE), torch.cuda.CUDAGraph()
    card.set_faults(fault)
    with pytest.raises(RuntimeError, match="out of memory"):
        captured(graph, torch.cuda.Stream(DEVICE), lambda: x + 1)
    torch._C._cuda_endAllocateToPool(0, graph.pool())
    assert (x + 1).tolist() == [1]


def test_drivers_take_memory_for_graphs_until_those_are_gone(simulated_card):
    with simulated_card(CardConfig(graph_bytes=3 * MIB)):
        free, stream = torch.cuda.mem_get_info()[0], torch.cuda.Stream(DEVICE)
        graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        for graph in graphs:
            captured(graph, stream, lambda: None)
        assert torch.cuda.mem_get_info()[0] == free - 9 * MIB
        del graph, graphs
        assert torch.cuda.mem_get_info()[0] == free


def test_behind_an_illegal_access_every_call_fails(card):
    x = torch.zeros(1, device=DEVICE)
    card.set_faults(Faults(illegal_access=0))
    card.launch("a kernel", lambda: None, [x.content])
    for call in (
        torch.cuda.synchronize,
        torch.cuda.mem_get_info,
        torch.cuda.empty_cache,
        lambda: torch.cuda.Event().record(),
        lambda: x + 1,
        x.tolist,
    ):
        with pytest.raises(torch.AcceleratorError, match="an illegal memory access was encountered"):
            call()
    assert torch.cuda.cudart().cudaHostRegister(1 << 20, 4096, 3) == 700
