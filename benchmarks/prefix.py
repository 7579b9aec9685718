"""The cost of a prompt whose beginning was computed before: `python -m benchmarks.prefix`.

A model (random INT4 weights, which cost what trained ones do) reads 4,096 tokens; then the next turn of that chat,
the same with its last message edited, and the next turn after the engine was loaded anew and the page cache has dropped
the files of pages; each beside the cold time to the first token of a prompt as long. What is loaded stands beside
O_DIRECT reads of the same files. `localllm bench` has the decoding in every KV format. Rounds take turns; medians with
their lowest and highest. Of a hybrid (`--model qwen3.5-4b`) the snapshots of its states stand beside their budget.
Results go to benchmarks/results/prefix.json, those of another model than the usual one to prefix-MODEL.json.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import RESULTS, drop_from_cache, machine, paired, parser, save, spread
from benchmarks.random_files import random_model
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent
from localllm.engine.prefix_config import KVReuse
from localllm.engine.request import SamplingParams
from localllm.hub import ModelFiles
from localllm.models.families import parse_config
from localllm.models.shapes import Shape, find_shape
from localllm.offload.planner.disk_speed import files_read_gbs
from localllm.offload.planner.plan import SNAPSHOTS
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig

NAME = "tinyllama-1.1b"
SHARED_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 4096, 48, 32
LONGEST = 1 << 15
_FLUSH_S = 60.0
_RESTARTS = 3  # a round: their rates differ most


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shared-tokens", type=int, default=SHARED_TOKENS)
    arguments.add_argument("--model", default=NAME, help="whose shape is taken")
    arguments.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    options = arguments.parse_args()
    found = reuse(options.model, options.rounds, options.shared_tokens)
    result = {"machine": machine(), "shape": options.model, "reuse": found}
    name = "prefix" if options.model == NAME else f"prefix-{options.model}"
    print(f"wrote {save(name, result, options.save)}")


def long_shape(name: str) -> Shape:
    """A shape as if it had been trained for a long context, on which its speed does not depend."""
    raw = {**find_shape(name).raw_config, "max_position_embeddings": LONGEST}
    return Shape(name, parse_config(raw, name), raw)


def reuse(name: str, rounds: int, shared_tokens: int) -> dict[str, Any]:
    shape, recipe = long_shape(name), RECIPES["int4-g64"]
    with random_model(name, shape.raw_config, recipe) as files, tempfile.TemporaryDirectory() as folder:
        chat = Chat(files, recipe.name, Path(folder), shared_tokens, shape.config.vocab_size)
        chat.turn(-1)  # kernels are compiled, the disk's tier has begun
        turns = [chat.turn(number) for number in range(rounds)]
        snapshots = chat.snapshots()
        chat.engine.close()
    figures = {key: [turn.seconds[key] for turn in turns] for key in turns[0].seconds}
    loads = zip(*(load for turn in turns for load in turn.loads), strict=True)
    rates = dict(zip(("load_gbs", "disk_gbs"), map(list, loads), strict=True))
    result: dict[str, Any] = {"shared_tokens": shared_tokens, **{key: spread(each) for key, each in figures.items()}}
    shares = {
        **{f"{warm}_of_cold": paired(figures[f"{warm}_s"], figures["cold_s"])
           for warm in ("next_turn", "edited", "restarted")},
        "load_of_disk": paired(rates["load_gbs"], rates["disk_gbs"]),
    }  # fmt: skip
    result |= {**shares, **{key: spread(each) for key, each in rates.items()}}
    for key in ("cold_s", *shares, *rates):
        print(f"{key}: {result[key]}")
    if snapshots:
        result["snapshots"] = snapshots
        print("snapshots: " + ", ".join(f"{key} {count / 1e6:.1f} MB" for key, count in snapshots.items()))
    return result


@dataclass(frozen=True)
class Turn:
    """seconds: to first tokens, and how many tokens were not computed.

    loads: of every restart, in 1e9 bytes a second: of the pages, and of the disk.
    """

    seconds: dict[str, float]
    loads: list[tuple[float, float]]


class Chat:
    """A chat by one engine after the other over the same folder of pages."""

    def __init__(self, files: ModelFiles, weights: str, folder: Path, shared_tokens: int, vocab_size: int) -> None:
        self._files, self._weights, self._folder = files, weights, folder
        self._shared_tokens, self._vocab_size = shared_tokens, vocab_size
        self.engine = self._load()

    def _load(self) -> Engine:
        ctx, reuse = self._shared_tokens + 4 * (TURN_TOKENS + ANSWER_TOKENS), KVReuse(directory=self._folder)
        return Engine.load(
            self._files, EngineConfig(weights=self._weights, ctx=min(ctx, 8192), speculate="off"), reuse=reuse
        )

    def turn(self, number: int) -> Turn:
        """One turn of a chat that nobody has had before."""
        began = time.time()
        shared = self._ids(self._shared_tokens, 10 * number)
        question, edited, third = (self._ids(TURN_TOKENS, 10 * number + n) for n in (1, 2, 3))
        cold_s, cached, answer = self._ask([*shared, *question])
        assert not cached
        chat = [*shared, *question, *answer]
        next_s, next_cached, _ = self._ask([*chat, *third])
        edited_s, edited_cached, _ = self._ask([*shared, *edited])
        prefix = self.engine.prefix
        assert prefix is not None and prefix.disk is not None and prefix.disk.flush(_FLUSH_S)
        paths = [path for path in self._folder.rglob("*.page") if path.stat().st_mtime >= began]
        restarts = [self._restart(paths, [*chat, *third]) for _ in range(_RESTARTS)]
        restarted_s, restarted_cached = median(s for s, _, _ in restarts), min(cached for _, cached, _ in restarts)
        seconds = {
            "cold_s": cold_s,
            "next_turn_s": next_s,
            "next_turn_cached_tokens": next_cached,
            "edited_s": edited_s,
            "edited_cached_tokens": edited_cached,
            "restarted_s": restarted_s,
            "restarted_cached_tokens": restarted_cached,
        }
        return Turn(seconds, [load for _, _, load in restarts])

    def _restart(self, paths: Sequence[Path], token_ids: list[int]) -> tuple[float, int, tuple[float, float]]:
        """Seconds to the first token of a new engine, how many tokens were not computed, and the rates."""
        self.engine.close()
        drop_from_cache(paths)
        disk_gbs = files_read_gbs(paths)
        self.engine = self._load()
        first_s, cached, _ = self._ask(token_ids)
        prefix = self.engine.prefix
        assert prefix is not None and prefix.disk is not None and prefix.disk.flush(_FLUSH_S)
        load_gbs = prefix.counts.disk_bytes / prefix.counts.disk_s / 1e9
        return first_s, cached, (load_gbs, disk_gbs)

    def snapshots(self) -> dict[str, int]:
        """Bytes of one snapshot of recurrent states, of those in memory, and of what they may take; nothing where a
        model has none."""
        prefix, plan = self.engine.prefix, self.engine.plan
        if prefix is None or prefix.snapshots is None or plan is None:
            return {}
        held = prefix.snapshots.ram_used_bytes
        return {"one": prefix.snapshots.num_bytes, "in memory": held, "budget": plan.ledger["ram"][SNAPSHOTS]}

    def _ask(self, token_ids: list[int]) -> tuple[float, int, list[int]]:
        """Seconds to the first token, how many tokens were not computed, and the answer."""
        answer: list[int] = []
        started, first_s = time.perf_counter(), 0.0
        sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for event in self.engine.generate(token_ids, sampling):
            if isinstance(event, FinishedEvent):
                if event.error is not None:
                    raise event.error
                return first_s, event.usage.cached_tokens, answer
            if (token_id := getattr(event, "token_id", None)) is not None:
                first_s = first_s or time.perf_counter() - started
                answer.append(token_id)
        raise AssertionError("an answer ends")

    def _ids(self, count: int, seed: int) -> list[int]:
        choose = random.Random(f"{seed}")  # a number and its negative are one seed
        return [choose.randrange(3, self._vocab_size) for _ in range(count)]


if __name__ == "__main__":
    main()
