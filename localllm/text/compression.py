"""Shortens the prose of a prompt: which words may leave, and which leave for a share of its tokens to be kept.

The idea is LLMLingua's (arXiv:2310.05736, 2310.06839): a small model reads the text, and what it expects says little.
Knows texts and numbers; how likely the small model finds each token is read elsewhere.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

Span = tuple[int, int]

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MARKUP = re.compile(r"\s*(?:\||#{1,6}\s|</?[A-Za-z!?])|.*</[\w:.-]+>\s*$")  # a row of a table, a heading, a tag
_INDENTED = re.compile(r"(?: {4}|\t)\s*\S")
_INLINE = re.compile(r"(`+)(?!`).{1,1000}?(?<!`)\1(?!`)|</?[A-Za-z!?][^<>\n]*>|\]\([^()\s]*\)|\S+://\S+")
_BRACKETS = re.compile(r"[\[\]{}]")
_SYMBOLS = re.compile(r"[{}\[\]<>=_*/\\|#$&^~`+@%;]")
_MOST_SYMBOLS = 0.06  # of the characters of a paragraph of prose; code has 0.08 to 0.2
# Scripts without blanks between words: a character is a word.
_DENSE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff"
_WORD = re.compile(rf"\s*(?:[{_DENSE}]|[^\s{_DENSE}]+)")
_ENDS_SENTENCE = re.compile(r"""[.!?…]["'”’)\]]*$|[。！？]$""")
_STARTS_ANEW = re.compile(r"\s*\n\s*(?:\n|[-*•]\s|\d+[.)]\s)")
# What a text hinges on and a model finds likely all the same: numbers, names, what turns a sentence round.
_TELLING = re.compile(r"""["'“‘(]*(?:\d|[A-Z]|(?:no|not|never|none|nor|without|cannot|except|unless|\w+n['’]t)\b)""")


@dataclass(frozen=True)
class Word:
    """A word that may leave, with the white space before it. sentence: its number within the text."""

    begin: int
    end: int
    sentence: int


def words_of(text: str, closed: Sequence[Span] = ()) -> list[Word]:
    """Return the words of a text's prose, in order. What is no prose has none: fenced, indented and inline code, JSON
    and whatever else stands in brackets, tags, rows of tables, headings, addresses, and paragraphs of many symbols.

    closed: more that is left alone.
    """
    words: list[Word] = []
    number = 0
    for begin, stop in _prose(text, closed):
        number += 1  # what stands between two pieces of prose parts their sentences, too
        for found in _WORD.finditer(text, begin, stop):
            if words and words[-1].sentence == number and _parts(text, words[-1], found.group()):
                number += 1
            words.append(Word(*found.span(), number))
    return words


def _parts(text: str, before: Word, after: str) -> bool:
    return bool(_ENDS_SENTENCE.search(text, before.begin, before.end) or _STARTS_ANEW.match(after))


def is_telling(word: str) -> bool:
    """Return whether a word leaves its sentence late: a number, a name, a negation."""
    return _TELLING.match(word.lstrip()) is not None


def tokens_of(words: Sequence[Word], spans: Sequence[Span]) -> Iterator[list[int]]:
    """Yield the tokens of each word, by their places; a token that lies in several words is of each. spans: of all
    tokens of the text, in order."""
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    for word in words:
        yield list(range(bisect.bisect_right(ends, word.begin), bisect.bisect_left(begins, word.end)))


def without(text: str, words: Sequence[Word], leaving: Collection[int]) -> str:
    """Return a text without some of its words, given by their places. Of white space before words that leave one after
    another and the one that follows, the widest stays."""
    pieces: list[str] = []
    begin, blank = 0, None  # blank: of the words that have just left; None for none
    for place, word in enumerate(words):
        if begin < word.begin:
            pieces.append(_behind(blank, text[begin : word.begin]))
            blank = None
        found, begin = text[word.begin : word.end], word.end
        own = found[: len(found) - len(found.lstrip())]
        widest = own if blank is None else blank if not any(pieces) else max(own, blank, key=_width)
        if place in leaving:
            blank = widest
        else:
            pieces.append(widest + found[len(own) :])
            blank = None
    return "".join((*pieces, _behind(blank, text[begin:])))


