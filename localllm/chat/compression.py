"""A prompt with less context: what of its messages may leave, what a judge is asked to read of it, and what has left.

The judge is a small model. It reads the context twice: as it is, and behind the question (LongLLMLingua,
arXiv:2310.06839). Asks no engine itself: its caller has the judge read.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from localllm.text.compression import Judged, Word, is_telling, leaving, tokens_of, without, words_of
from localllm.text.eviction import Message

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer

LOWEST, HIGHEST = 0.01, 0.99  # of what is kept
_WORTH = 0.1  # of a text: what is left of less says little
_WINDOW = 2048  # tokens that the judge reads at once: attention to more costs more than it tells
_OVERLAP = 64  # of them were scored with the window before
_QUESTION_SHARE = 4  # a quarter of a window may be the question
_LEAST_QUESTION, _MOST_QUESTION = 3, 100  # words
_PARAGRAPH, _SENTENCE = re.compile(r"\n[ \t]*\n\s*"), re.compile(r"""[.!?][\"')\]]*\s+|[。！？]\s*""")
_STEM = 5  # letters: "charges" and "charged" are one word
_LEAST_STEM = 4


@dataclass(frozen=True)
class Weighing:
    """How much each sign counts that a text matters, all in nats: a token's surprise, how much likelier the question
    makes it, and the rarity of a word of the question in the sentence that has it.

    Surprise finds what is foreign to a text, and shared words what is its own: benchmarks.compression.
    """

    surprise: float = 1.0
    contrast: float = 3.0
    shared_words: float = 3.0


USUAL = Weighing()


@dataclass(frozen=True)
class Compression:
    """What has left, in runs of words. Tokens are the answering model's, of the text that may leave."""

    judge: str
    ratio: float
    tokens_before: int
    tokens_after: int
    removed: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "removed": list(self.removed)}


@dataclass(frozen=True)
class Passage:
    """The text of a message, by the message's place, and the words of it that may leave."""

    message: int
    text: str
    words: Sequence[Word]

    def costs(self, tokenizer: Tokenizer) -> list[float]:
        """Return each word's tokens; words that share one have a part of it each."""
        inside = list(tokens_of(self.words, tokenizer.encode_spans(self.text)[1]))
        sharers = Counter(chain.from_iterable(inside))
        return [sum(1 / sharers[token] for token in tokens) for tokens in inside]

    def worths(
        self, judge: Tokenizer, alone: Sequence[float], asked: Sequence[float], weighing: Weighing
    ) -> list[float]:
        """Return how much a token of each word says.

        alone, asked: the log-probabilities of the judge's tokens without the question and behind it.
        """
        spans = judge.encode_spans(self.text)[1]
        pairs = zip(alone, asked, strict=True)
        each = [weighing.contrast * (behind - before) - weighing.surprise * before for before, behind in pairs]
        blank = [self.text[begin:end].isspace() for begin, end in spans]
        inside = ([each[token] for token in tokens if not blank[token]] for tokens in tokens_of(self.words, spans))
        return [sum(found) / len(found) if found else 0.0 for found in inside]

    def shared_with(self, question: str) -> dict[int, float]:
        """Return what sentences are worth for the question's words that they have: the rarer, the more."""
        asked = set(map(_stem, question.split())) - {""}
        stems: dict[int, set[str]] = defaultdict(set)
        for word in self.words:
            stems[word.sentence] |= {_stem(self.text[word.begin : word.end])} & asked
        rarity = {
            stem: math.log(1 + len(stems) / sum(stem in each for each in stems.values()))
            for each in stems.values()
            for stem in each
        }
        return {number: sum(rarity[stem] for stem in each) for number, each in stems.items()}

    def runs(self, places: Collection[int]) -> list[str]:
        """Return the texts of these words, those that stand together as one."""
        found: list[str] = []
        before = -2
        for place in sorted(places):
            word = self.words[place]
            text = self.text[word.begin : word.end]
            is_next = place == before + 1 and self.words[before].end == word.begin
            if is_next:
                found[-1] += text
            else:
                found.append(text.lstrip())
            before = place
        return found


@dataclass(frozen=True)
class Judge:
    """The small model that reads."""

    name: str
    tokenizer: Tokenizer
    ctx: int


@dataclass(frozen=True)
class Reading:
    """What the judge reads at once. of: the passage, by its place. The last `num_scored` ids count."""

    ids: tuple[int, ...]
    of: int
    has_question: bool
    num_scored: int


JudgeRead = Sequence[tuple[Reading, Sequence[float]]]  # with the log-probabilities of its ids


