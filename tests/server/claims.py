"""What tests say that clients of the server can do, read from their sources: a test has the mark
`@pytest.mark.supports(client, path, *what)`, a check of a client with an environment of its own
`@supports(client, path, *what)`, in JavaScript `supports(client, path, what, check)`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
SCRIPTS = TESTS / "clients"

_JAVASCRIPT = re.compile(r'^supports\("([^"]+)", "([^"]+)", "([^"]+)", (\w+)\);$', re.MULTILINE)


@dataclass(frozen=True)
class Claim:
    """By `test`, `client` does `what` at `path`."""

    client: str
    path: str
    what: str
    test: str


def environments() -> list[Path]:
    """Of each environment, named so, the file that says what is installed into it: a .txt for pip, a .json for npm."""
    return sorted([*SCRIPTS.glob("*.txt"), *SCRIPTS.glob("*.json")])


def script_of(environment: Path) -> Path:
    """The checks that are run in it; there need be none."""
    kind = "py" if environment.suffix == ".txt" else "mjs"
    return SCRIPTS / f"with_{environment.stem.replace('-', '_')}.{kind}"


def scripted() -> list[Path]:
    """The environments with a script."""
    return [environment for environment in environments() if script_of(environment).exists()]


def requirements() -> dict[str, str]:
    """What is installed of each client that has an environment of its own."""
    return {name: wanted for environment in environments() for name, wanted in requirements_of(environment).items()}


def requirements_of(environment: Path) -> dict[str, str]:
    """What is installed into it, each by its name."""
    text = environment.read_text(encoding="utf-8")
    if environment.suffix == ".txt":
        return {environment.stem: text.strip()}
    return {name: f"{name}@{versions}" for name, versions in json.loads(text)["dependencies"].items()}


def all_claims() -> list[Claim]:
    """In the order of the files and of the tests in them; OpenAI's, whose rows others share, are first."""
    files = sorted(TESTS.glob("test_*.py"), key=lambda path: ("openai" not in path.stem, path.stem))
    return [claim for path in (*files, *map(script_of, scripted())) for claim in claims_of(path)]


def checks_of(environment: Path) -> list[str]:
    """Of its script, in their order."""
    return list(dict.fromkeys(claim.test for claim in claims_of(script_of(environment))))


def claims_of(source: Path) -> Iterator[Claim]:
    """Raises ValueError for a mark that says something else than texts."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".mjs":
        yield from (Claim(*mark) for mark in _JAVASCRIPT.findall(text))
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and _name_of(mark.func) == "supports":
                    client, path, *told = (str(ast.literal_eval(argument)) for argument in mark.args)
                    yield from (Claim(client, path, what, node.name) for what in told)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
