"""What guessing costs where it gives nothing: text that nobody can guess, guesses that are always wrong, and text that
changes from what is guessed easily to what is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.measure import spread
from benchmarks.oracle import Oracle
from benchmarks.speculation_engine import CTX, guess, ids, random_engine, run, stream
from localllm.engine.engine import Engine
from localllm.engine.prefix_config import NO_REUSE
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.config import OFF, Speculate
from localllm.engine.speculative.drafter import Draft


class Wrong:
    """Always offers, and never what comes."""

    name = "wrong"

    def __init__(self, streams: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        self._oracle = Oracle(streams, 0.0, vocab_size)

    def read(self, _sequences: Sequence[Running]) -> None:
        """It needs no text."""

    def offers(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[Draft]:
        return [replace(offer, source="ngram-16") for offer in self._oracle.offers(sequences, limits)]

    def hindsight(self, sequence: Running, since: int, limit: int) -> Iterator[tuple[Draft, Sequence[int]]]:
        token_ids = sequence.token_ids
        for end in range(max(since, len(token_ids) - 8), len(token_ids)):
            yield Draft(((token_ids[end] + 1) % 1000,), "ngram-16"), token_ids[end : end + limit]

    def forget(self, _sequence: Running) -> None:
        """It keeps nothing."""


def never(rounds: int, shape: str) -> dict[str, Any]:
    rows = []
    with random_engine(shape) as engine:
        rows += _never_rows(engine, f"{shape} resident", rounds, 192)
        stream(engine, lambda name: name.split(".")[1] in ("6", "7", "8", "9", "10", "11", "12", "13"))
        rows += _never_rows(engine, f"{shape} streamed", rounds, 64)
    engine = Engine.load("tiny", device="cpu", weights="int4", ctx=CTX, reuse=NO_REUSE, speculate=OFF)
    rows += _never_rows(engine, "tiny resident", rounds, 400)
    stream(engine, lambda name: name.split(".")[1] in ("5", "6", "7"))
    rows += _never_rows(engine, "tiny streamed", 4 * rounds, 200)  # of half a second, in which the disk is not as fast
    engine.close()
    return {"rows": rows}


def _never_rows(engine: Engine, placement: str, rounds: int, num_tokens: int) -> list[dict[str, Any]]:
    """Three engines in one: plain, guessing, and plain once more, whose ratio is what the machine's noise is."""
    vocab_size, rows = engine.config.vocab_size, []
    random_text = ids(128, vocab_size, 2)
    half = ids(24, vocab_size, 3)
    texts: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "random": (random_text, {"temperature": 3.0, "seed": 1}),
        "wrong": (random_text, {"temperature": 0}),
        "switching": ((*half * 3, *random_text, *half), {"temperature": 1.0, "seed": 2}),
    }
    for text, (prompt, sampling) in texts.items():
        guess(engine, OFF)
        expected = run(engine, prompt, num_tokens, **sampling).token_ids
        stream_ids = {prompt: (*prompt, *expected)}
        for who in ("auto", "ngram", "skip") if text != "wrong" else ("wrong",):
            guess(engine, OFF)
            plain_one = engine.speculation
            lookup = Wrong(stream_ids, vocab_size) if who == "wrong" else None
            guess(engine, Speculate("ngram" if who == "wrong" else who), lookup)
            guessing = engine.speculation
            run(engine, prompt, num_tokens, **sampling)  # warm
            ratios: list[float] = []
            noise: list[float] = []
            for number in range(2 * rounds):
                seconds = []
                for each in (plain_one, guessing, plain_one) if number % 2 else (plain_one, plain_one, guessing):
                    engine.speculation = each
                    found = run(engine, prompt, num_tokens, **sampling)
                    assert found.token_ids == expected
                    seconds.append((each, found.seconds))
                first, second = [s for each, s in seconds if each is plain_one]
                (own,) = [s for each, s in seconds if each is guessing]
                ratios.append((first + second) / 2 / own)
                noise.append(first / second)
            row = {"placement": placement, "text": text, "who": who, "of_plain": spread(ratios), "noise": spread(noise)}
            print(f"{placement:24} {text:10} {who:6} {row['of_plain']} of plain, plain of plain {row['noise']}")
            rows.append(row)
    return rows
