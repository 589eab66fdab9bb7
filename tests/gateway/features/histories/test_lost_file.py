"""The file of stored responses is deleted under a running gateway."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.gateway.conftest import running
from tests.gateway.features.responses.test_recall import ask, kept_in, replica


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_are_served_without_the_store_until_a_restart(tmp_path: Path, stream: bool) -> None:
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a", store=True)
        assert first.store is True
        (tmp_path / "kept.sqlite").unlink()
        for text in "bc":
            assert (await ask(run, text, store=True, stream=stream)).store is False
        with pytest.raises(openai.InternalServerError, match="deleted or replaced"):
            await ask(run, "d", previous_response_id=first.id)
        assert (await run.metrics())["warmroute_state_file_lost_total"] == 1
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        assert (await ask(run, "e", store=True)).store is True
