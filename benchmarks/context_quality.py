"""The loss of what attends to less than all of a long context: perplexity, and facts and passages that are found again.

    python tools/train_tiny.py --tales DIR --write-heldout heldout.txt
    python -m benchmarks.context_quality heldout.txt --of "The Violet Fairy Book" --probe passages
    python -m benchmarks.context_quality wikitext-2/test.txt --of WikiText-2 --model MODEL --ctx 2048 4096 8192
    python -m benchmarks.context_quality TEXT --setting kv=int4 --setting kv_evict=sinks:512,kv=int4 --quick

A window of the text is read as a prompt with nine needles in it, at depths of 10 % to 90 %. What follows is forced on
the model token by token, as an answer is decoded: first the text that comes next, whose perplexity this is, then what
asks for each needle, in a random order. So the retrieval itself is decoding, which is all that some settings change.

facts: a needle says that a name has a number. Behind the cue that repeats it, does the greedy answer have the number;
is it the likeliest of the nine numbers of the window (chance: 1 of 9); how likely are its tokens?
passages: a needle is a passage of elsewhere in the text, which is repeated at the end. How many nats a token does it
cost less than in the same window without needles? Models that are too small to answer can do this.

Every setting reads the same windows. Results are added to results/context_quality.json, one entry for each model and
context, and written to docs/internals/quality.md. Run it on one thread, as `taskset -c 0`: 25 minutes for all of it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import RESULTS, known, machine, markdown_table, save, write_section
from benchmarks.quality import PAGE, Run, compared, cut_windows, increase, standard_error
from localllm.config import accepted, parsed_setting
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, TokenEvent, TokenLogprob
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.request import Request, SamplingParams, TokenMask
from localllm.hub import locate
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.settings import SETTINGS, EngineConfig
from localllm.text.tokenizer import Tokenizer

BEGIN = "<!-- tables: written by `python -m benchmarks.context_quality` -->"
END = "<!-- end of the tables of long contexts -->"
TOKENS_A_CONTEXT = 16384  # of all windows of a context together
TEXT_TOKENS = 256  # behind the prompt, and at most an eighth of the context
ALTERNATIVES = 20  # among which the nine numbers are looked for
SHARES = (8, 4, 2)  # a setting keeps this part of the context
NAMES = ("Agnes", "Clara", "Edmund", "Helena", "Louise", "Miriam", "Oscar", "Victor", "Walter")
FACT, CUE, ANSWER = "\n\nThe secret number of {} is {}.\n\n", "\n\nThe secret number of {} is", " {}"
PASSAGE_TOKENS, PASSAGE_CUE = 16, 4
PROBES = ("facts", "passages")
COLUMNS, PASSAGE_COLUMNS = ("perplexity", "increase", "same top-1"), ("gain of a passage", "change")

Fields = Mapping[str, object]  # of EngineConfig


@dataclass(frozen=True)
class Probe:
    """What is forced to ask for a needle. The tokens [begin, end) are the answer. rivals: first tokens of the answers
    to all probes of a window; none where answers are not chosen among."""

    ids: Sequence[int]
    begin: int
    end: int
    rivals: frozenset[int] = frozenset()

    def scores(self, read: Sequence[TokenLogprob]) -> dict[str, float]:
        answer = read[self.begin : self.end]
        first = {each.token_id: each.logprob for each in answer[0].top}
        best = max(self.rivals, key=lambda rival: first.get(rival, -math.inf), default=None)
        return {
            "found": float(all(each.top[0].token_id == each.token_id for each in answer)),
            "likeliest": float(best == answer[0].token_id and best in first),
            "logprob": fmean(each.logprob for each in answer),
        }


@dataclass(frozen=True)
class Window:
    """prompt: with the needles. text: what comes next. probes: of the needles by their depths. order: in which they
    follow one another. is_control: no needles are there."""

    prompt: Sequence[int]
    text: Sequence[int]
    probes: Sequence[Probe]
    order: Sequence[int]
    is_control: bool = False

    @property
    def forced(self) -> list[int]:
        return [*self.text, *(token for number in self.order for token in self.probes[number].ids)]

    def scores(self, read: Sequence[TokenLogprob]) -> list[dict[str, float]]:
        """Return what is found of each needle, by depth."""
        found: dict[int, dict[str, float]] = {}
        begin = len(self.text)
        for number in self.order:
            end = begin + len(self.probes[number].ids)
            found[number] = self.probes[number].scores(read[begin:end])
            begin = end
        return [found[number] for number in range(len(self.probes))]


def facts(tokenizer: Tokenizer, choose: random.Random, count: int = len(NAMES)) -> tuple[list[list[int]], list[Probe]]:
    """Return so many needles, nine at most, and their probes."""
    names, numbers = choose.sample(NAMES, count), secret_numbers(choose, count)
    needles = [tokenizer.encode(FACT.format(*pair)) for pair in zip(names, numbers, strict=True)]
    return needles, number_probes(tokenizer, names, numbers)


def secret_numbers(choose: random.Random, count: int) -> list[str]:
    """Return numbers that begin with different digits."""
    return [f"{digit}{choose.randrange(10000):04}" for digit in choose.sample(range(1, 10), count)]


def number_probes(tokenizer: Tokenizer, owners: Sequence[str], numbers: Sequence[str]) -> list[Probe]:
    """Return what asks for the number of each owner."""
    probes = []
    for owner, number in zip(owners, numbers, strict=True):
        answers = {each: tokenizer.encode(CUE.format(owner) + ANSWER.format(each)) for each in numbers}
        begin = next(n for n, column in enumerate(zip(*answers.values(), strict=False)) if len({*column}) > 1)
        rivals = frozenset(ids[begin] for ids in answers.values())
        assert len(rivals) == len(numbers), "the first tokens of the numbers differ"
        probes.append(Probe(answers[number], begin, len(answers[number]), rivals))
    return probes


def passages(
    text: Sequence[int], choose: random.Random, count: int = len(NAMES)
) -> tuple[list[list[int]], list[Probe]]:
    """Return passages of a text as needles, and probes that repeat them."""
    begins = [choose.randrange(len(text) - PASSAGE_TOKENS) for _ in range(count)]
    needles = [list(text[begin : begin + PASSAGE_TOKENS]) for begin in begins]
    return needles, [Probe(needle, PASSAGE_CUE, PASSAGE_TOKENS) for needle in needles]


def make_windows(tokenizer: Tokenizer, text: str, probe: str, ctx: int, count: int) -> list[Window]:
    ids, made = tokenizer.encode(text), []
    for number, window in enumerate(cut_windows(ids, ctx, count)):
        choose = random.Random(number)
        needles, probes = facts(tokenizer, choose) if probe == "facts" else passages(ids, choose)
        num_text = min(TEXT_TOKENS, ctx // 8)
        num_probed = sum(len(each.ids) for each in probes)
        hay = window[: ctx - num_text - num_probed - sum(map(len, needles))]
        order = choose.sample(range(len(probes)), len(probes))
        behind = window[len(hay) : len(hay) + num_text], probes, order
        made.append(Window(hidden(needles, hay), *behind))
        if probe == "passages":
            made.append(Window(hay, *behind, is_control=True))
    return made


def hidden(needles: Sequence[Sequence[int]], hay: Sequence[int]) -> list[int]:
    """Return the hay with the needles in it, evenly spread."""
    borders = [len(hay) * n // (len(needles) + 1) for n in range(len(needles) + 2)]
    made = [*hay[: borders[1]]]
    for needle, begin, end in zip(needles, borders[1:], borders[2:], strict=False):
        made += [*needle, *hay[begin:end]]
    return made


def forced(engine: Engine, windows: Sequence[Window]) -> list[list[TokenLogprob]]:
    """Answer all windows at once, each with what is forced; return the log-probabilities of every token of that.

    Raises what a request ended with.
    """
    read: dict[int, list[TokenLogprob]] = {}
    for window in windows:
        ids = window.forced
        sampling = SamplingParams(temperature=0, logprobs=ALTERNATIVES, max_tokens=len(ids), ignore_eos=True)
        mask = only(ids, engine.config.vocab_size)
        read[engine.submit(Request(tuple(window.prompt), sampling, mask=mask))] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.logprob is not None:
                read[event.request_id].append(event.logprob)
            elif isinstance(event, FinishedEvent) and event.error is not None:
                raise event.error
    return list(read.values())


def only(ids: Sequence[int], vocab_size: int) -> TokenMask:
    """Return the mask of an answer that has these tokens."""

    def mask(token_ids: Sequence[int]) -> Tensor:
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[ids[len(token_ids)]] = True
        return allowed

    return mask


@dataclass(frozen=True)
class Reading:
    """What a setting makes of all windows. surprises: -log p of each token of the texts; best: the likeliest ones.
    scores: of each window, by depth."""

    surprises: Tensor
    best: Tensor
    scores: Sequence[Sequence[Mapping[str, float]]]
    seconds: float

    @classmethod
    def of(cls, model: str, ctx: int, fields: Fields, windows: Sequence[Window]) -> Reading:
        config = EngineConfig(**{"ctx": ctx, "speculate": "off", **fields})  # type: ignore[arg-type]
        with closing(Engine.load(model, config, reuse=NO_REUSE)) as engine:
            return cls.by(engine, windows)

    @classmethod
    def by(cls, engine: Engine, windows: Sequence[Window]) -> Reading:
        began = time.perf_counter()
        read = forced(engine, windows)
        seconds = time.perf_counter() - began
        texts = [each for window, tokens in zip(windows, read, strict=True) for each in tokens[: len(window.text)]]
        scores = [window.scores(tokens) for window, tokens in zip(windows, read, strict=True)]
        surprises = -torch.tensor([each.logprob for each in texts], dtype=torch.float64)
        return cls(surprises, torch.tensor([each.top[0].token_id for each in texts]), scores, seconds)

    def result(self, base: Reading, windows: Sequence[Window]) -> dict[str, object]:
        same = float((self.best == base.best).double().mean())
        found = compared(self.surprises, base.surprises) | {"top1_percent": 100 * same, "seconds": self.seconds}
        if any(window.is_control for window in windows):
            change = self.gains() - base.gains()
            by_depth = {"gain": self.gains().mean(0).tolist()}
            found |= {"gain_change": change.mean().item(), "gain_change_error": standard_error(change)}
            return found | {"gain": fmean(by_depth["gain"]), "by_depth": by_depth}
        depths = list(zip(*self.scores, strict=True))
        by_depth = {kind: [fmean(each[kind] for each in depth) for depth in depths] for kind in depths[0][0]}
        return found | {kind: fmean(values) for kind, values in by_depth.items()} | {"by_depth": by_depth}

    def gains(self) -> Tensor:
        """Return by how many nats a token each passage costs less where needles are there [windows, depths]."""
        logprobs = torch.tensor([[each["logprob"] for each in window] for window in self.scores])
        return logprobs[::2] - logprobs[1::2]


def default_settings(ctx: int) -> Iterator[Fields]:
    """Yield three settings of each kind, which keep as many tokens."""
    for tokens in (ctx // share for share in SHARES):
        yield {"attend": f"top:{tokens // PAGE_TOKENS}"}
    for tokens in (ctx // share for share in SHARES):
        yield {"kv_evict": f"sinks:{tokens}"}
    least = SETTINGS["kv_evict"].accepts.numbered["heavy"]
    for tokens in (ctx // share for share in SHARES):
        yield {"kv_evict": f"heavy:{max(tokens, least)}"}


def measured(model: str, ctx: int, windows: Sequence[Window], settings: Sequence[Fields]) -> Iterator[Run]:
    """Yield a row for all of the context, and one for each setting. Raises what loading does for one that the model
    cannot have."""
    base = Reading.of(model, ctx, {}, windows)
    yield {"setting": {}, **base.result(base, windows)}
    for fields in settings:
        yield {"setting": fields, **Reading.of(model, ctx, fields, windows).result(base, windows)}


# The tables of docs/internals/quality.md


def tables(result: Mapping[str, Any]) -> str:
    return "\n".join(_table(run) for _, run in sorted(result["runs"].items(), key=lambda item: _order(item[1])))


def _order(run: Run) -> tuple[bool, str, int]:
    return run["probe"] == "facts", run["model"], run["ctx"]


def _table(run: Run) -> str:
    is_facts = run["probe"] == "facts"
    asked_for = ["number found", "likeliest of 9", "log-probability"] if is_facts else PASSAGE_COLUMNS
    head = ["setting", *COLUMNS, *asked_for]
    rows = [[shown(row["setting"]), *cells(row, is_base=not row["setting"])] for row in run["rows"]]
    about = f"{run['text']}: {run['predicted_tokens']:,} tokens"
    asked = f"{run['needles']} facts; chance: 0 % and 11 %" if is_facts else f"{run['needles']} passages"
    return f"### {run['model']}, {run['ctx']:,} tokens\n\n{about}, {asked}.\n\n{markdown_table(head, rows)}"


def cells(row: Run, *, is_base: bool) -> list[str]:
    """Return what columns show of a row, but for its setting. is_base: the others are compared with it."""
    own = [f"{row['perplexity']:.3f}", "" if is_base else increase(row)]
    own += ["" if is_base else f"{row['top1_percent']:.1f} %"]
    if "gain" not in row:
        return own + [f"{100 * row[kind]:.0f} %" for kind in ("found", "likeliest")] + [f"{row['logprob']:.2f}"]
    change = f"{row['gain_change']:+.3f} (±{row['gain_change_error']:.3f})"
    return [*own, f"{row['gain']:.3f}", "" if is_base else change]


def shown(fields: Fields) -> str:
    return " ".join(f"`--{name.replace('_', '-')} {value}`" for name, value in fields.items()) or "all of it"


def parsed_fields(text: str) -> Fields:
    pairs = (each.partition("=") for each in text.split(","))
    return {name: accepted(name, parsed_setting(name, value), "--setting") for name, _, value in pairs}


def main() -> None:
    options = parser(__doc__, TOKENS_A_CONTEXT)
    options.add_argument("--ctx", type=int, nargs="+", default=[1024])
    options.add_argument("--setting", type=parsed_fields, action="append", default=[], help="FIELD=VALUE,...")
    given = options.parse_args()
    runs = (_run(given, ctx) for ctx in given.ctx if given.text)
    named = ((f"{run['model']} {run['ctx']}", run) for run in runs)
    record("context_quality", given, named, tables, (BEGIN, END))


def _run(given: argparse.Namespace, ctx: int) -> Run:
    tokenizer, text, count = inputs(given, ctx)
    windows = make_windows(tokenizer, text, given.probe, ctx, count)
    rows = measured(given.model, ctx, windows, given.setting or [*default_settings(ctx)])
    return result_of(given, windows, rows, ctx=ctx)


# What benchmarks.chunk_quality does as well


def parser(description: str | None, num_tokens: int, probes: Sequence[str] = PROBES) -> argparse.ArgumentParser:
    """num_tokens: of all windows of a context together, where their number is not given."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("text", type=Path, nargs="?", help="without it, only the tables are written anew")
    made.add_argument("--of", help="the text's name (default: the file's)")
    made.add_argument("--model", default="tiny")
    made.add_argument("--probe", choices=probes, default="facts")
    made.add_argument("--windows", type=int, help=f"(default: as many as have {num_tokens:,} tokens)")
    made.add_argument("--quick", action="store_true", help="one window, and nothing is written")
    made.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    made.set_defaults(num_tokens=num_tokens)
    return made


