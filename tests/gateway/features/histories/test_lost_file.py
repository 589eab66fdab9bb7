"""The file of what is kept goes under a whole gateway."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.gateway.conftest import running
from tests.gateway.features.responses.test_recall import ask, kept_in, replica


async def test_what_says_that_it_is_kept_is_in_the_file_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        first = await ask(run, "a", store=True)
        path.unlink()
        second = await ask(run, "b", store=True)
        assert second.store is True
        assert path.exists()
        assert (await run.client.responses.retrieve(second.id)).id == second.id
        with pytest.raises(openai.BadRequestError, match="not found"):
            await ask(run, "c", previous_response_id=first.id)
        assert (await run.metrics())["warmroute_state_file_lost_total"] == 1
    async with replica() as one, running(one, state=kept_in(tmp_path)) as run:
        assert (await run.client.responses.retrieve(second.id)).id == second.id


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_that_it_is_not_kept_where_no_file_can_be_made(tmp_path: Path, stream: bool) -> None:
    folder = tmp_path / "folder"
    async with replica() as one, running(one, state=kept_in(folder)) as run:
        assert (await ask(run, "a", store=True)).store is True
        folder.rename(tmp_path / "away")
        folder.touch()
        assert (await ask(run, "b", store=True, stream=stream)).store is False
        folder.unlink()
        assert (await ask(run, "c", store=True, stream=stream)).store is True
