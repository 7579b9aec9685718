"""docs/cli.md says what the commands say."""

from __future__ import annotations

from tools.generate_cli_docs import TARGET, generate


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    assert TARGET.read_text(encoding="utf-8") == generate(), "run: python -m tools.generate_cli_docs"