@dataclass(frozen=True)
class Compressible:
    """A conversation, and what of it may leave."""

    messages: Sequence[Message]
    passages: tuple[Passage, ...]
    question: str

    def cost(self, tokenizer: Tokenizer) -> float:
        """Return the tokens of all that may leave."""
        return sum(sum(passage.costs(tokenizer)) for passage in self.passages)

    def readings(self, judge: Judge) -> Iterator[Reading]:
        """Yield what the judge reads: all passages as they are, and behind the question, in windows of its context."""
        window, tokenizer = min(judge.ctx - 1, _WINDOW), judge.tokenizer
        asked = tokenizer.encode(f"{self.question}\n\n")[-(window // _QUESTION_SHARE) :]
        for of, passage in enumerate(self.passages):
            ids, _ = tokenizer.encode_spans(passage.text)
            for has_question, opening in ((False, tokenizer.encode("\n\n")), (True, asked)):
                head, begin = tokenizer.with_bos(opening), 0
                while begin < len(ids):
                    first = max(0, begin - min(_OVERLAP, window // 4))
                    end = first + window - len(head)
                    yield Reading((*head, *ids[first:end]), of, has_question, min(end, len(ids)) - begin)
                    begin = end

    def compressed(
        self,
        read: Iterable[tuple[Reading, Sequence[float]]],
        ratio: float,
        judge: Judge,
        tokenizer: Tokenizer,
        weighing: Weighing = USUAL,
    ) -> tuple[list[Message], Compression]:
        """Return the messages without what says least, and what that was.

        read: each reading with the log-probabilities of its ids. tokenizer: of the model that answers.
        """
        found: dict[tuple[int, bool], list[float]] = defaultdict(list)
        for reading, logprobs in read:
            found[reading.of, reading.has_question] += logprobs[-reading.num_scored :]
        judged: list[Judged] = []
        bonus: dict[int, float] = {}
        for of, passage in enumerate(self.passages):
            first = judged[-1].sentence + 1 if judged else 0
            worths = passage.worths(judge.tokenizer, found[of, False], found[of, True], weighing)
            for word, cost, worth in zip(passage.words, passage.costs(tokenizer), worths, strict=True):
                told = is_telling(passage.text[word.begin : word.end])
                judged.append(Judged(cost, worth, first + word.sentence, told))
            shared = passage.shared_with(self.question)
            bonus |= {first + number: weighing.shared_words * rarity for number, rarity in shared.items()}
        gone = leaving(judged, ratio, bonus)
        return self._without(gone, ratio, judge.name, judged)

    def _without(
        self, gone: set[int], ratio: float, judge: str, judged: Sequence[Judged]
    ) -> tuple[list[Message], Compression]:
        messages, removed, first = list(self.messages), list[str](), 0
        for passage in self.passages:
            own = {place - first for place in gone if first <= place < first + len(passage.words)}
            first += len(passage.words)
            text = without(passage.text, passage.words, own)
            messages[passage.message] = {**messages[passage.message], "content": text}
            removed += passage.runs(own)
        before = sum(word.cost for word in judged)
        after = before - sum(judged[place].cost for place in gone)
        return messages, Compression(judge, ratio, round(before), round(after), tuple(removed))


def compressible(messages: Sequence[Message], question: str = "", verbatim: Sequence[str] = ()) -> Compressible:
    """Return what of a conversation may leave: the prose of the user's messages, but for what each of them asks.

    question: the end of the last one, where more is before it. verbatim: texts within them that stay as they are.
    """
    users = [
        place for place, each in enumerate(messages) if each["role"] == "user" and isinstance(each.get("content"), str)
    ]
    passages, asked = [], ""
    for place in users:
        text = messages[place]["content"]
        lead, begin = _question(text)
        if question and place == users[-1] and text.endswith(question) and text != question:
            lead, begin = 0, len(text) - len(question)
        asked = f"{text[:lead].strip()}\n{text[begin:].strip()}".strip()
        kept = [(text.find(each), text.find(each) + len(each)) for each in verbatim if each in text]
        if words := words_of(text, [(0, lead), (begin, len(text)), *kept]):
            passages.append(Passage(place, text, words))
    return Compressible(messages, tuple(passages), asked)


def fitting(may_leave: float, num_tokens: int, ctx: int) -> float | None:
    """Return the share to keep with which a prompt fits into a context; None where there is none that is worth it.
    may_leave: tokens of the prompt's num_tokens."""
    too_many = num_tokens - ctx * 4 // 5  # a fifth is for the answer
    ratio = int(100 - 100 * too_many / may_leave) / 100 if may_leave else 0.0
    return ratio if _WORTH <= ratio <= HIGHEST else None


def _question(text: str) -> tuple[int, int]:
    """Return where the instruction at the beginning of a message ends, and where what it asks at its end begins."""
    first = _PARAGRAPH.search(text)
    lead = first.start() if first and text[: first.start()].rstrip().endswith((":", "?")) else 0
    is_long = len(words_of(text)) > _MOST_QUESTION
    for separator in (_PARAGRAPH, *([_SENTENCE] if is_long else [])):
        for found in reversed(list(separator.finditer(text))):
            if (num_words := len(text[found.end() :].split())) > _MOST_QUESTION:
                break
            if num_words >= _LEAST_QUESTION:
                return lead, found.end()
    return lead, 0


def _stem(word: str) -> str:
    """Return what a word has in common with its other forms; "" for a short one, which says little."""
    letters = "".join(filter(str.isalnum, word.casefold()))
    return letters[:_STEM] if len(letters) >= _LEAST_STEM else ""
