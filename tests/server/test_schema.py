"""The OpenAPI document is true: thousands of requests made from it, right and wrong ones, get what it promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from localllm.server.app import ENDPOINTS
from localllm.server.endpoint import OPENAPI_PATH, document
from tests.cli_support import write_checkpoint
from tests.server.support import Running, running

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection,
]  # fmt: skip
SCHEMA = schemathesis.openapi.from_dict(document(ENDPOINTS, needs_key=False))
SCHEMA.config.checks.negative_data_rejection.expected_statuses = [*map(str, (400, 404, 413, 503))]
OPERATIONS = {operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations()}
WITH_BODY = {label for label, operation in OPERATIONS.items() if operation.body}
_MODES = {True: list(GenerationMode), False: [GenerationMode.POSITIVE]}
CASES = [(label, mode) for label in OPERATIONS for mode in _MODES[label in WITH_BODY]]

# The model that these ask for is another than the served one, or may not go.
UNANSWERED = {"POST /api/create", "POST /api/copy", "POST /api/pull", "DELETE /api/delete", "GET /v1/models/{model}"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A context of 64 tokens: no answer takes long."""
    with running(write_checkpoint(tmp_path_factory.mktemp("model") / "small", context=64), offline=True) as server:
        yield server


@pytest.mark.parametrize("num_cases", [3, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("label", "mode"), CASES, ids=str)
def test_what_the_document_says_is_what_comes(small: Running, label: str, mode: GenerationMode, num_cases: int) -> None:
    statuses: set[int] = set()

    @seed(1)
    @settings(max_examples=num_cases, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "small"
        statuses.add(case.call_and_validate(base_url=small.url, checks=CHECKS).status_code)

    check()
    # What is valid is answered, as far as chance finds it: most names, ids and pairs of fields mean nothing here.
    assert num_cases < 100 or mode is GenerationMode.NEGATIVE or label in UNANSWERED or 200 in statuses


def test_the_document_that_is_served_is_the_one_that_is_checked(small: Running) -> None:
    assert small.get(OPENAPI_PATH).json() == document(ENDPOINTS, needs_key=False)
