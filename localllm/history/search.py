"""Finds words in what was said: by the index where SQLite has one, else, or where that finds nothing, letter by letter.

The index knows words as most scripts write them; a part of a word, or Chinese, is found by the second way.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress

from localllm.errors import HistoryError
from localllm.history.database import Database

_TERMS = re.compile(r'"([^"]*)"|(\S+)')
_CONTEXT = 40  # characters on each side of what was found


# Of each table: its index, the column in that, and the order of what was last.
_TABLES = {"sessions": ("title_words", "title", "touched"), "messages": ("message_words", "content", "number")}


def numbers(database: Database, table: str, query: str, limit: int) -> list[int]:
    """Return the numbers of a table's rows that have all words of `query`, the latest first."""
    wanted = terms(query)
    if not wanted or limit <= 0:
        return []
    index, column, order = _TABLES[table]
    rows = []
    if database.has_words and all(term[0].isalnum() and term[-1].isalnum() for term in wanted):  # not for "c++"
        # The last letters of a word are often another form of it: lantern, lanterns.
        match = " ".join(f'"{term}"' if " " in term else f'"{term}"*' for term in (t.replace('"', "") for t in wanted))
        statement = (
            f"SELECT number FROM {index} JOIN {table} ON number = {index}.rowid "
            f"WHERE {index} MATCH ? ORDER BY {table}.{order} DESC LIMIT ?"
        )
        with suppress(HistoryError):  # the index is damaged, which the next start mends
            rows = database.rows(statement, (match, limit))
    if not rows:
        condition = " AND ".join(f"{column} LIKE ? ESCAPE '\\'" for _ in wanted)
        statement = f"SELECT number FROM {table} WHERE {condition} ORDER BY {order} DESC LIMIT ?"
        rows = database.rows(statement, (*(f"%{like(term)}%" for term in wanted), limit))
    return [row["number"] for row in rows]


def excerpt(text: str, query: str) -> str:
    """The part of `text` around the first word of `query` in it, on one line."""
    begin = min((begin for begin, _ in places(text, query)), default=0)
    first, last = max(0, begin - _CONTEXT), begin + 2 * _CONTEXT
    shown = " ".join(text[first:last].split())
    return f"{'…' if first else ''}{shown}{'…' if last < len(text) else ''}"


def places(text: str, query: str) -> list[tuple[int, int]]:
    """(begin, end) of each place where a word or phrase of `query` stands in `text`, whatever its accents and case."""
    folded = _folded(text)
    found = [re.finditer(re.escape(_folded(term)), folded) for term in terms(query)]
    return sorted(match.span() for matches in found for match in matches)


def terms(query: str) -> list[str]:
    """`fox "red lantern"` -> ["fox", "red lantern"]."""
    return [term for term in (phrase or word.strip('"') for phrase, word in _TERMS.findall(query)) if term.strip()]


def like(text: str) -> str:
    r"""The text inside a LIKE pattern of ESCAPE '\'."""
    return re.sub(r"([\\%_])", r"\\\1", text)


def _folded(text: str) -> str:
    """Without accents and case, each character where it was."""
    if text.isascii():
        return text.lower()
    plain = {letter: _plain(letter) for letter in set(text)}
    return "".join(map(plain.__getitem__, text))


def _plain(letter: str) -> str:
    # Above are scripts whose letters come apart into others: a syllable of Hangul into its sounds.
    base = unicodedata.normalize("NFD", letter)[0] if letter < "\u2000" else letter
    return base.lower()[0]
