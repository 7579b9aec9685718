"""localllm under one cap of a card's memory, a process of its own: `python -m benchmarks.gpu_worker`.

The same blocks are placed as the plan has them, and so that all which the cap does not hold is copied in every step;
besides, a CPU alone computes them where they lie in the host's memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_model import MemoryModel, as_card, written
from benchmarks.offload_worker import answer, ids
from benchmarks.peers_protocol import UnavailableError, serve
from localllm.engine.engine import Engine
from localllm.engine.memory import choose_device
from localllm.engine.planner import ModelPlanner
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.residency import Residency
from localllm.engine.speculative.config import OFF
from localllm.models.families import load_config
from localllm.models.load import load_decoder
from localllm.offload.placement import BlockPlacement
from localllm.offload.planner.device_rates import gpu
from localllm.offload.planner.profile import device_measured, kept_profile, measured
from localllm.offload.planner.roofline import DeviceFloors, warm_up
from localllm.offload.planner.search import Search
from localllm.quant.recipe import RECIPES

CTX = 544
LONG_PROMPT = 512  # as many tokens as are computed at once: the activations are at their peak
PROMPT = 8  # tokens before those that are timed
_PLANNINGS = 5
_NO_HANDING_OVER_S = 1e3  # a plan that may let the host compute nothing
_HOST = torch.device("cpu")


class Card:
    def machine(self, *, device: str, weights: Sequence[str]) -> dict[str, Any]:
        """What a plan knows of this machine, measured now and kept for the other processes."""
        on = choose_device(device)
        profile = kept_profile()
        for name in weights:
            profile = measured(profile, name, RECIPES[name].blocks, torch.bfloat16, _untold)
            profile = device_measured(profile, on, name, RECIPES[name].blocks, torch.bfloat16, _untold)
        found = gpu(on)
        return {"profile": asdict(profile), "card": None if found is None else asdict(found)}

    def load(self, *, raw_config: dict[str, Any], weights: str, cap_bytes: int, device: str) -> dict[str, Any]:
        started = time.perf_counter()
        self.device, recipe = choose_device(device), RECIPES[weights]
        with tempfile.TemporaryDirectory() as folder:
            files = written(Path(folder), raw_config)
            config = load_config(files.directory)
            self.model = MemoryModel(config, recipe)
            with as_card(self.device, self.model):
                asked = ModelPlanner(
                    files.name,
                    files,
                    recipe,
                    torch.bfloat16,
                    self.device,
                    "auto",
                    CTX,
                    None,
                    cap_bytes,
                    None,
                    _untold,
                )
                self.search = asked.search(config)
                assert self.search.machine.card is not None
                self.card_memory = self.search.machine.card.memory
                plannings = [_planned_ms(self.search) for _ in range(_PLANNINGS)]
                self._reset_peak()
                engine = Engine.load(
                    files, device=device, weights=weights, ctx=CTX, vram=cap_bytes, reuse=NO_REUSE, speculate=OFF
                )
        plan, placed = engine.plan, engine.residency.placed
        assert plan is not None
        if placed is None:
            raise UnavailableError(f"the model fits into {cap_bytes / 1e9:.3g} GB: nothing is left to be placed")
        self.engine, self.plan, self.placed, self.recipe = engine, plan, placed, recipe
        # Nothing but `decode` moves blocks: the link's own memory, and another side's, come and go on the card as well.
        engine.residency = Residency(engine.model, engine.kv_format, plan.batch_rows, placed)
        machine = self.search.machine
        assert machine.card is not None
        streaming = replace(machine.card, rates=replace(machine.card.rates, hop_s=_NO_HANDING_OVER_S))
        copying = replace(self.search, machine=replace(machine, card=streaming)).best()
        self.placements = {"found": plan.blocks, "streamed": copying.blocks}
        self.alone: Engine | None = None
        self.floors: DeviceFloors | None = None
        return {
            "load_s": time.perf_counter() - started,
            "pinned_runs": placed.wait_until_pinned(),
            "plan_ms": statistics.median(plannings),
            "layers": config.num_layers,
            "model_bytes": plan.shape.num_bytes,
            "context_bytes": self.card_memory.context_bytes,
            "blocks": {name: _kinds(blocks) for name, blocks in self.placements.items()},
            "copied_bytes": {name: _copied_bytes(blocks) for name, blocks in self.placements.items()},
            "decode_s": {"found": plan.costs.decode_s(PROMPT), "streamed": copying.costs.decode_s(PROMPT)},
            "bound_by": plan.bound_by,
            "ledger": plan.ledger["vram"],
        }

    def peak(self) -> dict[str, Any]:
        """Of the card's memory, over a prompt and the tokens behind it under the plan; the cap is lifted then, as the
        link is measured with memory of its own."""
        told = answer(self.engine, [ids(LONG_PROMPT, self._vocab_size, 0)], 3)
        gave_way = self.placed.blocks != self.plan.blocks
        facts = {"ttft_s": told.ttft_s, "predicted_ttft_s": self.plan.costs.prompt_s(LONG_PROMPT), "gave_way": gave_way}
        if self.device.type == "cpu":
            return facts
        reserved, found = torch.cuda.max_memory_reserved(self.device), gpu(self.device)
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        own_bytes = None if found is None else found.own_bytes
        return {**facts, "peak_bytes": reserved + self.card_memory.context_bytes, "own_bytes": own_bytes}

    def decode(self, *, placement: str, tokens: int) -> dict[str, float]:
        """placement: found, streamed, or host: a CPU alone. Tokens a second, and what the plan says of so many."""
        engine = self._alone() if placement == "host" else self._placed(self.placements[placement])
        told = answer(engine, [ids(PROMPT, self._vocab_size, 1)], tokens)
        predicted = self.plan.costs.decode_s(PROMPT + tokens // 2) if placement == "found" else 0.0
        return {"tok_s": told.decode_tok_s, "predicted_s": predicted}

    def h2d_gbs(self) -> float:
        if self.floors is None:
            self.floors = DeviceFloors(self.device, 256 << 20)
            warm_up(self.device, self.floors.h2d_gbs)
        return statistics.median(self.floors.h2d_gbs() for _ in range(5))

    def _placed(self, blocks: Sequence[BlockPlacement]) -> Engine:
        if self.placed.blocks != blocks:
            self.engine.move(blocks)
            self.placed.wait_until_pinned()
        return self.engine

    def _alone(self) -> Engine:
        if self.alone is None:
            decoder = load_decoder(self.model, self.model.config, self.recipe, dtype=torch.bfloat16, device=_HOST)
            self.alone = Engine(decoder, self.engine.tokenizer, ctx=CTX)
        return self.alone

    def _reset_peak(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def _vocab_size(self) -> int:
        return self.model.config.vocab_size


def _untold(_text: str) -> None:
    """Nobody listens."""


def _planned_ms(search: Search) -> float:
    started = time.perf_counter()
    replace(search).best()  # of a search that remembers no plan
    return 1e3 * (time.perf_counter() - started)


def _kinds(blocks: Sequence[BlockPlacement]) -> dict[str, int]:
    """How many blocks there are of each kind, the embedding aside."""
    return dict(Counter(f"{block.tier}/{block.exec}" for block in blocks[1:]))


def _copied_bytes(blocks: Sequence[BlockPlacement]) -> int:
    """To the card in each step of one token."""
    return sum(block.num_bytes for block in blocks[1:] if block.tier != "vram" and block.exec == "gpu")


if __name__ == "__main__":
    serve(Card())
