"""Keys and values of running sequences on the disk: the same tokens, in less memory."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.pages import HOST, Ferry, PagePool
from localllm.cache.spill_file import SpillFile
from localllm.engine import planner
from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.kv_allocator import tokens_needed
from localllm.engine.placement import model_shape, with_windows
from localllm.engine.request import Request, SamplingParams
from localllm.engine.step_types import Limits
from localllm.errors import LocalLLMError
from localllm.kernels.sizes import KVShape
from localllm.models.shapes import find_shape
from localllm.offload.planner.machine import Memory
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.cli_support import run_cli
from tests.engine_support import Heard, answered, generated, steps

RESIDENT, CTX = 256, 1024


def engine(kv: str = "int8", weights: str = "int8", offload: str = f"keep:{RESIDENT}", **more: Any) -> Engine:
    return Engine.load("tiny", EngineConfig(kv=kv, weights=weights, ctx=CTX, kv_offload=offload, **more))


@pytest.fixture(scope="module")
def offloading() -> Iterator[Engine]:
    with closing(engine(speculate="ngram")) as loaded:
        yield loaded


@cache
def prompt(family: int, length: int) -> tuple[int, ...]:
    """Prompts of a family begin alike."""
    return tuple((family * 977 + i * i * 31 + 7) % 4000 + 50 for i in range(length))


@cache
def expected(family: int, length: int, count: int) -> tuple[int, ...]:
    """What follows with everything in memory."""
    return tuple(generated(_plain(), prompt(family, length), count))


@cache
def _plain() -> Engine:
    return engine(offload="off", speculate="off")


@pytest.mark.parametrize(("kv", "weights"), [*((kv, "int8") for kv in KV_FORMATS), ("int8", "bf16"), ("bf16", "bf16")])
def test_no_token_changes_in_any_format(kv, weights):
    found = []
    for offload in ("off", f"keep:{RESIDENT}"):
        with closing(engine(kv, weights, offload, speculate="off")) as loaded:
            found.append(generated(loaded, prompt(1, 600), 12))
            is_read = loaded.residency.stream_clock.bytes_read > 0
            assert is_read == (offload != "off")
    assert found[0] == found[1]


@pytest.mark.parametrize("kv", ["int8", "bf16"])
def test_of_pages_on_the_disk_only_those_are_read_that_tokens_choose(kv):
    found, read_bytes = [], []
    for offload in ("off", "keep:512"):
        with closing(engine(kv, offload=offload, attend="top:2", speculate="ngram")) as loaded:
            same = [
                Request(prompt(1, length), SamplingParams(temperature=0, max_tokens=30)) for length in (800, 800, 700)
            ]
            found.append([heard.token_ids for heard in answered(loaded, *same)])
            before = loaded.residency.stream_clock.bytes_read
            generated(loaded, prompt(1, 800), 30)
            read_bytes.append(loaded.residency.stream_clock.bytes_read - before)
            pages = loaded.residency.kv_pages
    assert found[0] == found[1]
    # The last token of the prompt attends to all; of the others each would read all but two pages on the disk.
    layer_bytes = pages.groups[0].sealed.layout.layer_bytes
    spilled_bytes = len(pages.groups[0].layers) * (800 // 64 - 2) * layer_bytes
    assert 0 < read_bytes[1] < 6 * spilled_bytes


def requests() -> st.SearchStrategy[list[tuple[int, int, int, int]]]:
    """(family, length of the prompt, of the answer, when it is cancelled); the same prompt twice is a fork."""
    lengths = st.sampled_from([40, 300, 430, 431, 700])
    one = st.tuples(st.integers(0, 1), lengths, st.integers(1, 24), st.sampled_from([0, 0, 0, 3, 9]))
    return st.lists(one, min_size=1, max_size=4)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(wanted=requests())
def test_forks_cancels_and_prefixes_that_are_found_again_change_no_token(offloading, wanted):
    ends, heard = {}, {}
    for family, length, count, cancelled_at in wanted:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        request_id = offloading.submit(Request(prompt(family, length), sampling))
        heard[request_id], ends[request_id] = Heard(), (family, length, count, cancelled_at)
    for number, event in enumerate(steps(offloading)):
        heard[event.request_id].take(event)
        for request_id, (*_, cancelled_at) in ends.items():
            if cancelled_at and number >= cancelled_at and heard[request_id].end is None:
                offloading.abort(request_id)
    for request_id, (family, length, count, _) in ends.items():
        found, whole = heard[request_id].token_ids, expected(family, length, count)
        is_whole = heard[request_id].finished.finish_reason == "length"
        assert tuple(found) == whole[: count if is_whole else len(found)]
    pages = offloading.residency.kv_pages
    assert not pages.sequences and not any(store.nbytes for store in pages.stores.values())


def test_memory_is_what_the_plan_says(offloading):
    plan = offloading.current_plan
    assert plan is not None and plan.ledger["disk"]["kv"] > 0
    generated(offloading, prompt(3, 900), 40)
    pages = offloading.residency.kv_pages
    # Beside it a forward of 512 tokens, and what the ring's huge pages round up.
    forward_bytes = 512 * plan.shape.kv_bytes_per_token + 512 * plan.shape.row_bytes + (2 << 20)
    assert pages.nbytes <= plan.ledger["ram"]["kv"] + forward_bytes


def test_a_disk_that_is_full_ends_the_answer_that_needs_it(offloading, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SpillFile, "_write", full)
    sampling = SamplingParams(temperature=0, max_tokens=4)
    long, short = answered(offloading, *(Request(prompt(5, length), sampling) for length in (700, 40)))
    error = long.finished.error
    assert isinstance(error, LocalLLMError) and "drop --kv-offload" in str(error.fix) and "No space left" in error.why
    assert short.finished.finish_reason in ("length", "stop")


def test_a_disk_that_gives_nothing_back_ends_the_answer_and_the_next_one_is_right(offloading, monkeypatch):
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    offloading.submit(Request(prompt(6, 700), sampling))
    ended = None
    with monkeypatch.context() as patch:
        for event in steps(offloading):
            if isinstance(event, TokenEvent):
                patch.setattr("localllm.cache.spill_file.read_into", _broken)
            ended = event
    assert ended is not None and "cannot be read back" in str(getattr(ended, "error", ""))
    assert tuple(generated(offloading, prompt(6, 700), 8)) == expected(6, 700, 8)


class _Failing:
    """Reads of the kernel of which two come to nothing, the later one last."""

    def __init__(self) -> None:
        self.under_way: list[tuple[int, ...]] = []

    def begin(self, reads: list[tuple[int, ...]]) -> int:
        self.under_way += reads
        return len(reads)

    def ended(self, _timeout_s: float) -> list[tuple[int, int]]:
        key, descriptor, begin, address, num_bytes = self.under_way.pop(0)
        if begin // num_bytes in (2, 5):
            return [(key, -errno.EIO)]
        into = (ctypes.c_char * num_bytes).from_address(address)
        return [(key, os.preadv(descriptor, [into], begin))]

    def close(self) -> None:
        pass


def test_of_reads_that_fail_all_are_done_in_another_way(tmp_path, monkeypatch):
    layout = KV_FORMATS["bf16"].layouts(KVShape(2, 32), torch.float32)[0]
    pool = PagePool(layout, [HOST], Ferry())
    pool.reserve(8)
    pages = [pool.take() for _ in range(8)]
    for number, page in enumerate(pages):
        page.layer(0).fill_(number + 1)
    with closing(SpillFile(tmp_path, layout, 1, 8, by_page=True)) as file:
        file.write(pages)
        monkeypatch.setattr(file, "_kernel", _Failing())
        if file._direct is None:
            file._direct = os.dup(file._plain)
        found = host_buffer(8 * file.stride).view(8, file.stride)
        file.read_pages(0, range(8), [row.data_ptr() for row in found])
    assert found[:, 0].tolist() == [*range(1, 9)]


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_what_it_cannot_do_is_refused(monkeypatch):
    wrong = run_cli("run", "tiny", "-p", "the fox", "--kv-offload", "keep:100")
    assert wrong.code == 2 and "256" in wrong.err
    monkeypatch.setenv("LOCALLLM_KV_OFFLOAD", "auto")
    private = run_cli("run", "tiny", "-p", "the fox", "--private")
    assert private.code == 2 and "stores nothing on the disk" in private.err
    assert private.error_lines[2].endswith("--private --kv-offload off")  # which helps where it is stored, too


def test_a_plan_of_later_keeps_as_many_in_memory_as_pages_were_made_for(monkeypatch):
    monkeypatch.setattr("localllm.offload.planner.search.LEAST_RESIDENT", 128)
    with closing(engine(offload="auto")) as loaded:
        plan = loaded.current_plan
        assert plan is not None and loaded.residency.kv_pages.ring is None
        ram = plan.ledger["ram"]
        ram_bytes = ram["program"] + ram["weights"] + ram["kv"]
        monkeypatch.setattr(planner, "process_memory", lambda *_, **__: Memory(ram_bytes, ram["program"], ram_bytes))
        assert loaded.planned(CTX).shape.resident_tokens is None


def test_short_texts_side_by_side_take_no_more_memory_than_the_plan_has(offloading):
    plan = offloading.current_plan
    assert plan is not None
    full = replace(plan, limits={"ram": plan.total_bytes("ram")})
    limits = Limits().within(full)
    room = limits.kv_tokens * plan.shape.kv_bytes_per_token
    assert room <= plan.ledger["ram"]["kv"] + plan.shape.kv_bytes_per_token
    longest = Request(prompt(1, 900), SamplingParams(max_tokens=CTX - 900))
    assert limits.kv_tokens // 2 < tokens_needed(longest, CTX, limits) <= limits.kv_tokens


def test_a_plan_keeps_as_many_in_memory_as_there_is_room_for_and_says_what_a_step_reads():
    found = run_cli("plan", "llama-3.1-8b", "--ctx", "131072", "--ram", "8GiB", "--kv-offload", "auto", "--gpu", "none")
    assert found.code == 0 and "on the disk; behind 131,072 tokens a step reads" in " ".join(found.out.decode().split())
    refused = run_cli("plan", "llama-3.1-8b", "--ctx", "131072", "--ram", "8GiB", "--gpu", "none")
    assert refused.code != 0 and "--kv-offload auto" in refused.err


def test_a_plan_for_a_gpu_keeps_all_weights_there_and_says_what_a_step_copies():
    found = run_cli(
        "plan", "llama-3.1-8b", "--ctx", "131072", "--gpu", "rtx4060", "--ram", "16GiB", "--kv-offload", "auto"
    )
    shown = " ".join(found.out.decode().split())
    assert found.code == 0 and "those before them in memory; behind 131,072 tokens a step copies" in shown
    assert "65 on the GPU" in shown and "copied to the GPU at every step" not in shown


def test_layers_with_a_window_keep_it_in_memory_and_are_not_read_from_the_disk():
    config = find_shape("gemma-3-4b").config
    shape = model_shape(config, RECIPES["int4-g64"], "bf16", "gemma", "cpu", "int8")
    kept = replace(with_windows(shape, config, "bf16"), resident_tokens=2048)
    windows = [window for window in config.windows if window is not None]
    layer_bytes = shape.kv_bytes_per_token // len(config.windows)  # of a token; layers are alike
    others = len(config.windows) - len(windows)
    assert kept.spilled_bytes(32_768) == (32_768 - 2048) * others * layer_bytes
    least = (len(windows) * (max(windows) + 2560) + others * 2048) * layer_bytes
    assert least <= kept.kv_bytes(32_768) < 0.3 * shape.kv_bytes(32_768)
