"""What a step costs on a machine with a GPU: the device, the host and what is copied work side by side.

FlexGen's cost model (arXiv:2303.06865, section 4.3) for blocks that may also be computed where they rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.offload.costs import ATTENTION_SHARE, RUN_S, STEP_S
from localllm.offload.plan import NEVER, Bound, ModelShape, Rates

_LAUNCHES = 24  # of a block: operators that the device is given one after the other
_MOST_ROWS = 4096


@dataclass(frozen=True)
class CardRates:
    """What the device does, in 1e9 a second: bytes of one token's matrices, operations of many, bytes over the link.

    launch_s: between two small operators. hop_s: to let the host compute one block, there and back.
    """

    matrix_gbs: float
    compute_gops: float
    link_gbs: float
    launch_s: float
    hop_s: float


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
    corrections: Mapping[Bound, float]

    def decode_s(self, depth: int, rows: int = 1) -> float:
        """Of a step of `rows` sequences, each with `depth` tokens behind it."""
        return max(self._serial_s(depth, rows), *self._beside.values())

    def prompt_s(self, num_tokens: int) -> float:
        """Until a prompt is read and its first token drawn."""
        passes = -(-num_tokens // self.pass_tokens)
        if self.work.host_bytes and num_tokens < self.many_rows:
            return max(self._serial_s(num_tokens // 2, num_tokens), *(passes * s for s in self._beside.values()))
        # However few tokens there are, each matrix is read once and each operator begun.
        return max(self._compute_s(num_tokens), self._device_s(1), passes * self._passing_s) + STEP_S

    def bound_by(self, rows: int = 1) -> Bound:
        """What such a step waits for."""
        beside = self._beside
        slowest = max(beside, key=lambda bound: beside[bound])
        if beside[slowest] > self._serial_s(0, rows):
            return slowest
        return "memory" if self._serial_s(0, 1) * 1.5 > self._serial_s(0, rows) else "compute"

    @property
    def many_rows(self) -> int:
        """From how many tokens on it is faster to copy what the host would compute."""
        if not self.work.host_bytes:
            return NEVER
        rows = 1
        while rows < _MOST_ROWS:
            rows *= 2
            if max(self._passing_s, self._compute_s(rows)) < self._serial_s(0, rows):
                return rows
        return NEVER

    def _compute_s(self, num_tokens: int) -> float:
        """On the device alone."""
        flops = num_tokens * self.shape.block_flops + self.shape.head.flops
        return flops / self.card_rates.compute_gops / 1e9 * self.corrections.get("compute", 1.0)

    def _serial_s(self, depth: int, rows: int) -> float:
        """Of what is computed, block after block, on the device or on the host."""
        work, rates, card = self.work, self.rates, self.card_rates
        kv_bytes = rows * depth * self.shape.kv_bytes_per_token / ATTENTION_SHARE / 1e9
        return (
            self._device_s(rows)
            + self._matrices_s(rows, work.host_bytes, rates.matrix_gbs, rates.compute_gops)
            + kv_bytes * (work.kv_share / card.matrix_gbs + (1 - work.kv_share) / rates.matrix_gbs)
            + work.hops * card.hop_s
            + STEP_S
        ) * self.corrections.get("memory", 1.0)

    def _device_s(self, rows: int) -> float:
        """Of the device's matrices, and the operators between them."""
        work, card = self.work, self.card_rates
        launching_s = _LAUNCHES * work.device_blocks * card.launch_s
        return max(self._matrices_s(rows, work.device_bytes, card.matrix_gbs, card.compute_gops), launching_s)

    def _matrices_s(self, rows: int, num_bytes: int, matrix_gbs: float, compute_gops: float) -> float:
        flops_per_byte = self.shape.block_flops / self.shape.block_bytes
        return num_bytes * max(1 / matrix_gbs, rows * flops_per_byte / compute_gops) / 1e9

    @property
    def _beside(self) -> dict[Bound, float]:
        """What goes on beside that, by what it waits for. The host's memory feeds the link and the host's cores."""
        work = self.work
        copied_s = max(
            work.copied_bytes / self.card_rates.link_gbs,
            (work.copied_bytes + work.host_bytes) / self.rates.matrix_gbs if work.copied_bytes else 0.0,
        )
        return {"link": copied_s / 1e9 * self.corrections.get("link", 1.0), "disk": self._disk_s}

    @property
    def _passing_s(self) -> float:
        """Until everything that the device does not keep has passed through it once."""
        link_s = self.work.passing_bytes / self.card_rates.link_gbs / 1e9 * self.corrections.get("link", 1.0)
        return max(link_s, self._disk_s)

    @property
    def _disk_s(self) -> float:
        from_disk = self.work.disk_bytes * (1 - self.rates.cached_share)
        seconds = from_disk / self.rates.disk_gbs / 1e9 + RUN_S * self.work.disk_runs * (1 - self.rates.cached_share)
        return seconds * self.corrections.get("disk", 1.0)
