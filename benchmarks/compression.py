"""What `--compress` loses: which share of facts is still in a prompt when it has been compressed.

    python -m benchmarks.compression DATA --judge MODEL ... [--answer MODEL]  # docs/internals/quality.md

Facts of two kinds stand somewhere in 3,000 characters of Wikipedia and of the held-out book of tales (DATA: the folder
with wikitext-2 and tales). A needle is a sentence that is foreign to the text, with a question, half of them in other
words. A text's own fact is a word of one of its sentences, asked for by three others of that sentence. A fact survives
if the words of its answer are still there. Baselines: words that leave at random; the parts of a word's worth by
themselves. With --answer, this model answers the questions on needles, from the whole text and from what is kept.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.measure import DOCS, machine, markdown_table, save, write_section
from localllm import hub
from localllm.chat.compression import USUAL, Compressible, Judge, Reading, Weighing, compressible
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, PrefillEvent, TokenEvent
from localllm.engine.request import Request, SamplingParams
from localllm.settings import EngineConfig
from localllm.text.chat_template import ChatInput, encode_chat

RATIOS = (0.7, 0.5, 0.3)
CHARACTERS, APART, FIRST = 3000, 9000, 20_000
OWN_FACTS = 16  # of each text
WEIGHINGS = {
    "random": Weighing(1.0, 0.0, 0.0),  # of random log-probabilities
    "surprise": Weighing(1.0, 0.0, 0.0),
    "contrast": Weighing(0.0, 1.0, 0.0),
    "surprise and contrast": Weighing(shared_words=0.0),
    "shared words": Weighing(0.0, 0.0, 1.0),
    "all, as `--compress` has it": USUAL,
}
BEGIN, END = (
    "<!-- tables: written by `python -m benchmarks.compression` -->",
    "<!-- end of the tables of compression -->",
)
# Fact | answer, and the question below: the first half of them in the fact's own words.
NEEDLES = """
The password of the mill at Oakhurst is silver heron. | silver heron
    What is the password of the mill at Oakhurst?
Doctor Lindqvist keeps the spare key under the third flowerpot. | third flowerpot
    Where does Doctor Lindqvist keep the spare key?
The ferry to Brannoch leaves at 6:45 in the morning. | 6:45
    When does the ferry to Brannoch leave?
Margit's sister paid 380 crowns for the green sailing boat. | 380
    How many crowns did Margit's sister pay for the green sailing boat?
The recipe of the harbour inn asks for exactly eleven cloves. | eleven
    How many cloves does the recipe of the harbour inn ask for?
The expedition buried its instruments beneath a crooked juniper. | crooked juniper
    Beneath what did the expedition bury its instruments?
Captain Orlova named her parrot Bismuth. | Bismuth
    What did Captain Orlova name her parrot?
The committee meets in room 27 of the old customs house. | 27
    In which room of the old customs house does the committee meet?
Tobias repairs clocks for a living, and he lives in Verona. | Verona
    In which town would you find the watchmaker?
A crossing by night costs two buttons of brass. | two buttons
    What does one pay to be rowed over the water after dark?
The eldest of the Marchetti children is allergic to walnuts. | walnuts
    Which food must not be given to the oldest Marchetti child?
Nobody may enter the observatory before the bell has rung twice. | twice
    How often must one hear the ring before going into the building with the telescope?
The annual fair was moved to the ninth of October. | ninth of October
    On what date is the yearly market held now?
Old Henrik lost his left thumb in a sawmill. | thumb
    What part of his body is the old man missing?
The blue ledger lists a debt of 4,150 guilders. | 4,150
    How much money is owed according to the account book?
The engineers blamed the collapse on a rusted bolt. | rusted bolt
    What caused the structure to fall down, in the opinion of the experts?
"""


@dataclass(frozen=True)
class Fact:
    kind: str
    text: str
    question: str
    answer: str

    @property
    def prompt(self) -> Compressible:
        return compressible([{"role": "user", "content": f"{self.text}\n\n{self.question}"}], self.question)

    def is_in(self, text: str) -> bool:
        return f" {self.answer.casefold()}" in f" {' '.join(text.casefold().split())}"


def wikipedia(folder: Path) -> str:
    """The articles without the marks of their tokenizer."""
    text = (folder / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
    text = re.sub(r" @(.)@ ", r"\1", text.replace("<unk>", "thing")).replace(" 's", "'s")
    text = re.sub(r"([(\[]) ", r"\1", re.sub(r" ([,.;:!?)\]])", r"\1", text))
    lines = (line.strip() for line in text.split("\n"))
    return "\n\n".join(line for line in lines if line and not line.startswith("="))


def tales(folder: Path) -> str:
    text = (folder / "tales" / "641.txt").read_text(encoding="utf-8")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip())


def facts(folder: Path) -> Iterator[Fact]:
    for text in (wikipedia(folder), tales(folder)):
        for place, (fact, answer, question) in enumerate(re.findall(r"(.+) \| (.+)\n +(.+)\n", NEEDLES)):
            piece = _piece(text, place)
            ends = [found.end() for found in re.finditer(r"[.] ", piece)]
            at = random.Random(place).choice(ends[1:-1])
            yield Fact("needle", f"{piece[:at]}{fact} {piece[at:]}", question, answer)
        for place in range(OWN_FACTS):
            yield _own_fact(_piece(text, place), random.Random(place))


def _piece(text: str, place: int) -> str:
    """Return whole sentences."""
    begin = text.index(". ", FIRST + place * APART) + 2
    return text[begin : text.index(". ", begin + CHARACTERS) + 1]


def _own_fact(piece: str, choose: random.Random) -> Fact:
    sentences = [each for each in re.split(r"(?<=[.!?]) ", piece) if 8 <= len(each.split()) <= 40]
    choose.shuffle(sentences)
    for sentence in sentences:
        words = sorted(set(re.findall(r"[A-Za-z]{5,}", sentence)))
        rare = [word for word in words if piece.casefold().count(word.casefold()) == 1 and f" {word}" in piece]
        if rare and len(words) >= 4:
            answer = choose.choice(rare)
            asked = choose.sample([word.lower() for word in words if word != answer], 3)
            return Fact("own", piece, f"What does the text say about {asked[0]}, {asked[1]} and {asked[2]}?", answer)
    raise ValueError("no sentence of this text has enough words")


def load(name: str) -> Engine:
    return Engine.load(hub.locate(name), EngineConfig())


def heard(engine: Engine, request: Request) -> tuple[list[float], str]:
    """Return the log-probabilities of a request's prompt, and its answer."""
    logprobs, text = list[float](), ""
    engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, PrefillEvent):
                logprobs += [0.0 if each is None else each.logprob for each in event.logprobs]
            elif isinstance(event, TokenEvent | FinishedEvent):
                text += event.text
    return logprobs, text


