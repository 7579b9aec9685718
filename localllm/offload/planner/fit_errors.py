"""The errors of models that do not fit: the numbers, and what would help. Shared by all searches over placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localllm.config import format_bytes
from localllm.errors import DoesNotFitError, Fix
from localllm.offload.planner.machine import Memory
from localllm.offload.planner.model_shape import ModelShape, Packing
from localllm.offload.planner.plan import cap

SMALLER = Fix.advice("choose a smaller model: localllm list --all")
_SMALL = 0.03  # of what is needed: parts that are no larger are not named


def amount(num_bytes: int) -> str:
    return format_bytes(num_bytes, 2)


def parts(owners: Mapping[str, int]) -> str:
    """Those that matter, the largest first."""
    least = _SMALL * sum(owners.values())
    largest_first = sorted(owners.items(), key=lambda owner: -owner[1])
    return ", ".join(f"{owner} {amount(count)}" for owner, count in largest_first if count >= least)


def does_not_fit(
    shape: ModelShape, place: str, room_bytes: int, least_bytes: int, reason: str, fixes: Sequence[str | Fix]
) -> DoesNotFitError:
    """place: "memory". reason: what needs the least that would do."""
    return DoesNotFitError(
        f"{shape.name} does not fit into {amount(room_bytes)} of {place}",
        why=f"in {shape.weights} it needs {amount(least_bytes)} {reason}",
        fix=fixes,
    )


def cannot_be_packed(
    model: str,
    weights: str,
    memory: Memory,
    packing: Packing,
    fixes: Sequence[str | Fix],
    packed_bytes: int | None = None,
) -> DoesNotFitError:
    """packed_bytes: with which it runs once it is packed; None: not known."""
    then = "" if packed_bytes is None else f"; once packed it runs in {amount(packed_bytes)}"
    return DoesNotFitError(
        f"{model} cannot be packed in {amount(memory.ram_bytes)} of memory",
        why=f"to pack it to {weights}, which is done once, needs {amount(memory.program_bytes + packing.num_bytes)}: "
        f"the program {amount(memory.program_bytes)}, the largest matrix and what is made of it "
        f"{amount(packing.num_bytes)}{then}",
        fix=fixes,
    )


def more_of(flag: str, least_bytes: int, most_bytes: int) -> list[Fix]:
    """Return the smallest cap that would do, if the machine has so much."""
    return [Fix.flag(flag, cap(least_bytes))] if least_bytes <= most_bytes else []
