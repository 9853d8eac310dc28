"""Bodies nobody would send and the document's own examples: a clear answer to each, no 5xx, nothing left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.fuzzing import fuzzed, is_right
from tests.server.serving import PATIENCE, Served, until

COUNT = 400  # of `make test`; the soak sends 10,000


def test_bodies_nobody_would_send_get_a_clear_answer(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    def send(client: httpx.Client, number: int) -> int:
        one = fuzzed(number)
        answer = client.request(one.method, one.path, content=one.body, headers={"content-type": one.type})
        assert is_right(answer.status_code), (number, one, answer.status_code, answer.text)
        if answer.status_code != 200:
            assert len(json.loads(answer.text)["error"]["message"]) > 10, (number, one)
        return answer.status_code

    with httpx.Client(base_url=served.address, timeout=PATIENCE) as client, ThreadPoolExecutor(4) as pool:
        statuses = Counter(pool.map(lambda number: send(client, number), range(COUNT)))
    record_property("shown", f"{COUNT} fuzzed requests were answered with {dict(sorted(statuses.items()))}")
    assert statuses[200] > COUNT / 20 and statuses[400] > COUNT / 20, "the fuzzer tries too little"
    assert served.get("/health").json() == {"status": "ok", "restarts": 0}
    until(lambda: served.server.engine.num_samples == 0, "nothing under way")
    until(lambda: served.metric("paceline_pages_used") == 0, "all pages back")


OPERATIONS = ["POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize"]
OPERATIONS += ["GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /version", "GET /metrics"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_the_document_allows_is_answered_as_the_document_says(served: Served, operation: str) -> None:
    method, path = operation.split()
    schema: Any = schemathesis.openapi.from_url(f"{served.address}/openapi.json")
    found = schema[path][method]

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=found.as_strategy())
    def ask(case: Any) -> None:
        answer = case.call(timeout=PATIENCE)
        assert is_right(answer.status_code), (case.body, answer.text)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])  # the model's limits are no schema's

    ask()
