"""The cost of holding an answer to a grammar, and the gain of drafting what it forces.

    python -m benchmarks.structured [--rounds 5] [--shape qwen2.5-0.5b] [--tokens 64]

A decode step with a grammar beside one without, in turn, on the built-in model (4,096 tokens) and on random weights of
a real shape, with a vocabulary of as many words as that has ids: masks depend on its size. `schema` is an array
of objects, `string` a long JSON string, in which nearly every token may follow, `regex` letters and blanks. Drawn at
temperature 0.8, which is made cheaper by every token that is forbidden, and greedy, where the cost of the mask alone is
left. `guessed`: tokens a second of the schema with drafts and without. `compile`: a grammar that is new, tried out in
a process of its own and compiled, and one that is known. Results go to benchmarks/results/structured.json.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines import SHAPE, random_engine, random_ids, tiny_engine
from benchmarks.measure import RESULTS, interleaved, machine, paired, parser, save, spread
from benchmarks.oracle import draft_with
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent
from localllm.engine.request import Request, SamplingParams
from localllm.engine.speculative.choice import Speculate
from localllm.gguf.tokenizer import BYTE_ALPHABET
from localllm.models.shapes import find_shape
from localllm.text.grammar.grammar import Grammar

_PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "age", "favourite_colour"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps({"type": "array", "items": _PERSON, "minItems": 500})),
    "string": Grammar("json_schema", json.dumps({"type": "string", "minLength": 5000})),
    "regex": Grammar("regex", "[a-z ]{5000}"),
}
SAMPLERS = {"temperature 0.8": 0.8, "greedy": 0.0}
_CTX = 1024
_SYLLABLES = (
    "th", "er", "on", "an", "re", "he", "in", "ed", "nd", "ha", "at", "en", "es", "of", "or", "nt", "ea", "ti", "to",
    "it", "st", "io", "le", "is", "ou", "ar", "as", "de", "rt", "ve", "ing", "ion", "ent", "tion", "pre", "con",
    "com", "pro", "un", "dis", "able", "ment", "ness", "ly", "al", "ic", "ous", "ful", "str", "ch", "sh", "qu", "ck",
    "ll", "ss", "ee", "oo", "ai", "au", "y", "w", "b", "g", "k", "m", "p",
)  # fmt: skip


def byte_tokenizer(vocab_size: int) -> str:
    """A tokenizer.json of bytes and of words by chance, in the shares that byte-level vocabularies of that size have:
    half of them small letters, most with a blank in front; others capitalised, with signs and digits, or Chinese."""
    choose, char_of = random.Random(0), {value: char for char, value in BYTE_ALPHABET.items()}
    tokens = dict.fromkeys(char_of.values())
    while len(tokens) < vocab_size:
        word = "".join(choose.choices(_SYLLABLES, k=choose.randint(1, 4)))
        kind = choose.random()
        if kind < 0.2:
            word = word.capitalize()
        elif kind < 0.35:
            word += choose.choice("()[]{}.,:;_-=/<>0123456789") + choose.choice(("", word))
        elif kind < 0.5:
            word = "".join(chr(choose.randint(0x4E00, 0x9FFF)) for _ in range(choose.randint(1, 3)))
        text = choose.choice((" ", " ", "")) + word
        tokens["".join(char_of[value] for value in text.encode())] = None
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    description: dict[str, Any] = {"version": "1.0", "model": model, "added_tokens": [], "normalizer": None}
    return json.dumps(description | {"pre_tokenizer": level, "post_processor": None, "decoder": level})


class Steps:
    """The median step of each answer behind a prompt of 64 tokens, by the clock and by the engine's thread alone.

    The thread's time does not count what other programs do meanwhile.
    """

    def __init__(self, engine: Engine, grammar: Grammar | None, num_tokens: int, temperature: float) -> None:
        self._engine = engine
        ignores_end = grammar is None
        sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=num_tokens, ignore_eos=ignores_end)
        self._request = Request(random_ids(64, 4096, 1), sampling, grammar=grammar)
        self.thread_s: list[float] = []

    def answer(self) -> float:
        """Seconds by the clock."""
        self._engine.submit(self._request)
        steps: list[tuple[float, float]] = []
        while self._engine.has_work:
            started, thread_started = time.perf_counter(), time.thread_time()
            events = self._engine.step()
            steps.append((time.perf_counter() - started, time.thread_time() - thread_started))
        finished = events[-1]
        assert isinstance(finished, FinishedEvent)
        if finished.error is not None:
            raise finished.error
        assert finished.usage.completion_tokens == self._request.sampling.max_tokens
        steps = steps[2:]  # the prompt, and the first mask
        self.thread_s.append(median(thread_s for _, thread_s in steps))
        return median(step_s for step_s, _ in steps)


def overheads(engine: Engine, model: str, rounds: int, num_tokens: int) -> Iterator[dict[str, Any]]:
    draft_with(engine, Speculate("off"))
    for sampler, temperature in SAMPLERS.items():
        steps = {
            name: Steps(engine, grammar, num_tokens, temperature)
            for name, grammar in {"plain": None, **GRAMMARS}.items()
        }
        measured = interleaved({name: each.answer for name, each in steps.items()}, rounds)
        thread = {name: each.thread_s[1:] for name, each in steps.items()}  # the first was to warm up
        for name in GRAMMARS:
            row = {
                "model": model,
                "vocabulary": engine.config.vocab_size,
                "sampler": sampler,
                "grammar": name,
                "step_ms": spread([1000 * value for value in measured[name]]),
                "ratio": paired(measured[name], measured["plain"]),
                "plain_thread_ms": spread([1000 * value for value in thread["plain"]]),
                "thread_ms": spread([1000 * value for value in thread[name]]),
                "thread_ratio": paired(thread[name], thread["plain"]),
            }
            shown = f"{row['ratio']} of plain by the clock, {row['thread_ratio']} of {row['plain_thread_ms']} thread ms"
            print(f"{model:13} {sampler:16} {name:7} {shown}", file=sys.stderr)
            yield row


def drafted(engine: Engine, model: str, rounds: int, num_tokens: int) -> dict[str, Any]:
    """Tokens a second of the schema, with drafts of what it forces and without."""

    def tokens_per_s(wish: Speculate) -> float:
        draft_with(engine, wish)
        sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=num_tokens)
        *_, finished = engine.generate(random_ids(64, 4096, 1), sampling, grammar=GRAMMARS["schema"])
        assert isinstance(finished, FinishedEvent) and finished.timings.decode_tok_s is not None
        if finished.speculation is not None:
            passes.append(finished.speculation.tokens_per_pass or 1.0)
        return finished.timings.decode_tok_s

    passes: list[float] = []
    measured = interleaved(
        {"off": lambda: tokens_per_s(Speculate("off")), "ngram": lambda: tokens_per_s(Speculate("ngram"))}, rounds
    )
    row = {
        "model": model,
        "off_tok_s": spread(measured["off"]),
        "ngram_tok_s": spread(measured["ngram"]),
        "speedup": paired(measured["ngram"], measured["off"]),
        "tokens_per_pass": spread(passes),
    }
    print(f"{model:13} drafted {row['speedup']} x, {row['tokens_per_pass']} tokens a pass", file=sys.stderr)
    return row


def compiling(engine: Engine, model: str, rounds: int) -> dict[str, Any]:
    """Milliseconds until a grammar is ready, and the next answer's."""

    def new() -> float:
        schema = {**_PERSON, "description": str(next(numbers))}
        return _ms(lambda: engine.grammars.constraint(Grammar("json_schema", json.dumps(schema))))

    numbers = iter(range(10**6))
    engine.grammars.check(GRAMMARS["schema"])  # the vocabulary, once
    known = GRAMMARS["schema"]
    measured = interleaved({"new": new, "known": lambda: _ms(lambda: engine.grammars.constraint(known))}, rounds)
    row = {"model": model, **{f"{name}_ms": spread(values) for name, values in measured.items()}}
    print(f"{model:13} compiled in {row['new_ms']} ms, known in {row['known_ms']}", file=sys.stderr)
    return row


def _ms(work: Any) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default=SHAPE)
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    options = arguments.parse_args()
    result: dict[str, Any] = {"machine": machine(), "steps": [], "guessed": [], "compile": []}
    tokenizer = byte_tokenizer(find_shape(options.shape).config.vocab_size)
    for model, opened in (
        ("tiny", tiny_engine(512)),
        (options.shape, random_engine(options.shape, _CTX, tokenizer=tokenizer)),
    ):
        with opened as engine:
            result["steps"] += overheads(engine, model, options.rounds, options.tokens)
            result["guessed"].append(drafted(engine, model, options.rounds, options.tokens))
            result["compile"].append(compiling(engine, model, options.rounds))
    print(f"wrote {save('structured', result, options.save)}")


if __name__ == "__main__":
    main()
