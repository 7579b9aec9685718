"""What a step costs where the host computes alone: the longest of what goes on side by side, and what cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from localllm.offload.planner.calibration import Bound, Corrections, Term
from localllm.offload.planner.plan import ModelShape, Rates

STEP_S = 0.7e-3  # of a step, beside its matrices and its attention: batch, rotations, sampling, events
ATTENTION_SHARE = 0.75  # of what the matrices reach, attention reads its keys and values at
# Of a prompt, between two reads of what is streamed: to read 3 GB takes as long as to compute 270 tokens of a 7B model
# on 2 cores; beyond that little is gained, and the states of all these tokens must be kept.
PASS_TOKENS = 2048
# Between two runs the disk's queue runs low: files of 12 MB in turn came at 2.7 GB/s where one large one did at 3.6.
RUN_S = 1e-3


@dataclass(frozen=True)
class StepCosts:
    """Of a plan that reads `streamed_bytes` from the disk at every step, in so many runs; of a prompt, once for
    `pass_tokens` of it."""

    shape: ModelShape
    rates: Rates
    streamed_bytes: int
    streamed_runs: int
    pass_tokens: int
    corrections: Corrections = field(default_factory=Corrections)

    def decode_s(self, depth: int, rows: int = 1) -> float:
        """Of a step of `rows` sequences, each with `depth` tokens behind it."""
        return max(self._computing_s(depth, rows), self._disk_s("step"))

    def fast_s(self, num_bytes: int) -> float:
        """Of a step of one token of a model of so many bytes, all in memory."""
        seconds = num_bytes / self.rates.matrix_gbs / 1e9 + STEP_S
        return seconds * self.corrections.of(Term("cpu", "step", "memory"))

    def prompt_s(self, num_tokens: int) -> float:
        """Until a prompt is read and its first token drawn."""
        return max(self._prompt_computing_s(num_tokens), self._prompt_disk_s(num_tokens)) + STEP_S

    def bound_by(self, rows: int = 1) -> Bound:
        """What such a step waits for."""
        if self._disk_s("step") > self._computing_s(0, rows):
            return "disk"
        return "memory" if self._computing_s(0, 1) * 1.5 > self._computing_s(0, rows) else "compute"

    def step_term(self, rows: int = 1) -> Term:
        """What such a step is corrected by."""
        return Term("cpu", "step", "disk" if self.bound_by(rows) == "disk" else "memory")

    def prompt_term(self, num_tokens: int) -> Term:
        """What the reading of such a prompt is corrected by."""
        waits = self._prompt_disk_s(num_tokens) > self._prompt_computing_s(num_tokens)
        return Term("cpu", "prompt", "disk" if waits else "compute")

    def _passes(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pass_tokens)

    def _prompt_computing_s(self, num_tokens: int) -> float:
        flops = num_tokens * self.shape.block_flops + self.shape.lm_head.flops
        return flops / self.rates.compute_gops / 1e9 * self.corrections.of(Term("cpu", "prompt", "compute"))

    def _prompt_disk_s(self, num_tokens: int) -> float:
        return self._passes(num_tokens) * self._disk_s("prompt")

    def _computing_s(self, depth: int, rows: int) -> float:
        shape, rates = self.shape, self.rates
        matrices = (*shape.blocks, shape.lm_head)
        read_s = sum(block.num_bytes for block in matrices) / rates.matrix_gbs / 1e9
        many_s = rows * sum(block.flops for block in matrices) / rates.compute_gops / 1e9
        attention_s = rows * depth * shape.kv_bytes_per_token / (ATTENTION_SHARE * rates.matrix_gbs) / 1e9
        return (max(read_s, many_s) + attention_s + STEP_S) * self.corrections.of(Term("cpu", "step", "memory"))

    def _disk_s(self, phase: Literal["step", "prompt"]) -> float:
        """What the page cache holds is not read, but computed with where it lies."""
        from_disk = self.streamed_bytes * (1 - self.rates.cached_share)
        seconds = from_disk / self.rates.disk_gbs / 1e9 + RUN_S * self.streamed_runs * (1 - self.rates.cached_share)
        return seconds * self.corrections.of(Term("cpu", phase, "disk"))
