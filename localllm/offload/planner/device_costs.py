"""What a step costs on a machine with a GPU: the device, the host and what is copied work side by side.

FlexGen's cost model (arXiv:2303.06865, section 4.3) for blocks that may also be computed where they rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from localllm.offload.planner.calibration import Bound, Corrections, Term
from localllm.offload.planner.costs import ATTENTION_SHARE, RUN_S, STEP_S
from localllm.offload.planner.plan import NEVER, ModelShape, Rates

OPERATORS = 24  # of a block: that the device is given one after the other
KERNELS = 5.5  # of a block, in a graph: seven of attention, four of an MLP
_MOST_ROWS = 4096
_Phase = Literal["step", "prompt"]


@dataclass(frozen=True)
class CardRates:
    """What the device does, in 1e9 a second: bytes of one token's matrices, operations of many, bytes over the link.

    launches: of a block, in a step of a few tokens; launch_s: from one to the next. is_fused: they are our kernels in a
    graph, each of which begins when the one before has ended; operators are given to the device while it computes.
    hop_s: to let the host compute one block, there and back.
    """

    matrix_gbs: float
    compute_gops: float
    link_gbs: float
    launch_s: float
    hop_s: float
    launches: float = OPERATORS
    is_fused: bool = False


@dataclass(frozen=True)
class Work:
    """Of a step of one token: bytes that the device computes, those that the host does, those that are copied to the
    device and those that are read from the disk, in so many runs. passing_bytes: copied in a forward of many. hops: how
    often the host computes between two blocks of the device. kv_share: of the layers whose attention the device
    computes."""

    device_bytes: int
    device_blocks: int
    host_bytes: int
    copied_bytes: int
    disk_bytes: int
    disk_runs: int
    passing_bytes: int
    hops: int
    kv_share: float


@dataclass(frozen=True)
class DeviceCosts:
    shape: ModelShape
    rates: Rates
    card_rates: CardRates
    work: Work
    pass_tokens: int
    corrections: Corrections = field(default_factory=Corrections)

    def decode_s(self, depth: int, rows: int = 1) -> float:
        """Of a step of `rows` sequences, each with `depth` tokens behind it."""
        return max(self._serial_s("step", depth, rows), *self._beside("step").values())

    def fast_s(self, num_bytes: int) -> float:
        """Of a step of one token of a model of so many bytes, all on the device."""
        blocks = self.work.device_blocks * num_bytes / max(1, self.work.device_bytes)
        launch_s = blocks * self.card_rates.launches * self.card_rates.launch_s
        seconds = num_bytes / self.card_rates.matrix_gbs / 1e9 + launch_s
        return seconds * self.corrections.of(Term("gpu", "step", "memory"))

    def prompt_s(self, num_tokens: int) -> float:
        """Until a prompt is read and its first token drawn."""
        return max(self._prompt_seconds(num_tokens).values()) + STEP_S

    def bound_by(self, rows: int = 1) -> Bound:
        """What such a step waits for."""
        beside = self._beside("step")
        slowest = max(beside, key=lambda bound: beside[bound])
        if beside[slowest] > self._serial_s("step", 0, rows):
            return slowest
        return "memory" if self._serial_s("step", 0, 1) * 1.5 > self._serial_s("step", 0, rows) else "compute"

    def step_term(self, rows: int = 1) -> Term:
        """What such a step is corrected by."""
        bound = self.bound_by(rows)
        return self._term("step", "memory" if bound == "compute" else bound)

    def prompt_term(self, num_tokens: int) -> Term:
        """What the reading of such a prompt is corrected by."""
        seconds = self._prompt_seconds(num_tokens)
        return self._term("prompt", max(seconds, key=lambda bound: seconds[bound]))

    def _term(self, phase: _Phase, bound: Bound) -> Term:
        return Term("both" if self.work.host_bytes else "gpu", phase, bound)

    def _prompt_seconds(self, num_tokens: int) -> dict[Bound, float]:
        """By what a prompt waits for."""
        passes = -(-num_tokens // self.pass_tokens)
        if self.work.host_bytes and num_tokens < self.many_rows:
            beside = self._beside("prompt")
            serial_s = self._serial_s("prompt", num_tokens // 2, num_tokens)
            return {"memory": serial_s, **{bound: passes * seconds for bound, seconds in beside.items()}}
        # However few tokens there are, each matrix is read once and each operator begun.
        compute_s = max(self._compute_s(num_tokens), self._device_s(1))
        return {"compute": compute_s, **{bound: passes * seconds for bound, seconds in self._passing.items()}}

    @property
    def many_rows(self) -> int:
        """From how many tokens on it is faster to copy what the host would compute."""
        if not self.work.host_bytes:
            return NEVER
        rows = 1
        while rows < _MOST_ROWS:
            rows *= 2
            if max(*self._passing.values(), self._compute_s(rows)) < self._serial_s("prompt", 0, rows):
                return rows
        return NEVER

    def _compute_s(self, num_tokens: int) -> float:
        """On the device alone."""
        flops = num_tokens * self.shape.block_flops + self.shape.lm_head.flops
        return flops / self.card_rates.compute_gops / 1e9 * self.corrections.of(self._term("prompt", "compute"))

    def _serial_s(self, phase: _Phase, depth: int, rows: int) -> float:
        """Of what is computed, block after block, on the device or on the host."""
        work, rates, card = self.work, self.rates, self.card_rates
        kv_bytes = rows * depth * self.shape.kv_bytes_per_token / ATTENTION_SHARE / 1e9
        return (
            self._device_s(rows)
            + self._matrices_s(rows, work.host_bytes, rates.matrix_gbs, rates.compute_gops)
            + kv_bytes * (work.kv_share / card.matrix_gbs + (1 - work.kv_share) / rates.matrix_gbs)
            + work.hops * card.hop_s
            + STEP_S
        ) * self.corrections.of(self._term(phase, "memory"))

    def _device_s(self, rows: int) -> float:
        """Of the device's matrices, and the operators between them."""
        work, card = self.work, self.card_rates
        launching_s = card.launches * work.device_blocks * card.launch_s
        matrices_s = self._matrices_s(rows, work.device_bytes, card.matrix_gbs, card.compute_gops)
        return matrices_s + launching_s if card.is_fused else max(matrices_s, launching_s)

    def _matrices_s(self, rows: int, num_bytes: int, matrix_gbs: float, compute_gops: float) -> float:
        flops_per_byte = self.shape.block_flops / self.shape.block_bytes
        return num_bytes * max(1 / matrix_gbs, rows * flops_per_byte / compute_gops) / 1e9

    def _beside(self, phase: _Phase) -> dict[Bound, float]:
        """What goes on beside that, by what it waits for. The host's memory feeds the link and the host's cores."""
        work = self.work
        copied_s = max(
            work.copied_bytes / self.card_rates.link_gbs,
            (work.copied_bytes + work.host_bytes) / self.rates.matrix_gbs if work.copied_bytes else 0.0,
        )
        link_s = copied_s / 1e9 * self.corrections.of(self._term(phase, "link"))
        return {"link": link_s, "disk": self._disk_s(phase)}

    @property
    def _passing(self) -> dict[Bound, float]:
        """Until everything that the device does not keep has passed through it once."""
        link_s = self.work.passing_bytes / self.card_rates.link_gbs / 1e9
        return {"link": link_s * self.corrections.of(self._term("prompt", "link")), "disk": self._disk_s("prompt")}

    def _disk_s(self, phase: _Phase) -> float:
        from_disk = self.work.disk_bytes * (1 - self.rates.cached_share)
        seconds = from_disk / self.rates.disk_gbs / 1e9 + RUN_S * self.work.disk_runs * (1 - self.rates.cached_share)
        return seconds * self.corrections.of(self._term(phase, "disk"))
