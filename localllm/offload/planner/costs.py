"""The cost of a step: the GPU, the host, the link and the disk work in parallel, and the slowest decides.

FlexGen's cost model (arXiv:2303.06865, section 4.3), extended to blocks that are computed where they are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from localllm.offload.placement import NEVER
from localllm.offload.planner.calibration import Bound, Corrections, Term
from localllm.offload.planner.machine import CardRates, Rates
from localllm.offload.planner.model_shape import ModelShape

STEP_S = 0.7e-3  # of a step, beside its matrices and its attention: batch, rotations, sampling, events
ATTENTION_SHARE = 0.75  # of the rate of matrices, at which attention reads its keys and values
# Of a prompt, between two reads of what is streamed: to read 3 GB takes as long as to compute 270 tokens of a 7B model
# on 2 cores; beyond that little is gained, and the states of all these tokens must be held.
PASS_TOKENS = 2048
# Between two runs the disk's queue runs low: files of 12 MB in turn came at 2.7 GB/s where one large one did at 3.6.
RUN_S = 1e-3
POOLED_BLOCK_S = 0.35e-3  # of a block whose experts come from the disk: two runs of its steps, and the search for slots
_MOST_ROWS = 4096
_Phase = Literal["step", "prompt"]


@dataclass(frozen=True)
class Work:
    """The work of a step of one token; all but the first three are of a device.

    host_bytes, device_bytes: of the matrices that each computes.
    disk_bytes, disk_runs: read from the disk, in so many runs.
    device_blocks: computed on the device.
    copied_bytes: to the device.
    passing_bytes: copied in a forward of many tokens.
    hops: how often the host computes between two blocks of the device.
    kv_share: of the layers, those whose attention the device computes.
    missed_bytes: of the experts of one token, those that are not in memory; with a device, those that are not in its
        memory: the host computes them, and they are copied there.
    absent_bytes: of all experts that are not in memory; a prompt reads them once.
    """

    host_bytes: int
    disk_bytes: int = 0
    disk_runs: int = 0
    device_bytes: int = 0
    device_blocks: int = 0
    copied_bytes: int = 0
    passing_bytes: int = 0
    hops: int = 0
    kv_share: float = 0.0
    missed_bytes: int = 0
    absent_bytes: int = 0


@dataclass(frozen=True)
class Costs:
    """The costs of steps under one plan.

    card: None where the host computes alone.
    pass_tokens: of a prompt, between two reads of what is streamed.
    """

    shape: ModelShape
    rates: Rates
    card: CardRates | None
    work: Work
    pass_tokens: int
    corrections: Corrections = field(default_factory=Corrections)

    def decode_s(self, depth: int, rows: int = 1) -> float:
        """Return the seconds of a step of `rows` sequences, each with `depth` tokens behind it."""
        serial_s, disk_s, link_s = self._serial_s("step", depth, rows), self._disk_s("step", rows), 0.0
        pages_s = self._pages_s(self.brought_bytes(depth, rows))
        # Which pages are chosen is known in the layer that waits for them; all pages come while others are computed.
        ahead_s, waits_s = (0.0, pages_s) if self.brings_chosen(depth) else (pages_s, 0.0)
        if self.card is None:
            disk_s += ahead_s
        else:
            link_s = self._link_s("step", rows) + ahead_s
        if not self.work.missed_bytes:
            return max(serial_s, link_s, disk_s) + waits_s
        experts_s = self._experts_s(serial_s, rows)
        if self.card is None:
            return serial_s + self._reading_s(experts_s, disk_s, rows) + waits_s
        return max(serial_s + max(0.0, self._missed_s(rows) - experts_s), link_s) + waits_s

    def brings_chosen(self, depth: int) -> bool:
        """Return whether a step brings those of the pages alone that it chooses. With a card it brings all where the
        host attends in some of the layers."""
        return self.shape.is_chosen(depth) and (self.card is None or self.work.kv_share == 1)

    def brought_bytes(self, depth: int, rows: int = 1) -> int:
        """Return the bytes of keys and values that such a step brings from where they rest, of all layers."""
        count = self.shape.chosen_bytes if self.brings_chosen(depth) else self.shape.spilled_bytes
        return count(rows * depth, rows)

    def fast_s(self, num_bytes: int) -> float:
        """Return the seconds of a step of one token of a dense model of so many bytes, all in the fastest memory."""
        if self.card is None:
            seconds = num_bytes / self.rates.matrix_gbs / 1e9 + STEP_S
        else:
            blocks = self.work.device_blocks * num_bytes / max(1, self.work.device_bytes)
            seconds = num_bytes / self.card.matrix_gbs / 1e9 + blocks * self.card.launches * self.card.launch_s
        return seconds * self.corrections.of(Term("cpu" if self.card is None else "gpu", "step", "memory"))

    def prompt_s(self, num_tokens: int) -> float:
        """Return the seconds until a prompt is computed and its first token sampled."""
        return max(self._prompt_seconds(num_tokens).values()) + STEP_S

    def bound_by(self, rows: int = 1) -> Bound:
        """Return what such a step waits for."""
        beside: dict[Bound, float] = {"link": self._link_s("step", rows), "disk": self._disk_s("step", rows)}
        slowest = max(beside, key=lambda bound: beside[bound])
        if beside[slowest] > self._serial_s("step", 0, rows):
            return slowest
        return "memory" if self._serial_s("step", 0, 1) * 1.5 > self._serial_s("step", 0, rows) else "compute"

    def step_term(self, rows: int = 1) -> Term:
        """Return the term that such a step is corrected by."""
        bound = self.bound_by(rows)
        return self._term("step", "memory" if bound == "compute" else bound)

    def prompt_term(self, num_tokens: int) -> Term:
        """Return the term that such a prompt is corrected by."""
        seconds = self._prompt_seconds(num_tokens)
        return self._term("prompt", max(seconds, key=lambda bound: seconds[bound]))

    @property
    def many_rows(self) -> int:
        """The number of tokens from which on it is faster to copy what the host would compute."""
        if self.card is None or not self.work.host_bytes:
            return NEVER
        rows = 1
        while rows < _MOST_ROWS:
            rows *= 2
            if max(*self._passing.values(), self._compute_s(rows)) < self._serial_s("prompt", 0, rows):
                return rows
        return NEVER

    def _term(self, phase: _Phase, bound: Bound) -> Term:
        if self.card is None:
            return Term("cpu", phase, bound)
        return Term("both" if self.work.host_bytes or self.work.missed_bytes else "gpu", phase, bound)

    def _prompt_seconds(self, num_tokens: int) -> dict[Bound, float]:
        """Return the seconds of a prompt by what it waits for."""
        passes = -(-num_tokens // self.pass_tokens)
        # Every pass brings the pages that rest elsewhere by then: half of those behind the last one, as a rule.
        pages_s = passes * self._pages_s(self.shape.spilled_bytes(num_tokens)) / 2
        if self.card is not None and self.work.host_bytes and num_tokens < self.many_rows:
            return {
                "memory": self._serial_s("prompt", num_tokens // 2, num_tokens),
                "link": passes * self._link_s("prompt") + pages_s,
                "disk": passes * self._disk_s("prompt"),
            }
        # However few tokens there are, each matrix is read once by the device and each operator begun.
        compute_s = max(self._compute_s(num_tokens), self._device_s(1))
        passing: dict[Bound, float] = {bound: passes * seconds for bound, seconds in self._passing.items()}
        brought_by: Bound = "disk" if self.card is None else "link"
        return {"compute": compute_s, **passing, brought_by: passing[brought_by] + pages_s}

    def _compute_s(self, num_tokens: int) -> float:
        """Return the seconds of many tokens' products, all on the device where there is one."""
        flops = num_tokens * self.shape.block_flops + self.shape.lm_head.flops
        gops = self.rates.compute_gops if self.card is None else self.card.compute_gops
        return flops / gops / 1e9 * self.corrections.of(self._term("prompt", "compute"))

    def _serial_s(self, phase: _Phase, depth: int, rows: int) -> float:
        """Return the seconds of what is computed, block after block, on the device or on the host."""
        work, rates, card = self.work, self.rates, self.card
        depth = min(depth, self.shape.held_tokens)
        of_row = depth * self.shape.kv_bytes_per_token if phase == "prompt" else self.shape.attended_bytes(depth)
        kv_bytes = rows * of_row / ATTENTION_SHARE / 1e9
        seconds = STEP_S + kv_bytes * (1 - work.kv_share) / rates.matrix_gbs
        seconds += self._matrices_s(rows, work.host_bytes, rates.matrix_gbs, rates.compute_gops)
        if card is not None:
            seconds += self._device_s(rows) + kv_bytes * work.kv_share / card.matrix_gbs + work.hops * card.hop_s
        return seconds * self.corrections.of(self._term(phase, "memory"))

    def _device_s(self, rows: int) -> float:
        """Return the seconds of the device's matrices, and of the operators between them."""
        work, card = self.work, self.card
        if card is None:
            return 0.0
        mixing = self.shape.mixture_launches / len(self.shape.blocks) if card.is_fused else 0.0
        launching_s = (card.launches + mixing) * work.device_blocks * card.launch_s
        matrices_s = self._matrices_s(rows, work.device_bytes, card.matrix_gbs, card.compute_gops)
        return matrices_s + launching_s if card.is_fused else max(matrices_s, launching_s)

    def _matrices_s(self, rows: int, num_bytes: int, matrix_gbs: float, compute_gops: float) -> float:
        shape, head = self.shape, self.shape.lm_head
        flops_per_byte = shape.block_flops / shape.block_bytes
        if self.card is None:  # the host has all of it, the head as well
            flops_per_byte = (shape.block_flops + head.flops) / (shape.block_bytes + head.num_bytes)
        return num_bytes * max(shape.read_share(rows) / matrix_gbs, rows * flops_per_byte / compute_gops) / 1e9

    def _pages_s(self, num_bytes: int) -> float:
        """Return the seconds in which so many keys and values come from the disk, or those of a device's layers to
        it."""
        if self.card is None:
            return num_bytes / self.rates.disk_gbs / 1e9 * self.corrections.of(self._term("step", "disk"))
        copied_bytes = num_bytes * self.work.kv_share
        return copied_bytes / self.card.link_gbs / 1e9 * self.corrections.of(self._term("step", "link"))

    def _missed_s(self, rows: int) -> float:
        """Return the seconds in which the host computes the experts that the device lacks."""
        return 0.0 if self.card is None else self._missed(rows) / self.rates.matrix_gbs / 1e9

    def _reading_s(self, experts_s: float, disk_s: float, rows: int) -> float:
        """Return the seconds by which experts from the disk lengthen such a step of the host.

        Those of a block that are missing, each as likely as any other, are read while the rest of the same block is
        computed, and not before. experts_s: of all experts. disk_s: of reading.
        """
        shape, growth = self.shape, self.shape.expert_growth(rows)
        blocks = len(shape.mixtures)
        wanted = max(1, round(growth * sum(experts.active for _, experts in shape.mixtures) / blocks))
        absent = min(1.0, self._missed(rows) / (shape.active_expert_bytes * growth))
        computed_s, read_s = experts_s / blocks / wanted, disk_s / blocks / (wanted * absent)
        waits_s = sum(
            math.comb(wanted, missing)
            * absent**missing
            * (1 - absent) ** (wanted - missing)
            * max(0.0, missing * read_s - (wanted - missing) * computed_s)
            for missing in range(wanted + 1)
        )
        return blocks * (waits_s + POOLED_BLOCK_S)

    def _missed(self, rows: int) -> float:
        """Return the bytes of the experts that such a step misses."""
        return self.work.missed_bytes * self.shape.expert_growth(rows)

    def _link_s(self, phase: _Phase, rows: int = 1) -> float:
        """Return the seconds of copies to the device. The host's memory feeds the link and the host's cores."""
        work, card = self.work, self.card
        missed = self._missed(rows) if phase == "step" else 0.0
        if card is None or not work.copied_bytes + missed:
            return 0.0
        copied_bytes, host_bytes = work.copied_bytes + missed, work.host_bytes + missed
        copied = max(copied_bytes / card.link_gbs, (copied_bytes + host_bytes) / self.rates.matrix_gbs)
        return copied / 1e9 * self.corrections.of(self._term(phase, "link"))

    @property
    def _passing(self) -> dict[Bound, float]:
        """Return the seconds until everything that the device does not hold has been copied to it once."""
        link_s = 0.0 if self.card is None else self.work.passing_bytes / self.card.link_gbs / 1e9
        return {"link": link_s * self.corrections.of(self._term("prompt", "link")), "disk": self._disk_s("prompt")}

    def _experts_s(self, serial_s: float, rows: int) -> float:
        """Return the seconds of the experts in such a step, all of them where they are computed fastest."""
        shape = self.shape
        expert_bytes = shape.active_expert_bytes * shape.expert_growth(rows)
        if self.card is not None:
            return expert_bytes / self.card.matrix_gbs / 1e9
        return serial_s * expert_bytes / (shape.read_share(rows) * (shape.block_bytes + shape.lm_head.num_bytes))

    def _disk_s(self, phase: _Phase, rows: int = 1) -> float:
        """Return the seconds of reading. What the page cache holds is computed in place."""
        work = self.work
        experts = work.absent_bytes
        if phase == "step" and work.missed_bytes:
            experts = min(experts, int(self._missed(rows)))
        seconds = (work.disk_bytes + experts) / self.rates.disk_gbs / 1e9 + RUN_S * work.disk_runs
        return seconds * (1 - self.rates.cached_share) * self.corrections.of(self._term(phase, "disk"))
