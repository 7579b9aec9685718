"""docs/using/api.md says of the endpoints what their types say, and of clients what tests show."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from localllm.server.app import ENDPOINTS
from localllm.server.bodies import Body
from localllm.server.endpoint import Endpoint
from tests.server.claims import all_claims, environments, requirements, requirements_of
from tools.generate_api_docs import DIALECTS, TARGET, generate

PAGE = TARGET.read_text(encoding="utf-8")
WITH_BODY = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]


def section_of(endpoint: Endpoint) -> str:
    """What the page says of its fields."""
    return PAGE.partition(f"\n`{endpoint.method} {endpoint.path}`\n\n")[2].partition("\n\n")[0]


def fields_of(body: type[Body]) -> Iterator[str]:
    yield from (field.alias or name for name, field in body.model_fields.items())
    yield from body.why


def ticked() -> Iterator[tuple[str, str, str]]:
    """(client, path, what) of each tick in the tables of clients."""
    columns: list[str] = []
    path = ""
    for line in PAGE.partition("<!-- generated: clients -->")[2].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells[:2] == ["", ""]:
            columns = cells[2:]
        elif len(cells) > 2 and not cells[0].startswith("-"):
            path = cells[0].strip("`") or path
            yield from ((client, path, cells[1]) for client, tick in zip(columns, cells[2:], strict=True) if tick)


def test_the_page_is_what_the_endpoints_and_the_tests_say() -> None:
    assert generate(PAGE) == PAGE, "run: python -m tools.generate_api_docs"


def test_every_endpoint_is_in_one_dialect() -> None:
    assert [endpoint for endpoints in DIALECTS.values() for endpoint in endpoints] == list(ENDPOINTS)


@pytest.mark.parametrize("endpoint", WITH_BODY, ids=lambda endpoint: endpoint.path)
def test_the_page_names_every_field_of_a_request(endpoint: Endpoint) -> None:
    assert endpoint.body is not None
    told = section_of(endpoint)
    inherited = [section_of(each) for each in WITH_BODY if f"as in `{each.path}`" in told]
    named = set(re.findall(r"`([\w.]+)`", told + "".join(inherited)))
    assert set(fields_of(endpoint.body)) - named - {path.partition(".")[0] for path in named} == set()


def test_what_is_claimed_is_of_addresses_that_there_are() -> None:
    assert {claim.path for claim in all_claims()} <= {endpoint.path for endpoint in ENDPOINTS}


def test_every_tick_of_the_page_has_a_test() -> None:
    claimed = {(claim.client, claim.path.replace(":path}", "}"), claim.what) for claim in all_claims()}
    assert set(ticked()) == claimed


@pytest.mark.parametrize("client", requirements())
def test_a_client_with_an_environment_of_its_own_has_a_range_of_versions(client: str) -> None:
    assert re.fullmatch(rf"{client}((-slim)?(\[[\w,]+\])?>=[\d.]+,<\d+|@>=[\d.]+ <\d+)", requirements()[client])


def test_every_environment_of_clients_is_one_that_something_is_claimed_of() -> None:
    claimed = {requirements().get(claim.client) for claim in all_claims()}
    assert all(claimed & set(requirements_of(path).values()) for path in environments())
