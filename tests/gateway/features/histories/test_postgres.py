"""Two gateways that keep responses in one Postgres database, and a server that goes away meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.gateway.conftest import running
from tests.gateway.features.responses.test_recall import ask, replica, texts
from tests.support.postgres import PASSWORD, Postgres, postgres

pytestmark = pytest.mark.tools


@pytest.fixture
def server() -> Iterator[Postgres]:
    with postgres() as started:
        yield started


async def test_two_gateways_share_it_and_a_server_that_is_away_costs_the_store_only(
    server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)  # the configuration takes no URL with it
    state = {"url": server.new().replace(f":{PASSWORD}@", "@")}
    async with replica() as one, running(one, state=state) as run, running(one, state=state) as other:
        first = await ask(run, "a")
        second = await ask(other, "b", previous_response_id=first.id)
        assert (first.store, second.store) == (True, True)
        server.stop()
        for stream in (False, True):
            found = await ask(run, "c", stream=stream)
            assert (found.store, found.output_text) == (False, "to c")
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(run, "d", previous_response_id=second.id)
        assert (caught.value.status_code, caught.value.code) == (503, "state_unavailable")
        server.start()
        third = await ask(run, "e", previous_response_id=second.id)
        assert (third.store, texts(one.requests[-1].json)) == (True, ["a", "to a", "b", "to b", "e"])
        assert (await other.client.responses.retrieve(third.id)).output_text == "to e"
