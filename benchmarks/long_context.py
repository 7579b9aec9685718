"""Long contexts on small memory: `python -m benchmarks.long_context`.

A model's shape with random INT4 weights decodes on the CPU, behind pages of random keys and values. Rounds take turns;
medians with their lowest and highest. Results go to benchmarks/results/long_context.json.

offload: a context of four times its memory, the ring for what comes from the disk included. Pages are read at so much
of what an O_DIRECT read of a file reaches in the same round.
choose: the same memory where a token chooses some pages: only those are read. Of random weights each
token and head chooses others, so that few are in memory: trained ones look where they have looked.
attend: steps and attention alone, where a token attends to all pages and where it chooses some (`--attend top:N`).
reuse: the first token behind eight documents in a new order and a question, all computed, and with the documents taken
from an earlier prompt (`--reuse chunks`). Each prompt begins with other text, so that nothing of it is a prefix.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from benchmarks.measure import interleaved, known, machine, paired, parser, save, spread
from localllm.bench.random_model import RandomBlocks, word_tokenizer
from localllm.cache.paged_kv import PagedKV
from localllm.cache.pages import Page
from localllm.config import user_directories
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, Usage
from localllm.engine.loader import LoadedModel
from localllm.engine.prefix_config import NO_REUSE, KVReuse
from localllm.engine.request import Request, SamplingParams
from localllm.engine.step_types import Chunk
from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_paged import AttentionPlace, AttentionRoom, ChoiceRoom
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.kernels.paged_attention import write
from localllm.layers.native_attention import attention_tables
from localllm.layers.segment import Segment
from localllm.models.decoder import Decoder
from localllm.models.load import load_decoder
from localllm.models.shapes import find_shape
from localllm.offload.planner.disk_speed import disk_file
from localllm.quant.recipe import RECIPES

NAME, RECIPE = "tinyllama-1.1b", "int4-g64"
STEPS = 4  # of a round
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, HEAD_TOKENS = 8, 512, 30, range(40, 104)
KEPT_BYTES = 4 << 30  # of pages that the prompts of some twenty rounds leave, 47 MB each


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("what", nargs="*", choices=[*PARTS, []], help="parts to measure; all without any")
    arguments.add_argument("--context", type=int, default=65536, help="offload: tokens")
    arguments.add_argument("--resident-tokens", type=int, default=10240, help="offload: of these, in memory")
    arguments.add_argument("--chosen-pages", type=int, default=64, help="attend: that a token chooses")
    arguments.add_argument("--depth", type=int, default=32768, help="attend: tokens before it")
    options = arguments.parse_args()
    result = {**known("long_context"), "machine": machine(), "shape": NAME}
    decoder = random_decoder()
    for name in options.what or PARTS:
        result[name] = PARTS[name](decoder, options)
        print(name, result[name], flush=True)
    print(f"wrote {save('long_context', result)}")


def random_decoder() -> Decoder:
    config = find_shape(NAME).config
    recipe = RECIPES[RECIPE]
    return load_decoder(RandomBlocks(recipe), config, recipe, dtype=torch.bfloat16, device=torch.device("cpu"))


def engine_of(
    decoder: Decoder,
    ctx: int,
    resident_tokens: int | None = None,
    chosen_pages: int | None = None,
    reuse: KVReuse = NO_REUSE,
) -> Engine:
    tokenizer, loaded = (
        word_tokenizer(decoder.config.vocab_size),
        LoadedModel(decoder, ctx, resident_tokens=resident_tokens),
    )
    return Engine(loaded, tokenizer, kv="int8", reuse=reuse, chosen_pages=chosen_pages)


@contextmanager
def filled(engine: Engine, context: int, *, alike: bool = True) -> Iterator[PagedKV]:
    """Yield a sequence of so many tokens, whose pages hold the same random keys and values: attention to them takes as
    long as to any. alike: else the bytes of the codes differ from page to page, as keys of other tokens do."""
    kv, few = engine.residency.new_kv(context + 4 * PAGE_TOKENS), PagedKV(engine.residency.kv_pages, 2 * PAGE_TOKENS)
    few.prepare(2 * PAGE_TOKENS)
    for layer in range(len(kv.places)):
        layout = kv.layouts_of(layer)[0]
        noise = torch.randn(2, 2 * PAGE_TOKENS, layout.num_kv_heads, layout.head_dim)
        write(few.layer(layer, 0, 2 * PAGE_TOKENS), 0, *noise)
    few.advance(2 * PAGE_TOKENS)
    while kv.length < context:
        begin, end = kv.length, min(kv.length + 512, context)
        kv.prepare(end)
        for index, table in enumerate(kv.tables):
            for number in range(begin // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
                page, source = table[number], few.tables[index][min(number, 1)]
                assert page is not None and source is not None
                page.copy_from(source)
                if not alike and number:
                    _shuffle(page, number)
        kv.advance(end - begin)
    few.close()
    yield kv
    kv.close()


def _shuffle(page: Page, seed: int) -> None:
    """Turn the codes of each head's keys by other numbers of features."""
    generator = torch.Generator().manual_seed(seed)
    keys = page.pool.layout.parts(next(iter(page.parts.values())))[0]
    for layer in keys:
        for head in layer:
            head.copy_(head[torch.randperm(len(head), generator=generator)])


