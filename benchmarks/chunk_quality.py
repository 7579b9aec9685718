"""The loss of documents that are taken from elsewhere (`--reuse chunks`): perplexity and needles behind them.

    python tools/train_tiny.py --tales DIR --write-heldout heldout.txt
    python -m benchmarks.chunk_quality heldout.txt --of "The Violet Fairy Book" --probe passages
    python -m benchmarks.chunk_quality wikitext-2/test.txt --of WikiText-2 --model MODEL --ctx 4096 --tokens 512
    python -m benchmarks.chunk_quality wikitext-2/test.txt --model MODEL --ctx 4096 --tokens 512 --probe chains

An earlier prompt has documents, which are pieces of a text, each with a needle at a random place in it. A second prompt
begins with other text, so that nothing of it is a prefix, and has the same documents in another order. What follows is
forced on the model: first what comes next in the text behind the last document, whose perplexity this is, then what
asks for each needle, as in benchmarks.context_quality. The first row computes all of the second prompt; the others take
the documents from the earlier one, but for a share of their tokens, which is computed anew: at least so many of each.

chains: the documents of the second prompt follow one another in the text, and each question needs a fact of two of
them. The other probes take documents that have nothing to do with each other.

Windows do not overlap, and all rows read the same. Results are added to results/chunk_quality.json, one entry for each
model and length of documents, and written to docs/internals/quality.md. Run it on one thread, as `taskset -c 0`: ten
minutes for all of it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from benchmarks.context_quality import (
    COLUMNS,
    FACT,
    NAMES,
    PASSAGE_COLUMNS,
    PASSAGE_TOKENS,
    PROBES,
    Probe,
    Reading,
    Window,
    cells,
    facts,
    inputs,
    number_probes,
    parser,
    passages,
    record,
    result_of,
    secret_numbers,
)
from benchmarks.measure import markdown_table
from benchmarks.quality import Run, cut_windows
from localllm.cache.moved_pages import COMPUTED_SHARE
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, Usage
from localllm.engine.prefix_config import KVReuse
from localllm.engine.request import Request, SamplingParams
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.settings import EngineConfig
from localllm.text.tokenizer import Tokenizer

BEGIN = "<!-- tables: written by `python -m benchmarks.chunk_quality` -->"
END = "<!-- end of the tables of documents taken from elsewhere -->"
SHARES = (COMPUTED_SHARE, 0.1, 0.3)
TOKENS = 49152  # of all windows together
ROOM = 4 << 30  # bytes, for the pages of all windows
CITIES = ("Berlin", "Boston", "Chicago", "Dublin", "London", "Madrid", "Paris", "Rome", "Vienna")
LIVES, OF_CITY = "\n\n{} lives in {}.\n\n", "the city in which {} lives"
HEADS = range(PAGE_TOKENS, 2 * PAGE_TOKENS)  # tokens in front of the documents: their places in pages are by chance


@dataclass(frozen=True, kw_only=True)
class Moved(Window):
    """source: the earlier prompt. num_taken: the tokens of documents, which could be taken from it."""

    source: Sequence[int]
    num_documents: int
    num_taken: int


def make_windows(tokenizer: Tokenizer, text: str, probe: str, ctx: int, num_tokens: int, count: int) -> list[Moved]:
    """Return windows with as many documents of so many tokens as they have room for, nine at most.

    Raises ValueError where the text is too short for so many windows.
    """
    ids, made = tokenizer.encode(text), []
    num_text, num_asked = min(256, ctx // 16), PASSAGE_TOKENS if probe == "passages" else 32
    num_documents = min((ctx - num_text - max(HEADS)) // (num_tokens + num_asked), len(NAMES))
    is_joint = probe == "chains"
    num_documents -= num_documents % 2 if is_joint else 0
    num_piece = num_tokens * (num_documents if is_joint else 1) + num_text
    pieces = random.Random(0).sample(cut_windows(ids, num_piece, None), count * (2 if is_joint else num_documents + 1))
    for number in range(count):
        choose = random.Random(number)
        spare, *own = pieces[number::count]
        if is_joint:
            own = [own[0][n * num_tokens : (n + 1) * num_tokens + num_text] for n in range(num_documents)]
        needles, probes = needles_of(probe, tokenizer, ids, choose, num_documents)
        heads = spare[: choose.choice(HEADS)], spare[-choose.choice(HEADS) :]
        source, prompt = (choose.sample(range(num_documents), num_documents) for _ in range(2))
        prompt = sorted(prompt) if is_joint else prompt
        asked = choose.sample(range(len(probes)), len(probes))
        bodies = [piece[len(needle) : num_tokens] for piece, needle in zip(own, needles, strict=True)]
        full = [with_needle(*each, choose.random()) for each in zip(bodies, needles, strict=True)]
        for documents in (full, bodies)[: 1 + (probe == "passages")]:
            texts = [
                [*head, *chain.from_iterable(documents[each] for each in order)]
                for head, order in zip(heads, (source, prompt), strict=True)
            ]
            behind, taken = own[prompt[-1]][num_tokens:], sum(map(len, documents))
            more: dict[str, Any] = {"source": texts[0], "num_documents": num_documents, "num_taken": taken}
            made.append(Moved(texts[1], behind, probes, asked, documents is bodies, **more))
    return made


def needles_of(
    probe: str, tokenizer: Tokenizer, text: Sequence[int], choose: random.Random, count: int
) -> tuple[list[list[int]], list[Probe]]:
    """Return so many needles, and what asks for them."""
    if probe == "passages":
        return passages(text, choose, count)
    return (chains if probe == "chains" else facts)(tokenizer, choose, count)


def chains(tokenizer: Tokenizer, choose: random.Random, count: int) -> tuple[list[list[int]], list[Probe]]:
    """Return needles that say where somebody lives or which number a city has, and probes that need two of them."""
    names, cities = (choose.sample(each, count // 2) for each in (NAMES, CITIES))
    numbers = secret_numbers(choose, count // 2)
    told = [*map(LIVES.format, names, cities), *map(FACT.format, cities, numbers)]
    owners = [OF_CITY.format(name) for name in names]
    return list(map(tokenizer.encode, choose.sample(told, count))), number_probes(tokenizer, owners, numbers)


def with_needle(body: Sequence[int], needle: Sequence[int], place: float) -> list[int]:
    at = int(place * len(body))
    return [*body[:at], *needle, *body[at:]]


def usages(engine: Engine, requests: Sequence[Request]) -> list[Usage]:
    """Answer all of them; raises what one ended with."""
    found = {engine.submit(request): Usage() for request in requests}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                if event.error is not None:
                    raise event.error
                found[event.request_id] = event.usage
    return list(found.values())


def reading(model: str, ctx: int, windows: Sequence[Moved], share: float | None) -> tuple[Reading, float]:
    """Return what follows the documents, and which share of them was computed. share: at least; None: all of them."""
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    reuse = KVReuse(ram_bytes=ROOM) if share is None else KVReuse(ram_bytes=ROOM, computed_share=share)
    config = EngineConfig(ctx=ctx, speculate="off", reuse="prefix" if share is None else "chunks")
    with closing(Engine.load(model, config, reuse=reuse)) as engine:
        if share is not None:
            usages(engine, [Request(tuple(each.source), one, reuse="prefix") for each in windows])
        found = usages(engine, [Request(tuple(each.prompt), one) for each in windows])
        reused = sum(each.reused_tokens for each in found) / sum(each.num_taken for each in windows)
        return Reading.by(engine, windows), 1 - reused


def measured(model: str, ctx: int, windows: Sequence[Moved]) -> Iterator[Run]:
    """Yield a row for all of the prompt computed, and one for each share."""
    base, computed = reading(model, ctx, windows, None)
    yield {"share": None, "computed": computed, **base.result(base, windows)}
    for share in SHARES:
        own, computed = reading(model, ctx, windows, share)
        yield {"share": share, "computed": computed, **own.result(base, windows)}


def tables(result: Mapping[str, Any]) -> str:
    runs = sorted(
        result["runs"].values(),
        key=lambda run: (run["probe"] != "passages", run["tokens"], run["probe"] == "chains", run["model"]),
    )
    return "\n".join(map(_table, runs))


def _table(run: Run) -> str:
    is_facts, documents = run["probe"] != "passages", run["documents"]
    number = documents // 2 if run["probe"] == "chains" else documents
    asked_for = ["number found", f"likeliest of {number}", "log-probability"] if is_facts else PASSAGE_COLUMNS
    rows = []
    for row in run["rows"]:
        share = "all of it" if row["share"] is None else f"{row['share']:g}"
        rows.append([share, f"{100 * row['computed']:.0f} %", *cells(row, is_base=row["share"] is None)])
    head = ["share, at least", "computed", *COLUMNS, *asked_for]
    about = f"{run['text']}: {run['predicted_tokens']:,} tokens behind {documents} documents of {run['tokens']}"
    asked = f"{run['needles']} {run['probe']}" + (f"; chance: 0 % and {100 / number:.0f} %" if is_facts else "")
    return f"### {_title(run)}\n\n{about}, {asked}.\n\n{markdown_table(head, rows)}"


def _title(run: Run) -> str:
    return f"{run['model']}, documents of {run['tokens']}" + (", put together" if run["probe"] == "chains" else "")


def main() -> None:
    options = parser(__doc__, TOKENS, (*PROBES, "chains"))
    options.add_argument("--ctx", type=int, default=1024)
    options.add_argument("--tokens", type=int, default=192, help="of a document")
    given = options.parse_args()
    runs = [_run(given)] if given.text else []
    named = ((f"{run['model']} {run['ctx']} {run['tokens']} {run['probe']}", run) for run in runs)
    record("chunk_quality", given, named, tables, (BEGIN, END))


def _run(given: argparse.Namespace) -> Run:
    tokenizer, text, count = inputs(given, given.ctx)
    windows = make_windows(tokenizer, text, given.probe, given.ctx, given.tokens, count)
    rows = measured(given.model, given.ctx, windows)
    return result_of(given, windows, rows, ctx=given.ctx, tokens=given.tokens, documents=windows[0].num_documents)


if __name__ == "__main__":
    main()