def inputs(given: argparse.Namespace, ctx: int) -> tuple[Tokenizer, str, int]:
    """Return the model's tokenizer, the text, and how many windows of it are wanted."""
    count = 1 if given.quick else given.windows or max(given.num_tokens // ctx, 1)
    return Tokenizer.load(locate(given.model).directory), given.text.read_text(encoding="utf-8"), count


def result_of(given: argparse.Namespace, windows: Sequence[Window], rows: Iterable[Run], **more: object) -> Run:
    """Return what is saved of a run. more: what tells it from others of its model."""
    found = []
    for row in rows:
        found.append(row)
        print({key: value for key, value in row.items() if key != "by_depth"}, flush=True)
    return {
        "model": Path(locate(given.model).name).name.removesuffix(".gguf"),
        "text": given.of or given.text.stem,
        **more,
        "probe": given.probe,
        "predicted_tokens": sum(len(window.text) for window in windows),
        "needles": sum(len(window.probes) for window in windows if not window.is_control),
        "rows": found,
    }


def record(
    name: str,
    given: argparse.Namespace,
    runs: Iterable[tuple[str, Run]],
    tables: Callable[[Mapping[str, Any]], str],
    markers: tuple[str, str],
) -> None:
    """Save each run with those that are known, by its key, and write the tables of all of them to the page."""
    result = known(name, given.save) or {"schema_version": 1, "runs": {}}
    for key, run in runs:
        result["runs"][key] = run
        if not given.quick:
            save(name, result | {"machine": machine()}, given.save)
    print(tables(result))
    if not given.quick and given.save == RESULTS:
        write_section(PAGE, *markers, tables(result))


if __name__ == "__main__":
    main()
