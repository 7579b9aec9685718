"""The built-in model's drafters on real texts, and what leaving out blocks gives where they are streamed."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.engines import answer, tiny_engine
from benchmarks.measure import paired, spread
from benchmarks.oracle import draft_with
from localllm import hub
from localllm.config import format_bytes
from localllm.engine.engine import Engine
from localllm.engine.placement import process_memory
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import Request, SamplingParams
from localllm.engine.speculative.config import OFF, Speculate
from localllm.engine.speculative.drafter import Drafter
from localllm.engine.speculative.ngram import NgramLookup
from localllm.engine.speculative.skip import SkipDrafter
from localllm.engine.speculative.skip_set import SkipSet
from localllm.engine.speculative.speculator import Speculation
from localllm.hub import ModelFiles
from localllm.models.families import load_config
from localllm.models.layout import model_bytes
from localllm.quant.recipe import RECIPES

HELD_OUT = "tales/641.txt"  # a book that the built-in model was not trained on
CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

class Queue:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop(0)

class"""
SUMMARISE = "Summarise this text: "
PASSAGES, PASSAGE_LETTERS, ANSWER_TOKENS, DRAFT_TOKENS = 6, 900, 200, 4
SKIPPED_SHARES = (0.25, 0.5)  # of the blocks' bytes
TRIALS = 240
CTX = 1024
# The built-in model with blocks that change nothing: so many layers behind each of its own, and MLPs so wide.
NOOP_LAYERS, WIDE = 3, 12288
GROWN_CAP = 0.6  # of its bytes have room, with all else but the program


def texts(_rounds: int, _shape: str) -> dict[str, Any]:
    """The blocks to leave out are learnt on other passages of the book first."""
    rows = []
    with tiny_engine(CTX) as engine:
        passages = held_out(2 * PASSAGES)
        skip_set = SkipSet(engine.residency, None)
        improve(engine, skip_set, [engine.encode(text) for text in passages[PASSAGES:]], TRIALS)
        skipped = {share: skip_set.least_harmful(share) for share in SKIPPED_SHARES}
        asked = [engine.encode([{"role": "user", "content": SUMMARISE + text}]) for text in passages[:PASSAGES]]
        prompts = {
            "a tale it has not seen": [engine.encode(text) for text in passages[:PASSAGES]],
            "code": [engine.encode(CODE)],
            "a text to summarise": asked,
        }
        for (text, some), temperature in product(prompts.items(), (0.0, 0.8)):
            rows.append(_row(engine, text, some, temperature, "ngram"))
            for share, blocks in skipped.items():
                rows.append(_row(engine, text, some, temperature, "skip", blocks, share))
                rows.append(_row(engine, text, some, temperature, "ngram+skip", blocks, share))
    sets = {str(share): sorted(blocks) for share, blocks in skipped.items()}
    return {"rows": rows, "draft_tokens": DRAFT_TOKENS, "skipped": sets, "trials": TRIALS}


def _row(
    engine: Engine,
    text: str,
    prompts: Sequence[list[int]],
    temperature: float,
    who: str,
    skipped: frozenset[str] = frozenset(),
    share: float = 0.0,
) -> dict[str, Any]:
    stats = []
    for seed, prompt in enumerate(prompts):
        lookup = NgramLookup() if "ngram" in who else None
        drafters: list[Drafter] = [SkipDrafter(lambda: engine.runner, lambda: skipped)] if "skip" in who else []
        engine.speculation = Speculation(engine.residency, lookup, drafters, DRAFT_TOKENS, adapts=False)
        found = answer(engine, [prompt], ANSWER_TOKENS, temperature=temperature, seed=seed).speculation
        assert found is not None
        stats.append(found)
    drafted, accepted = sum(each.drafted for each in stats), sum(each.accepted for each in stats)
    row = {
        "text": text,
        "temperature": temperature,
        "who": who,
        "skipped_share": share,
        "tokens_per_pass": spread([each.tokens_per_pass or 1.0 for each in stats]),
        "accepted": accepted / max(1, drafted),
    }
    shown = f"{who}{f' without {share:.0%}' if share else ''}"
    print(f"{text:24} at {temperature}  {shown:24} {row['tokens_per_pass']} tokens a pass, {row['accepted']:.2f} right")
    return row


