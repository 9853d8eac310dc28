"""The soak in small: clients of random patience at once, bad requests among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.server.serving import Served, until
from tests.server.soak import load

CLIENTS, SECONDS = 16, 4.0


def test_under_load_every_good_request_ends_well_and_nothing_is_left_behind(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    restarts = served.server.engine.num_restarts
    told = asyncio.run(load(int(served.address.rpartition(":")[2]), SECONDS, CLIENTS, 40))
    record_property("shown", f"load: {told.good} good, {told.cancelled} cancelled, {told.bad} bad requests")
    assert told.failed == [] and told.later == 0
    assert told.good >= CLIENTS / 2
    until(lambda: served.server.engine.num_samples == 0, "nothing under way")
    until(lambda: served.metric("paceline_pages_used") == 0, "all pages back")
    assert served.metric("paceline_requests_running") == served.metric("paceline_requests_waiting") == 0
    assert served.server.engine.num_restarts == restarts
    assert served.server.metrics._begun == {}, "requests that ended are still kept"
