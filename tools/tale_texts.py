"""Cleaning of the old public-domain tales.

Owns the way from a Project Gutenberg file to plain ASCII paragraphs. Knows nothing of tokens or training.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import Path

HELD_OUT_BOOK = "641.txt"
# The same book as 7439.txt, in a second format.
DUPLICATES = frozenset({"englishfairytales.txt"})
LATIN_1 = frozenset({"5314-8.txt"})

_ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-",
                        "\u00a3": "", "\u00e6": "ae", "\u00c6": "Ae", "\u0153": "oe", "\u00df": "ss"})  # fmt: skip
_START = re.compile(r"\*\*\* ?START OF (THE|THIS) PROJECT GUTENBERG[^*]*\*\*\*", re.I)
_SMALL_PRINT = re.compile(r"\*END\W*THE SMALL PRINT[^\n]*", re.I)
_END = re.compile(r"(\*\*\* ?END OF (THE|THIS) PROJECT GUTENBERG|End of (the )?Project Gutenberg|"
                  r"^NOTES AND REFERENCES$)", re.I | re.M)  # fmt: skip
_NOT_STORY = re.compile(r"gutenberg|e-?book|e-?text|transcri|copyright|proofread|illustrat|www\.|http|@|"
                        r"^\W*(contents|table of contents|preface|by various|edited by|produced by|from the|"
                        r"adapted from|by|the end|introduction)\W*$|"
                        r"^(edited|produced|adapted) |^section \d+$|^[\[(](from|adapted)",
                        re.I)  # fmt: skip

_NOT_THINGS = """same other more less great most many deal few little while time times moment last first second third
rest good best sort kind half dead rich poor sick wise left right west east north south end ends side thousand hundred
dozen very only once whole manner truth matter fact words word shame pity"""


def to_ascii(text: str) -> str:
    """Quotes and dashes as on a typewriter, accents off."""
    text = unicodedata.normalize("NFKD", text.translate(_ASCII))
    return text.encode("ascii", "ignore").decode()


def _is_contents(block: str) -> bool:
    """A table of contents: several short lines without a sentence among them."""
    lines = [line.strip() for line in block.splitlines()]
    ended = sum(line.endswith((".", ",", ";", ":", "!", "?", '"', "'", "-")) for line in lines)
    return len(lines) >= 3 and ended < 0.2 * len(lines) and sum(map(len, lines)) / len(lines) < 48


def _is_verse(lines: list[str]) -> bool:
    return len(lines) > 1 and all(len(line.strip()) < 52 for line in lines) and lines[0][:1] in " \t"


def _clean_block(block: str) -> str:
    """One paragraph on one line; verse keeps its lines; "" if it is not part of a tale."""
    block = re.sub(r"\[(illustration|footnote|note)[^\]]*\]", "", block, flags=re.I)
    block = re.sub(r"\[\d+\]|\{\d+\}|\(\d+\)", "", block).replace("_", "")
    if _NOT_STORY.search(block) or _is_contents(block) or not re.search(r"[a-zA-Z]", block):
        return ""
    lines = block.splitlines()
    if _is_verse(lines):
        return "\n".join(" ".join(line.split()) for line in lines)
    return " ".join(block.split()).replace(" --", "--").replace("-- ", "--")


def _aesop_blocks(text: str) -> list[str]:
    """The fables stand without blank lines; a short line without a full stop that starts with a capital is a title."""
    blocks: list[str] = [""]
    for line in text.splitlines():
        title = len(line) < 48 and re.match(r"[A-Z]", line) and not re.search(r"[.,;:!?\"]\s*$", line)
        title = title and blocks[-1].rstrip().endswith((".", '"', "!", "?", "'"))
        if title:
            blocks += [line, ""]
        else:
            blocks[-1] += line + "\n"
    return [block for block in blocks if block.strip()]


def clean_book(path: Path) -> str:
    """The tales of one file: paragraphs of plain ASCII, a blank line between them."""
    text = path.read_text(encoding="latin-1" if path.name in LATIN_1 else "utf-8")
    text = text.replace("\r\n", "\n")
    start = _START.search(text) or _SMALL_PRINT.search(text)
    text = text[start.end() :] if start else text
    end = _END.search(text, len(text) // 2)  # contents name the notes too
    text = to_ascii(text[: end.start()] if end else text)
    blocks = _aesop_blocks(text) if path.name == "aesop.txt" else re.split(r"\n[ \t]*\n", text.strip("\n"))
    cleaned = [_clean_block(block.strip("\n")) for block in blocks]
    return "\n\n".join(block for block in cleaned if block) + "\n"


def load_tales(directory: Path) -> tuple[list[str], str]:
    """(training books, held-out book), all cleaned."""
    paths = [path for path in sorted(directory.glob("*.txt")) if path.name not in DUPLICATES]
    train = [clean_book(path) for path in paths if path.name != HELD_OUT_BOOK]
    return train, clean_book(directory / HELD_OUT_BOOK)


def rare_nouns(books: list[str], fewest: int = 3, most: int = 120) -> list[str]:
    """Words that the tales use like nouns but seldom, for practice in copying.

    Heuristic: after "a", "the" or "his" and before a word that does not belong to a noun phrase.
    """
    follow = r"(?=[.,;:!?]| (?:of|and|was|is|in|on|to|which|that|who|with|had|from|for|as|by)\b)"
    counts = Counter(re.findall(rf"\b(?:a|an|the|his|her) ([a-z]{{4,11}}){follow}", " ".join(books)))
    plain = Counter(re.findall(r"\b(?:a|an) ([a-z]{4,11})\b", " ".join(books)))
    bad = re.compile(r"(ly|ing|ed|est|ous|ful|ness|less|able|ible|tion|sion|ance|ence|ity|ment|th)$")
    stop = set(_NOT_THINGS.split())
    return sorted(word for word, count in counts.items()
                  if fewest <= count <= most and plain[word] >= 2 and not bad.search(word) and word not in stop
                  and not word.endswith("s"))  # fmt: skip