def held_out(count: int) -> list[str]:
    """Passages spread over the book. Raises SystemExit where it is absent."""
    folder = os.environ.get("LOCALLLM_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
    path = Path(folder, HELD_OUT)
    if not path.exists():
        raise SystemExit(f"{path} is absent: set LOCALLLM_TEST_DATA to a folder that has {HELD_OUT}")
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").replace("\r", ""))
    text = " ".join(" ".join(paragraph.split()) for paragraph in paragraphs[100:-100])
    step = len(text) // count
    return [text[start : start + PASSAGE_LETTERS] for start in range(0, step * count, step)]


def improve(engine: Engine, skip_set: SkipSet, prompts: Sequence[list[int]], trials: int) -> None:
    """Try blocks as the engine does while it answers, but at every token."""
    draft_with(engine, OFF)
    while True:
        for prompt in prompts:
            for temperature in (0.0, 0.8):
                sampling = SamplingParams(temperature=temperature, max_tokens=ANSWER_TOKENS, ignore_eos=True)
                engine.submit(Request(tuple(prompt), sampling))
                while engine.has_work:
                    running = engine.scheduler.running
                    if running and skip_set.is_due(running[0]):
                        skip_set.try_on(running[0], lambda: False)
                    engine.step()
                    if len(skip_set.harm.trials) >= trials:
                        for sequence in list(engine.scheduler.sequences):
                            engine.abort(sequence.request_id)
                        engine.step()
                        return


def grown(rounds: int, _shape: str) -> dict[str, Any]:
    """Under a cap, placed as planned before anything is known of its blocks, and after the trials."""
    with grown_model() as folder:
        files = hub.locate(str(folder))
        whole = _loaded(files, None, OFF)
        prompt = whole.encode("Once upon a time there was a fox who")
        expected = answer(whole, [prompt], 64).ids
        assert whole.residency.placed is not None
        learnt = SkipSet(whole.residency, whole.residency.placed.directory)
        rows = [_grown_row(files, "nothing is known of its blocks", prompt, expected, rounds)]
        improve(whole, learnt, [whole.encode(text) for text in held_out(4)], TRIALS)
        learnt.close()
        rows.append(_grown_row(files, f"after {TRIALS} trials", prompt, expected, rounds))
        whole.close()
    return {"rows": rows, "layers": 12 * (1 + NOOP_LAYERS), "trials": TRIALS}


def _loaded(files: ModelFiles, ram_bytes: int | None, wish: Speculate) -> Engine:
    return Engine.load(files, device="cpu", weights="int4", ctx=512, ram=ram_bytes, reuse=NO_REUSE, speculate=wish)


def _grown_row(
    files: ModelFiles, placed: str, prompt: Sequence[int], expected: Sequence[int], rounds: int
) -> dict[str, Any]:
    recipe = RECIPES["int4-g64"]
    config = load_config(files.directory)
    program = process_memory(None, recipe, config.vocab_size).program_bytes
    engine = _loaded(files, program + int(GROWN_CAP * model_bytes(config, recipe)), Speculate("skip"))
    drafting = engine.speculation
    plain: list[float] = []
    drafted: list[float] = []
    tokens: list[float] = []
    answer(engine, [prompt], 96)  # it finds out what pays
    for _ in range(rounds):  # plain decoding before and behind: the disk is not always as fast
        draft_with(engine, OFF, keeps=True)
        alone, before = engine.speculation, answer(engine, [prompt], 64).token_s
        engine.speculation = drafting
        found = answer(engine, [prompt], 64)
        assert found.ids == tuple(expected) and found.speculation is not None
        engine.speculation = alone
        plain.append((before + answer(engine, [prompt], 64).token_s) / 2)
        drafted.append(found.token_s)
        tokens.append(found.speculation.tokens_per_pass or 1.0)
    assert engine.plan is not None
    streamed = engine.plan.streamed
    row = {
        "placed": placed,
        "streamed_bytes": engine.plan.streamed_bytes,
        "own_blocks_streamed": sum(map(_is_own, streamed)),
        "noop_blocks_streamed": sum(not _is_own(name) for name in streamed),
        "speedup": paired(plain, drafted),
        "tokens_per_pass": spread(tokens),
        "plain_tok_s": 1 / median(plain),
    }
    size = format_bytes(engine.plan.streamed_bytes)
    print(f"grown, {placed}: {row['speedup']} x, {row['tokens_per_pass']} tokens a pass, {size} streamed")
    engine.close()
    return row


def _is_own(name: str) -> bool:
    return int(name.split(".")[1]) % (1 + NOOP_LAYERS) == 0


@contextmanager
def grown_model() -> Iterator[Path]:
    """The built-in model in a folder, with layers between its own that add exactly nothing, and wider MLPs of zeros.

    It writes the same text, and takes as many bytes as a model of this shape.
    """
    source = hub.locate("tiny").directory
    with tempfile.TemporaryDirectory(dir=os.environ.get("LOCALLLM_CACHE")) as name:
        folder = Path(name)
        for path in source.iterdir():
            if path.suffix == ".json":
                shutil.copy(path, folder)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(source / "model.safetensors")
        layers, narrow = config["num_hidden_layers"], config["intermediate_size"]
        config |= {"num_hidden_layers": layers * (1 + NOOP_LAYERS), "intermediate_size": WIDE}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        grown = {key: value for key, value in tensors.items() if ".layers." not in key}
        generator = torch.Generator().manual_seed(0)
        for number in range(config["num_hidden_layers"]):
            own, place = divmod(number, 1 + NOOP_LAYERS)
            for key, value in tensors.items():
                prefix = f"model.layers.{own}."
                if not key.startswith(prefix):
                    continue
                rest = key.removeprefix(prefix)
                wide = _widened(rest, value, narrow, is_own=place == 0, generator=generator)
                grown[f"model.layers.{number}.{rest}"] = wide
        save_file(grown, folder / "model.safetensors", metadata={"format": "pt"})
        yield folder


def _widened(name: str, value: torch.Tensor, narrow: int, *, is_own: bool, generator: torch.Generator) -> torch.Tensor:
    shape = [WIDE if size == narrow and "mlp" in name else size for size in value.shape]
    if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight") and not is_own:
        return torch.zeros(shape, dtype=value.dtype)
    if not is_own and value.dim() == 2:
        return (torch.randn(shape, generator=generator) * 0.02).to(value.dtype)
    wide = torch.zeros(shape, dtype=value.dtype)
    wide[tuple(slice(size) for size in value.shape)] = value
    return wide
