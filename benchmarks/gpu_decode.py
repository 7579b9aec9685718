"""A whole model by our kernels: decode, prefill, first tokens, the card's memory: `python -m benchmarks.gpu_decode`.

Decoding by the engine, as a user has it, and by its steps alone, each begun before the last one's token is known. A
sequence is as deep as it shall be without its prompt having been computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_model import MODEL
from benchmarks.gpu_resident import WithoutGraphs, behind, decoded, resident, sequence
from benchmarks.gpu_timing import copying
from benchmarks.offload_worker import Answer, answer, ids
from benchmarks.peers_protocol import UnavailableError, serve
from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.paged_kv import PagedKV
from localllm.engine.kv_allocator import KVAllocator
from localllm.engine.memory import choose_device
from localllm.engine.prefix_config import IN_POOLS, UNKNOWN_SOURCE
from localllm.engine.request import SamplingParams
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.offload.planner.device_rates import gpu

_KV = "int8"  # the engine's, which is the default
_ROOM = 256  # tokens behind the deepest sequence
_KV_BYTES = {"bf16": 131072, "int8": 70000, "int4": 40000}  # of a token of llama-3.1-8b, and a little more
_WEIGHT_BYTES = 9 * 10**9  # of that model in INT4, with what its steps take and a copy beside them
_SMALL_PROMPT = 20  # of a stand-in


class Decoding:
    def load(self, *, device: str, depths: Sequence[int], small: bool) -> dict[str, Any]:
        """depths: of tokens; those that the card has no memory for, in all formats side by side, are left out."""
        self.device = choose_device(device)
        self.depths = [depth for depth in depths if small or self._fits(depth)]
        if not self.depths:
            raise UnavailableError(f"{MODEL} in INT4 does not fit into what is free of the card's memory")
        self.most_tokens = _SMALL_PROMPT if small else 2048
        started = time.perf_counter()
        self.notes = list[str]()
        self.engine = resident(self.device, max(self.depths) + _ROOM, _KV, self.notes.append, small=small)
        loaded = time.perf_counter()
        ttft = [self._answer(self._prompt(min(512, self.most_tokens)), 2).ttft_s for _ in range(2)]
        assert self.engine.plan is not None and self.engine.runner.gpu_step is not None
        self.shape = self.engine.plan.shape
        # What is known of earlier prompts, for those that may use it.
        self.known = KVAllocator(self.engine.residency, IN_POOLS, UNKNOWN_SOURCE, self.engine.plan)
        self._num_prompts = 0
        self.steps = {True: self.engine.runner.gpu_step, False: WithoutGraphs(self.engine.model)}
        self.pages = {name: self.engine.residency.new_pages(KV_FORMATS[name]) for name in _KV_BYTES}
        self.sequences: dict[tuple[str, int], PagedKV] = {}
        facts: dict[str, Any] = {
            "load_s": loaded - started,
            "is_whole": self.steps[True].is_whole,
            "depths": self.depths,
            "first_s": ttft[0],
            "second_s": ttft[1],
        }
        facts["peak"] = self._peak()
        self.copy_gbs = copying(self.device)
        return facts

    @torch.inference_mode()
    def decode(self, *, kv: str, depth: int, tokens: int, graphs: bool) -> dict[str, Any]:
        """Tokens a second of the steps alone, and the tokens."""
        cache, step = self._sequence(kv, depth), self.steps[graphs]
        torch.get_device_module(self.device).synchronize(self.device)
        started = time.perf_counter()
        found = decoded(step, cache, depth, tokens)
        return {"tok_s": tokens / (time.perf_counter() - started), "tokens": found}

    def engine_decode(self, *, depth: int, tokens: int) -> float:
        """Tokens a second by the engine, greedy."""
        with behind(self.engine, depth):
            return self._answer(self._prompt(depth + 1), tokens).decode_tok_s

    def copied(self, *, depth: int) -> float:
        """Tokens a second, if a step of the engine took as long as a copy on the device takes for as many bytes."""
        shape = self.shape
        num_bytes = shape.block_bytes + shape.lm_head.num_bytes + depth * shape.kv_bytes_per_token
        return self.copy_gbs() * 1e9 / num_bytes

    def prefill(self, *, tokens: int) -> float:
        """Tokens a second of a prompt, to its first token, in such chunks as the engine takes."""
        return tokens / self._answer(self._prompt(tokens), 1).ttft_s

    def first_token(self, *, shared: int, own: int, is_known: bool) -> float:
        """Seconds, of a prompt of so many tokens that all have in common and so many that no other has. is_known: the
        former were computed before."""
        self._num_prompts += 1
        prompt = self._prompt(shared) + ids(own, self.engine.config.vocab_size, self._num_prompts)
        if not is_known:
            return self._answer(prompt, 1).ttft_s
        prefix = self.known.prefix
        assert prefix is not None
        with patch.object(self.engine, "kv_supply", self.known):
            self._answer(prompt[:shared], 1)  # whose pages others may have taken since
            before = prefix.counts.pool
            told = self._answer(prompt, 1)
        if prefix.counts.pool - before < shared // PAGE_TOKENS:
            raise UnavailableError(f"of {shared} tokens, {prefix.counts.pool - before} pages were found again")
        return told.ttft_s

    def _answer(self, prompt: tuple[int, ...], tokens: int) -> Answer:
        """Raises UnavailableError where operators have computed it."""
        told = answer(self.engine, [prompt], tokens)
        if self.engine.runner.gpu_step is None:
            raise UnavailableError(f"our kernels gave up: {'; '.join(self.notes)}")
        return told

    def _fits(self, depth: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        return _WEIGHT_BYTES + (depth + _ROOM) * (sum(_KV_BYTES.values()) + _KV_BYTES[_KV]) < free

    def _sequence(self, kv: str, depth: int) -> PagedKV:
        if (kv, depth) not in self.sequences:
            for key in [key for key in self.sequences if key[1] != depth]:  # one depth at a time
                self.sequences.pop(key).close()
            self.sequences[kv, depth] = sequence(self.pages[kv], depth, _ROOM)
        return self.sequences[kv, depth]

    def _peak(self) -> dict[str, float]:
        """Of the card's memory while a prompt is computed that the whole context is reserved for, beside the ledger;
        the cap of the plan is lifted behind it."""
        plan, engine = self.engine.plan, self.engine
        assert plan is not None
        prompt = self._prompt(min(self.most_tokens, engine.ctx // 2))
        sampling = SamplingParams(temperature=0, max_tokens=engine.ctx - len(prompt), ignore_eos=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        events = engine.generate(prompt, sampling)
        for _ in range(len(prompt) // 512 + 3):
            next(events)
        events.close()  # type: ignore[attr-defined]
        told = {"ledger_bytes": float(sum(plan.ledger["vram"].values()))}
        if self.device.type == "cpu":
            return told
        reserved, found = torch.cuda.max_memory_reserved(self.device), gpu(self.device)
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        context = plan.ledger["vram"].get("context", 0)
        own = 0.0 if found is None or not found.own_bytes else float(found.own_bytes)
        return {**told, "peak_bytes": float(reserved + context), "own_bytes": own}

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return ids(tokens, self.engine.config.vocab_size, 0)


if __name__ == "__main__":
    serve(Decoding())
