"""What tests say that clients of the server can do, read from their sources: a test has the mark
`@pytest.mark.supports(client, path, what)`, a check of a client with an environment of its own
`@supports(client, path, what)`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
SCRIPTS = TESTS / "clients"


@dataclass(frozen=True)
class Claim:
    """By `test`, `client` does `what` at `path`."""

    client: str
    path: str
    what: str
    test: str


def script_of(client: str) -> Path:
    """Its checks, where it has an environment of its own."""
    return SCRIPTS / f"with_{client.replace('-', '_')}.py"


def requirements() -> dict[str, str]:
    """What is installed of each client that has an environment of its own."""
    return {path.stem: path.read_text(encoding="utf-8").strip() for path in sorted(SCRIPTS.glob("*.txt"))}


def all_claims() -> list[Claim]:
    """In the order of the files and of the tests in them; OpenAI's, whose rows others share, are first."""
    files = sorted(TESTS.glob("test_*.py"), key=lambda path: ("openai" not in path.stem, path.stem))
    return [claim for path in (*files, *map(script_of, requirements())) for claim in claims_of(path)]


def checks_of(client: str) -> list[str]:
    """Of its script, in their order."""
    return list(dict.fromkeys(claim.test for claim in claims_of(script_of(client))))


def claims_of(source: Path) -> Iterator[Claim]:
    """Raises ValueError for a mark that says something else than three texts."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and _name_of(mark.func) == "supports":
                    client, path, what = (str(ast.literal_eval(argument)) for argument in mark.args)
                    yield Claim(client, path, what, node.name)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
