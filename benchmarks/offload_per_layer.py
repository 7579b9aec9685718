"""Decoding with the embeddings of each layer in memory beside decoding with them on the disk, in one process by turns:
`python -m benchmarks.offload_per_layer SPEC`, a JSON object.

Before each stretch of the second kind the page cache is emptied of them, so that every token's row is read from the
disk. Prints one JSON object: the tokens per second of each round; under a cap (`ram_bytes`) what stays on the disk
then, too, and how fast that is.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engines import answer, random_ids
from benchmarks.measure import drop_from_cache
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import NO_REUSE
from localllm.hub import locate
from localllm.hub.packed import packed_directory
from localllm.models.layout import EMBED
from localllm.settings import EngineConfig


@dataclass(frozen=True)
class Spec:
    folder: str
    weights: str
    ctx: int = 1024
    prompt_tokens: int = 64
    gen_tokens: int = 64
    rounds: int = 5
    ram_bytes: int | None = None


def measure(spec: Spec) -> dict[str, Any]:
    files = locate(spec.folder)
    config = EngineConfig(weights=spec.weights, ctx=spec.ctx, speculate="off")
    engine = Engine.load(files, config, reuse=NO_REUSE)
    table, *others = engine.residency.blocks
    assert table.name == EMBED and engine.config.per_layer is not None
    path = packed_directory(files, engine.model.weights) / f"{EMBED}.safetensors"
    places = {"memory": table, "disk": replace(table, tier="disk")}
    tok_s: dict[str, list[float]] = {name: [] for name in places}
    said: dict[str, list[tuple[int, ...]]] = {}
    for number in range(spec.rounds + 1):  # the first is a warm-up
        prompts = [random_ids(spec.prompt_tokens, engine.config.vocab_size, number)]
        for name, block in places.items():
            engine.residency.move([block, *others])
            if name == "disk":
                drop_from_cache([path])
            found = answer(engine, prompts, spec.gen_tokens)
            said[name] = found.token_ids
            if number:
                tok_s[name].append(found.decode_tok_s)
        assert said["memory"] == said["disk"]
    plan = engine.plan
    assert plan is not None
    engine.close()
    return {"decode_tok_s": tok_s, "table_bytes": table.num_bytes, "total_bytes": plan.total_bytes("ram")}


def capped(spec: Spec) -> dict[str, Any]:
    files = locate(spec.folder)
    config = EngineConfig(weights=spec.weights, ctx=spec.ctx, ram=spec.ram_bytes, speculate="off")
    engine = Engine.load(files, config, reuse=NO_REUSE)
    path = packed_directory(files, engine.model.weights) / f"{EMBED}.safetensors"
    on_disk = [block.name for block in engine.residency.blocks if block.tier == "disk"]
    tok_s = []
    for number in range(spec.rounds + 1):
        drop_from_cache([path])
        found = answer(engine, [random_ids(spec.prompt_tokens, engine.config.vocab_size, number)], spec.gen_tokens)
        tok_s.append(found.decode_tok_s)
    engine.close()
    return {"on_disk": on_disk, "ram_bytes": spec.ram_bytes, "decode_tok_s": tok_s[1:]}


if __name__ == "__main__":
    told = Spec(**json.loads(sys.argv[1]))
    print(json.dumps(measure(told) if told.ram_bytes is None else capped(told)))
