"""What puts localllm on the simulated card, and drives it there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from localllm import TokenEvent
from localllm.engine.request import SamplingParams
from localllm.kernels import kv_page
from localllm.kernels.gpu import product, ready
from localllm.models import gpu_warm
from localllm.models.offloaded_model import OffloadedModel
from localllm.offload.placement import BlockPlacement
from localllm.offload.planner.profile import DeviceRates, FormatRates, Profile, kept_profile, torch_build
from localllm.offload.streaming import pinned
from localllm.quant.recipe import RECIPES
from tests.engine_support import generated
from tests.packed_support import pack
from tests.simulated_card.cuda_api import driver_functions, functions
from tests.simulated_card.device import DEVICE, CardConfig, SimulatedCard
from tests.simulated_card.kernels import interpret, replace_everywhere, use_references
from tests.simulated_card.tensors import OnCard, python_tensors
from tests.test_device_placement import Packed

CACHES = (kv_page._hadamard, product.dispatch_for, ready.why_not)  # by the device: of this card, and no later one


KERNELS = {"references": use_references, "interpreted": interpret}


@contextmanager
def on_simulated_card(
    config: CardConfig | None = None, kernels: str = "references", *, is_measured: bool = False
) -> Iterator[SimulatedCard]:
    """Inside, torch has a card, cuda:0, for the thread that enters. Fails where the driver's rules were broken and
    nobody has cleared `broken_rules`. The guard must be registered: the fixture `simulated_card` does that.

    kernels: who does their work, a key of KERNELS. is_measured: a plan measures this machine and the card in it, where
    its rates are known else.
    """
    card = SimulatedCard(config or CardConfig())
    with pytest.MonkeyPatch.context() as patch, _nothing_kept():
        for name, value in functions(card).items():
            patch.setattr(torch.cuda, name, value)
        for name, value in driver_functions(card).items():
            patch.setattr(torch._C, name, value, raising=False)
        patch.setattr(torch.cuda.graph, "default_capture_stream", None)
        patch.setattr(ready, "missing", lambda device: "" if device.type == "cuda" else "they are made for NVIDIA GPUs")
        patch.setattr(ready, "_checked", lambda *_: "")
        patch.setattr(pinned, "is_read_at_its_address", lambda _card: card.config.reads_host)
        # Nothing is compiled here that differs by the number of rows, and all of them are two thirds of a load.
        patch.setattr(gpu_warm, "_ROWS", (1, 2))
        patch.setattr(gpu_warm, "_MANY_ROWS", (32,))
        if not is_measured:
            replace_everywhere(kept_profile, lambda: _profile(card.config), patch)
        replace_everywhere(torch_build, lambda: (torch.__version__.partition("+")[0], "13.0"), patch)
        with KERNELS[kernels](card), python_tensors(card), OnCard(card):
            yield card
    assert not card.broken_rules, f"what the driver does not take: {'; '.join(card.broken_rules)}"


def _profile(config: CardConfig) -> Profile:
    """What was measured of a card like this one, in a machine that is slow beside it: to measure it takes a minute and
    a half, and other figures come of it each time."""
    formats = dict.fromkeys(RECIPES, FormatRates(12.0, 200.0))
    on_card = dict.fromkeys(RECIPES, FormatRates(config.memory_gbs, 40_000.0, 1000))
    rates = (config.memory_gbs, config.link_gbs, config.link_gbs, 5 * config.launch_s, config.launch_s, 1e-5)
    return Profile("this machine", 20.0, 1.5, formats=formats, device=DeviceRates(*rates, 0, on_card))


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """Neither before nor behind it is anything known of cuda:0."""

    def forget() -> None:
        ready._failures.pop(str(DEVICE), None)
        for known in CACHES:
            known.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


PLACEMENTS: dict[str, Callable[[int], str]] = {
    "resident": lambda _index: "resident",
    "streamed": lambda _index: "streamed",
    "disk": lambda _index: "disk",
    "mixed": lambda index: random.Random(index).choice(["resident", "streamed", "computed", "disk", "split"]),
}


def blocks(packed: Packed, placement: str) -> list[BlockPlacement]:
    return packed.blocks(PLACEMENTS[placement])


PROMPT = tuple(range(3, 21))  # more rows than a step has
FORMATS = ("int4-g32", "int8")  # that promise their bits on a card


def packed_in_formats(checkpoint: Path, target: Path) -> dict[str, Packed]:
    """Return the model in each of FORMATS, by its name, packed into a folder of that name in `target`."""
    return {weights: Packed(checkpoint, pack(checkpoint, target / weights, weights), weights) for weights in FORMATS}


def text(packed: Packed, placed: OffloadedModel, count: int) -> list[int]:
    """Return what the model writes behind the prompt, by the program that it began with."""
    engine = packed.engine(placed)
    program = engine.runner.gpu_program
    token_ids = generated(engine, PROMPT, count, temperature=0.9, seed=5)
    assert engine.runner.gpu_program is program, "nothing was given up"
    return token_ids


def written_while_moved(
    packed: Packed, placed: OffloadedModel, placements: Sequence[str], wish: SamplingParams
) -> list[int]:
    """Return an answer to the prompt; behind every third of its tokens the blocks move to the next placement."""
    engine, token_ids, next_ones = packed.engine(placed), list[int](), itertools.cycle(placements)
    for event in engine.generate(PROMPT, wish):
        if isinstance(event, TokenEvent):
            token_ids.append(event.token_id)
            if len(token_ids) % 3 == 0:
                engine.residency.move(blocks(packed, next(next_ones)))
    return token_ids


def texts_of_the_cpu(models: Mapping[str, Packed], count: int) -> dict[str, list[int]]:
    """Return what each model writes on the CPU alone, by its format."""
    texts = {}
    for weights, packed in models.items():
        with packed.opened() as placed:
            placed.place(blocks(packed, "resident"), 8)
            texts[weights] = text(packed, placed, count)
    return texts
