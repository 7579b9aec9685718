"""The text of a Markdown source as pieces to draw; all of the source is shown.

A link shows its target, raw HTML is text, and nothing can be clicked: the text of a model is a stranger's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, paragraph
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from textual.content import Content, Span
from textual.highlight import HighlightTheme

from localllm.chat.text import one_line, visible
from localllm.tui.markdown_blocks import Alignment, Piece, TablePiece, TextPiece, indented
from localllm.tui.maths import in_unicode, is_formula

_TAB = 4  # columns
_BACK = (16, 64)  # lines before the new ones at which lexing may begin
_WAIT = 32  # lines after a failure: within a long string it fails for each line


class Highlighter:
    """Highlights growing code from a few lines before its end, where that gives these lines the colours they have: 200
    lines of Python take 16 ms as a whole. Later lines may change earlier ones (the end of a comment): a fresh
    highlighter draws the code once it is complete."""

    def __init__(self) -> None:
        self._language = ""
        self._rows: list[str] = []
        self._lines: list[Content] = []
        self._whole_until = 0  # lines; before that the end alone is not tried again

    def lines(self, code: str, language: str) -> list[Content]:
        """The highlighted lines. language: of a fence; an unknown one is plain text. Lines before the part that is new
        are the objects of the last call."""
        rows = code.expandtabs(_TAB).split("\n")
        lexer = _lexer(language)
        num_known = max(0, len(self._rows) - 1)  # the last may have got longer
        if language != self._language or rows[:num_known] != self._rows[:num_known]:
            num_known = self._whole_until = 0
        self._lines = self._continued(rows, lexer, num_known) or _highlighted(rows, lexer)
        self._language, self._rows = language, rows
        return self._lines

    def _continued(self, rows: Sequence[str], lexer: Lexer, num_known: int) -> list[Content]:
        """The lines from the known ones on; [] where earlier lines may matter for the new ones."""
        if len(rows) < self._whole_until:
            return []
        begins = [num_known - back for back in _BACK if num_known > back]
        for begin in begins:
            lines = _highlighted(rows[begin:], lexer)
            known = self._lines[begin:num_known]
            if all(line.is_same(before) for line, before in zip(lines, known, strict=False)):
                return self._lines[:num_known] + lines[len(known) :]
        self._whole_until = len(rows) + _WAIT if begins else 0
        return []


@cache
def _lexer(language: str) -> Lexer:
    options: dict[str, Any] = {"stripnl": False, "ensurenl": True, "tabsize": 0}
    try:
        return get_lexer_by_name(language or "text", **options)
    except ClassNotFound:
        return get_lexer_by_name("text", **options)


def _highlighted(rows: Sequence[str], lexer: Lexer) -> list[Content]:
    spans = [[Span(0, len(row), "$text")] for row in rows] + [[]]
    line = column = 0
    for kind, token in lexer.get_tokens("\n".join(rows)):
        style = _style(kind)
        for number, part in enumerate(token.split("\n")):
            if number:
                line, column = line + 1, 0
            if part and style:
                spans[min(line, len(rows))].append(Span(column, column + len(part), style))
            column += len(part)
    return [Content(row, spans=found) for row, found in zip(rows, spans, strict=False)]


@cache
def _style(kind: Any) -> str:
    """The style of a kind of tokens, or of its parent kind. Keywords have the accent there, which may be the colour of
    names."""
    found = HighlightTheme.STYLES.get(kind, "").replace("$text-accent", "$text-secondary")
    return found or (_style(kind.parent) if kind.parent is not None else "")


_BULLETS = ("• ", "◦ ", "▪ ")
_TASKS = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}  # signs of a list of tasks
_FORMULAS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_MOST_LANGUAGE = 24  # characters of a fence's word
_MOST_NESTED = 40  # levels, two for a list and one for a quote; signs of what is deeper are text
_STYLES = {"em": ".em", "strong": ".strong", "s": ".s"}


@cache
def parser(*, has_inline: bool = True) -> MarkdownIt:
    """The parser of a model's Markdown: CommonMark with tables, strikethrough and formulas. Raw HTML stays text, and
    so do definitions of links, which CommonMark would hide. Without inline text, which takes most of the time, blocks
    alone.
    """
    options = {"html": False, "maxNesting": _MOST_NESTED + 2}  # which it would leave out
    found = MarkdownIt("commonmark", options).enable(["table", "strikethrough"]).disable(["reference"])
    found.block.ruler.before("table", "too_deep", _too_deep)
    found.inline.ruler.before("escape", "formula", _formula)
    return found if has_inline else found.disable(["inline"])


def _too_deep(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    return not silent and state.level >= _MOST_NESTED and paragraph(state, start_line, end_line, silent)


def _formula(state: StateInline, silent: bool) -> bool:
    """A formula as text, or as it stands where it has no simple form: its signs are none of Markdown's."""
    signs = next((pair for pair in _FORMULAS if state.src.startswith(pair[0], state.pos)), None)
    if signs is None:
        return False
    begin = state.pos + len(signs[0])
    end = state.src.find(signs[1], begin, state.posMax)
    source, behind = state.src[begin:end], end + len(signs[1])
    if end < 0 or not source.strip():
        return False
    if signs[0] == "$":
        is_word = state.src[behind : behind + 1].isalnum()
        if is_word or source[0].isspace() or source[-1].isspace() or not is_formula(source):
            return False
    if not silent:
        shown = in_unicode(source)
        state.push("formula", "", 0).content = shown if shown is not None else state.src[state.pos : behind]
    state.pos = behind
    return True