def _behind(blank: str | None, rest: str) -> str:
    """Return what is left alone, behind words that have left, perhaps: parted from what is before them."""
    return (blank or "") + rest if rest and not rest[0].isspace() else rest


def _width(blank: str) -> tuple[int, int]:
    return blank.count("\n"), len(blank)


# Prose


def _prose(text: str, closed: Sequence[Span]) -> Iterator[Span]:
    """Yield the pieces of a text that are prose, in order."""
    inline = (found.span() for found in _INLINE.finditer(text))
    begin = 0
    for first, last in sorted((*closed, *_blocks(text), *_brackets(text), *inline, (len(text), len(text)))):
        if begin < first:
            yield begin, first
        begin = max(begin, last)


def _blocks(text: str) -> Iterator[Span]:
    """Yield the lines that are no prose, and paragraphs of many symbols, each without the line feed behind it."""
    fence, fence_begin, begin = "", 0, 0
    paragraph: list[Span] = []
    is_code = True  # a line that is indented is code behind a blank one, and behind another
    for line in text.split("\n"):
        span = (begin, begin + len(line))
        begin = span[1] + 1
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line[found.end() :].strip():
                yield fence_begin, span[1]
                fence = ""
            continue
        if found:
            fence, fence_begin = found[1], span[0]
        is_code = not line.strip() or (is_code and _INDENTED.match(line) is not None)
        if line.strip() and (is_code or _MARKUP.match(line)):
            yield span
        if line.strip() and not found:
            paragraph.append(span)
        else:
            yield from _of_many_symbols(text, paragraph)
            paragraph = []
    if fence:
        yield fence_begin, len(text)
    yield from _of_many_symbols(text, paragraph)


def _of_many_symbols(text: str, lines: Sequence[Span]) -> Iterator[Span]:
    if lines:
        paragraph = text[lines[0][0] : lines[-1][1]]
        num_characters = sum(map(len, paragraph.split()))
        if len(_SYMBOLS.findall(paragraph)) > _MOST_SYMBOLS * num_characters:
            yield lines[0][0], lines[-1][1]


def _brackets(text: str) -> Iterator[Span]:
    """Yield what stands in braces, and in square brackets within a paragraph."""
    opened: list[int] = []
    for found in _BRACKETS.finditer(text):
        place, bracket = found.start(), found[0]
        if bracket in "[{":
            opened.append(place)
        elif opened and text[opened[-1]] + bracket in ("[]", "{}"):
            begin = opened.pop()
            if bracket == "}" or "\n\n" not in text[begin:place]:
                yield begin, place + 1


# What leaves


@dataclass(frozen=True)
class Judged:
    """A word that may leave. cost: its tokens. worth: how much each of them says. sentence: its number within all that
    may leave. is_telling: it leaves its sentence late."""

    cost: float
    worth: float
    sentence: int
    is_telling: bool


def leaving(words: Sequence[Judged], ratio: float, bonus: Mapping[int, float]) -> set[int]:
    """Return the places of the words that leave, so that the others cost at most `ratio` of all.

    First sentences leave, those of the least worth a token, as long as enough is left; then words of the least that
    stays, which costs more than what is still to leave. All others stay whole: of two facts, one is kept to be read.
    bonus: what is added to the worth of a sentence.
    """
    left = sum(word.cost for word in words)
    most = ratio * left
    sentences: dict[int, list[int]] = {}
    for place, word in enumerate(words):
        sentences.setdefault(word.sentence, []).append(place)

    def worth(number: int) -> float:
        inside = [words[place] for place in sentences[number]]
        cost = sum(word.cost for word in inside)
        mean = sum(word.worth * word.cost for word in inside) / cost if cost else 0.0
        return mean + bonus.get(number, 0.0)

    gone: set[int] = set()
    stay: list[int] = []
    for number in sorted(sentences, key=worth):
        cost = sum(words[place].cost for place in sentences[number])
        if left - cost >= most:
            gone.update(sentences[number])
            left -= cost
        else:
            stay += sorted(sentences[number], key=lambda place: (words[place].is_telling, words[place].worth))
    for place in stay:
        if left <= most:
            break
        gone.add(place)
        left -= words[place].cost
    return gone