def survival(engine: Engine, name: str, given: Sequence[Fact]) -> tuple[list[dict[str, Any]], dict[float, list[str]]]:
    """Return the facts that survive, by how words are weighed, and what is kept as `--compress` has it."""
    judge, choose = Judge(name, engine.tokenizer, engine.ctx), random.Random(0)
    counts: dict[tuple[str, str, float], int] = {}
    kept: dict[float, list[str]] = {ratio: [] for ratio in RATIOS}
    for fact in given:
        prompt = fact.prompt
        read = [(each, heard(engine, _reads(each))[0]) for each in prompt.readings(judge)]
        noise = [(each, [-choose.random() for _ in each.ids]) for each, _ in read]
        for label, weighing in WEIGHINGS.items():
            for ratio in RATIOS:
                source = noise if label == "random" else read
                messages, _ = prompt.compressed(source, ratio, judge, engine.tokenizer, weighing)
                text = messages[0]["content"]
                key = (label, fact.kind, ratio)
                counts[key] = counts.get(key, 0) + fact.is_in(text.removesuffix(fact.question))
                if weighing is USUAL:
                    kept[ratio].append(text)
    rows = [
        {"judge": name, "weighed": a, "kind": b, "ratio": c, "survive": count} for (a, b, c), count in counts.items()
    ]
    return rows, kept


def _reads(reading: Reading) -> Request:
    return Request(reading.ids, prompt_logprobs=0, reads_only=True)


def answers(engine: Engine, given: Sequence[Fact], prompts: Sequence[str]) -> int:
    """Return how many questions on needles are answered right."""
    right = 0
    for fact, prompt in zip(given, prompts, strict=True):
        if fact.kind == "needle":
            chat = ChatInput([{"role": "user", "content": prompt}])
            ids = tuple(encode_chat(engine.template, engine.tokenizer, chat))
            request = Request(ids, SamplingParams(temperature=0, max_tokens=32), opens_turn=True)
            right += fact.is_in(re.sub(r"[\"'“(*]", " ", heard(engine, request)[1]))
    return right


def tables(result: dict[str, Any]) -> str:
    numbers = {kind: result["kinds"].count(kind) for kind in ("needle", "own")}
    counts = {(row["judge"], row["weighed"], row["kind"], row["ratio"]): row["survive"] for row in result["survival"]}
    cases = list(product(numbers, RATIOS))
    rows = [
        [judge, label, *(f"{counts[judge, label, kind, ratio]} of {numbers[kind]}" for kind, ratio in cases)]
        for judge, label in product(result["judges"], WEIGHINGS)
    ]
    named = {"needle": "needles", "own": "own facts"}
    head = ["judge", "worth of a word", *(f"{named[kind]}, {ratio} kept" for kind, ratio in cases)]
    parts = [markdown_table(head, rows, left=2)]
    if result["answers"]:
        head = ["answers of", "judge", "whole prompt", *(f"{ratio} kept" for ratio in RATIOS)]
        rows = [
            [row["model"], row["judge"], *(f"{count} of {numbers['needle']}" for count in row["right"])]
            for row in result["answers"]
        ]
        parts.append(markdown_table(head, rows, left=2))
    return "\n".join(parts)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--judge", action="append", required=True)
    arguments.add_argument("--answer")
    options = arguments.parse_args()
    given = list(facts(options.data))
    result: dict[str, Any] = {"machine": machine(), "kinds": [each.kind for each in given], "judges": []}
    result |= {"survival": [], "answers": []}
    shortened: dict[str, dict[float, list[str]]] = {}
    for model in options.judge:
        rows, shortened[Path(model).stem] = survival(load(model), Path(model).stem, given)
        result["judges"].append(Path(model).stem)
        result["survival"] += rows
    if options.answer is not None:
        engine = load(options.answer)
        whole = answers(engine, given, [str(each.prompt.messages[0]["content"]) for each in given])
        for judge, kept in shortened.items():
            right = [whole, *(answers(engine, given, kept[ratio]) for ratio in RATIOS)]
            result["answers"].append({"model": Path(options.answer).stem, "judge": judge, "right": right})
    print(f"wrote {save('compression', result)}")
    write_section(DOCS / "internals" / "quality.md", BEGIN, END, tables(result))


if __name__ == "__main__":
    main()