def groups(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The tokens of each block of the top level."""
    group: list[Token] = []
    depth = 0
    for token in tokens:
        group.append(token)
        depth += token.nesting
        if depth == 0:
            yield group
            group = []


def first_line(group: Sequence[Token]) -> int:
    """The number of the line at which a block of the top level begins."""
    lines = group[0].map
    assert lines is not None
    return lines[0]


def pieces(
    tokens: Sequence[Token], highlighters: list[Highlighter] | None = None, num_codes: int | None = None
) -> list[Piece]:
    """The pieces of a block's tokens. highlighters: of the block's earlier code, in order; new ones are appended.
    num_codes: code blocks before, which are counted on from there; None for code without numbers."""
    return list(_Walk(tokens, [] if highlighters is None else highlighters, num_codes).blocks(0))


def inline(token: Token) -> Content:
    """The text of a paragraph, a heading or a cell, styled."""
    texts: list[str] = []
    spans: list[Span] = []
    opened: list[tuple[str, int, str]] = []
    length = 0

    def add(text: str, style: str = "") -> None:
        nonlocal length
        text = visible(text)  # again: an entity may have become what the source's own characters may not be
        texts.append(text)
        if style:
            spans.append(Span(length, length + len(text), style))
        length += len(text)

    for child in token.children or ():
        kind = child.type
        if kind == "text":
            add(child.content)
        elif kind == "softbreak":
            add(" ")
        elif kind == "hardbreak":
            add("\n")
        elif kind == "code_inline":
            add(child.content, ".code_inline")
        elif kind == "image":
            add(child.content or "image", ".link")
            add(f" ({child.attrGet('src')})", ".dim")
        elif kind == "link_open":
            opened.append((".link", length, str(child.attrGet("href") or "")))
        elif kind == "link_close":
            style, begin, href = opened.pop()
            spans.append(Span(begin, length, style))
            if "".join(texts)[begin:] != href:
                add(f" ({href})", ".dim")
        elif kind.endswith("_open"):
            opened.append((_STYLES.get(kind.removesuffix("_open"), ""), length, ""))
        elif kind.endswith("_close"):
            style, begin, _ = opened.pop()
            if style:
                spans.append(Span(begin, length, style))
        else:
            add(child.content)
    return Content("".join(texts), spans=spans)


class _Walk:
    """Turns tokens into pieces, from the front."""

    def __init__(self, tokens: Sequence[Token], highlighters: list[Highlighter], num_before: int | None) -> None:
        self._tokens = list(tokens)
        self._highlighters = highlighters
        self._num_before = num_before
        self._num_codes = 0
        self._at = 0

    def blocks(self, depth: int, *, is_tight: bool = False) -> Iterator[Piece]:
        """The pieces up to the closing token. depth: of the surrounding lists."""
        is_first = True
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token.nesting < 0:
                return
            if not is_first and not is_tight and token.type != "list_item_open":
                yield TextPiece(Content())
            is_first = False
            yield from self._block(token, depth)

    def _block(self, token: Token, depth: int) -> Iterator[Piece]:
        match token.type:
            case "inline":
                yield TextPiece(inline(token))
            case "paragraph_open":
                yield from self.blocks(depth)
            case "heading_open":
                style = f".{token.tag}"
                for piece in self.blocks(depth):
                    yield TextPiece(piece.content.stylize_before(style)) if isinstance(piece, TextPiece) else piece
            case "fence" | "code_block":
                yield from self._code(token)
            case "hr":
                yield TextPiece(Content("─" * 12).stylize(".dim"))
            case "blockquote_open":
                bar = Content("▎ ").stylize(".quote")
                for piece in self.blocks(depth):
                    yield indented(piece, bar, bar)
            case "bullet_list_open" | "ordered_list_open":
                yield from self._list(token, depth)
            case "table_open":
                yield self._table()
            case _:
                if token.content:
                    yield TextPiece(Content(visible(token.content)))

    def _list(self, token: Token, depth: int) -> Iterator[Piece]:
        is_ordered = token.type == "ordered_list_open"
        first_paragraph = next((token for token in self._tokens[self._at :] if token.type == "paragraph_open"), None)
        is_tight = first_paragraph is None or first_paragraph.hidden  # no blank lines between the items
        is_first = True
        while self._at < len(self._tokens):
            item = self._tokens[self._at]
            self._at += 1
            if item.type != "list_item_open":
                return
            box = self._task()
            bullet = f"{item.info}. {box}" if is_ordered else box or _BULLETS[depth % len(_BULLETS)]
            first, rest = Content(bullet).stylize(".bullet"), Content(" " * len(bullet))
            if not is_first and not is_tight:
                yield TextPiece(Content())
            is_first = False
            for number, piece in enumerate(self.blocks(depth + 1, is_tight=is_tight)):
                yield indented(piece, first if number == 0 else rest, rest)

    def _task(self) -> str:
        """The sign of a task that the item begins with, which is taken off its text; "" for any other item."""
        inner = self._tokens[self._at : self._at + 2]
        children = inner[1].children if [token.type for token in inner] == ["paragraph_open", "inline"] else None
        if not children or children[0].type != "text" or children[0].content[:4] not in _TASKS:
            return ""
        text = children[0].content
        self._tokens[self._at + 1] = inner[1].copy(children=[children[0].copy(content=text[4:]), *children[1:]])
        return _TASKS[text[:4]]

    def _code(self, token: Token) -> Iterator[TextPiece]:
        if self._num_codes == len(self._highlighters):
            self._highlighters.append(Highlighter())
        highlighter = self._highlighters[self._num_codes]
        self._num_codes += 1
        language = (token.info.split() or [""])[0]
        margin = Content("  ")
        if (label := self._label(language)).plain:
            yield TextPiece(label, margin, margin, is_code=True)
        for line in highlighter.lines(visible(token.content.removesuffix("\n")), language):
            yield TextPiece(line, margin, margin, is_code=True)

    def _label(self, language: str) -> Content:
        """The number of the last code block and its language."""
        word = Content(one_line(visible(language))[:_MOST_LANGUAGE]).stylize(".dim")
        if self._num_before is None:
            return word
        number = Content(str(self._num_before + self._num_codes)).stylize(".bullet")
        return number + "  " + word if word.plain else number

    def _table(self) -> TablePiece:
        rows: list[list[Content]] = []
        alignments: list[Alignment] = []
        while (token := self._tokens[self._at]).type != "table_close":
            self._at += 1
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "th_open":
                style = str(token.attrGet("style") or "left")
                alignments.append(cast("Alignment", style.removeprefix("text-align:")))
            elif token.type == "inline":
                rows[-1].append(inline(token))
        self._at += 1
        return TablePiece(rows, alignments)


@dataclass(frozen=True)
class CodeBlock:
    language: str
    code: str


def _is_code(token: Token) -> bool:
    return token.type in ("fence", "code_block")


def num_codes(tokens: Sequence[Token]) -> int:
    """The number of code blocks among the tokens."""
    return sum(map(_is_code, tokens))


def code_blocks(text: str) -> list[CodeBlock]:
    """The code blocks in order; the last may have no end yet."""
    tokens = parser(has_inline=False).parse(text)
    return [CodeBlock((token.info.split() or [""])[0], token.content) for token in tokens if _is_code(token)]