def step_s(engine: Engine, kv: PagedKV, context: int) -> float:
    """Return the seconds of a step of one token behind so many."""
    kv.trim(context)
    ids = torch.randint(0, engine.config.vocab_size, (context + STEPS,)).tolist()
    started = time.perf_counter()
    for count in range(STEPS):
        engine.residency.runner.forward([Chunk(ids[: context + count + 1], kv, 1)])
    return (time.perf_counter() - started) / STEPS


def offload(decoder: Decoder, options: Any) -> dict[str, Any]:
    context, resident = options.context, options.resident_tokens
    engine = engine_of(replace(decoder), context + 256, resident_tokens=resident)
    with filled(engine, context) as kv, disk_file(user_directories().cache, 1 << 30) as file:
        assert file is not None
        group = engine.residency.kv_pages.groups[0]
        page_bytes = len(group.layers) * group.sealed.layout.layer_bytes
        read_bytes = kv.num_spilled * page_bytes
        rounds = interleaved(
            {"step_s": partial(step_s, engine, kv, context), "disk_gbs": file.read_gbs}, options.rounds
        )
        memory = engine.residency.kv_pages.nbytes
    engine.close()
    gbs = [read_bytes / seconds / 1e9 for seconds in rounds["step_s"]]
    return {
        "context": context,
        "resident_tokens": resident,
        "page_bytes_a_step": read_bytes,
        "step_s": spread(rounds["step_s"]),
        "pages_gbs": spread(gbs),
        "disk_gbs": spread(rounds["disk_gbs"]),
        "of_disk": paired(gbs, rounds["disk_gbs"]),
        "memory_of_all_pages": round(memory / (context // PAGE_TOKENS * page_bytes), 3),
    }


def choose(decoder: Decoder, options: Any) -> dict[str, Any]:
    context, resident, engines = options.context, options.resident_tokens, {}
    with ExitStack() as opened:
        for name, pages in (("all", None), ("chosen", options.chosen_pages)):
            engine = engine_of(replace(decoder), context + 256, resident, pages)
            opened.callback(engine.close)
            kv = opened.enter_context(filled(engine, context, alike=False))
            kv.attend_from = context
            engines[name] = engine, kv
        rounds = interleaved(
            {name: partial(step_s, engine, kv, context) for name, (engine, kv) in engines.items()}, options.rounds
        )
        engine, kv = engines["chosen"]
        before = engine.residency.stream_clock.bytes_read
        step_s(engine, kv, context)
        read_bytes = (engine.residency.stream_clock.bytes_read - before) // STEPS
        memory = {name: engine.residency.kv_pages.nbytes for name, (engine, _) in engines.items()}
    return {
        "context": context,
        "resident_tokens": resident,
        "chosen_pages": options.chosen_pages,
        "memory_bytes": memory,
        "read_bytes_a_step": read_bytes,
        "step_s": {name: spread(found) for name, found in rounds.items()},
        "gain": paired(rounds["all"], rounds["chosen"]),
    }


def attend(decoder: Decoder, options: Any) -> dict[str, Any]:
    depth, starts = options.depth, {"all": None, "chosen": options.depth}
    engine = engine_of(decoder, depth + 256, chosen_pages=options.chosen_pages)
    with filled(engine, depth) as kv:

        def step(start: int | None) -> float:
            kv.attend_from = start
            return step_s(engine, kv, depth)

        steps = interleaved({name: partial(step, start) for name, start in starts.items()}, options.rounds)
        kv.trim(depth)
        kv.prepare(depth + 1)
        alone = {name: partial(attention_s, attention_tape(kv, decoder, start)) for name, start in starts.items()}
        attention = interleaved(alone, options.rounds)
        sketches, pages = kv.nbytes, engine.residency.kv_pages.nbytes
    engine.close()
    return {
        "depth": depth,
        "chosen_pages": options.chosen_pages,
        "sketches_of_pages": round(sketches / (pages - sketches), 4),
        "step_s": {name: spread(found) for name, found in steps.items()},
        "step_gain": paired(steps["all"], steps["chosen"]),
        "attention_s": {name: spread(found) for name, found in attention.items()},
        "attention_gain": paired(attention["all"], attention["chosen"]),
    }


def attention_tape(kv: PagedKV, decoder: Decoder, start: int | None) -> Tape:
    """Return the attention of all layers, of one token, with the choice of its pages."""
    kv.attend_from = start
    segment, config = Segment(0, 1, kv, kv.length, rope_length=0), decoder.config.attentions[0]
    choosing = 0 if segment.chooses else None
    H, KH, D = config.num_heads, config.num_kv_heads, config.head_dim
    tables = attention_tables([segment], H, KH, 1, torch.get_num_threads(), choosing=choosing)
    choice = None if tables.chosen is None else ChoiceRoom(tables.chosen, 1, KH)
    room = AttentionRoom(len(tables.tasks), len(tables.merges), tables.num_parts, KH, D, choice)
    room.place(tables)
    q, out, tokens = torch.randn(1, H * D), torch.zeros(1, H * D), torch.tensor(tables.tokens[0])
    places = (AttentionPlace(q, H * D, out, tokens, layer, H, None, None) for layer in range(len(kv.places)))
    options: dict[str, Any] = {"rows": tables.rows, "is_split": tables.is_split}
    return Tape([step for place in places for step in room.steps(best_isa(), kv.layouts, place, **options)])


def attention_s(tape: Tape) -> float:
    """Return the seconds of one run."""
    started = time.perf_counter()
    for _ in range(STEPS):
        tape.run()
    return (time.perf_counter() - started) / STEPS


def reuse(decoder: Decoder, options: Any) -> dict[str, Any]:
    engine = engine_of(replace(decoder), 8192, reuse=KVReuse(ram_bytes=KEPT_BYTES))
    documents = [random_ids(decoder, DOCUMENT_TOKENS, number) for number in range(DOCUMENTS)]
    numbers = itertools.count(DOCUMENTS)
    usages: dict[str, Usage] = {}

    def first_token_s(kind: Literal["prefix", "chunks"]) -> float:
        number = next(numbers)
        choose = random.Random(number)
        own = random_ids(decoder, choose.choice(HEAD_TOKENS) + QUESTION_TOKENS, number)
        ids = [*own[QUESTION_TOKENS:], *itertools.chain(*choose.sample(documents, DOCUMENTS)), *own[:QUESTION_TOKENS]]
        started = time.perf_counter()
        engine.submit(Request(tuple(ids), SamplingParams(max_tokens=1), reuse=kind))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, FinishedEvent):
                    usages[kind] = event.usage
        return time.perf_counter() - started

    kinds: tuple[Literal["prefix", "chunks"], ...] = ("prefix", "chunks")
    rounds = interleaved({kind: partial(first_token_s, kind) for kind in kinds}, options.rounds)
    engine.close()
    return {
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
        "prompt_tokens": usages["chunks"].prompt_tokens,
        "reused_tokens": {kind: usage.reused_tokens for kind, usage in usages.items()},
        "first_token_s": {kind: spread(found) for kind, found in rounds.items()},
        "of_computed": paired(rounds["chunks"], rounds["prefix"]),
    }


def random_ids(decoder: Decoder, count: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(decoder.config.vocab_size) for _ in range(count)]


PARTS = {"offload": offload, "choose": choose, "attend": attend, "reuse": reuse}

if __name__ == "__main__":
    main()
