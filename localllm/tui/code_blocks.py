"""The fenced code blocks of a text in Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeBlock:
    language: str
    code: str


def code_blocks(text: str) -> list[CodeBlock]:
    """In the order of the text; the last may have no end yet."""
    from localllm.tui.rendering import parser

    fences = [token for token in parser().parse(text) if token.type in ("fence", "code_block")]
    return [CodeBlock((token.info.split() or [""])[0], token.content) for token in fences]
