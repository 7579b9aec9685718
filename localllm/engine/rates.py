"""What plans are predicted from, measured anew: for who knows that the machine was busy when it was measured."""

from __future__ import annotations

from collections.abc import Callable

from localllm.engine.memory import choose_device, choose_dtype
from localllm.engine.planner import has_card
from localllm.offload.measuring.measurement import device_measured, measured
from localllm.offload.planner.profile import Profile, machine_key
from localllm.quant.recipe import DEFAULT, RECIPES


def measure_again(say: Callable[[str], None]) -> Profile:
    """The machine, with INT4 weights; other formats are measured when a plan needs them. What runs have taught is
    forgotten: it was of the figures before. Until there are new ones, the old ones stay."""
    device, dtype, blocks = choose_device("auto"), choose_dtype("auto"), RECIPES[DEFAULT].blocks
    profile = measured(Profile(machine_key()), DEFAULT, blocks, dtype, say)
    return device_measured(profile, device, DEFAULT, blocks, dtype, say) if has_card(device) else profile
