"""The steps of a run in the ledger and in the log: by run, and by workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.features.ledger.queries import usage
from gateway.features.ledger.sums import Period
from tests.gateway.features.keys.conftest import bearer, made
from tests.gateway.features.ledger.conftest import all_rows, file_url, stored
from tests.gateway.features.workflows.test_keys import BODY, TWO, served
from tests.gateway.features.workflows.test_runs import RUNS, USER


async def test_rows_and_lines_of_steps_name_their_run_and_workflow(tmp_path: Path, request_lines: Any) -> None:
    url = file_url(tmp_path / "ledger.sqlite")
    async with served(tmp_path, ledger={"url": url}) as (_, run):
        headers = bearer((await made(run))[1])
        named = (await run.post({**BODY, "workflow": "two"}, RUNS, headers=headers))[2]["id"]
        inline = (await run.post({**BODY, "workflow": TWO}, RUNS, headers=headers))[2]["id"]
        await run.post({"model": "m", "messages": [USER]}, headers=headers)
    async with stored(url) as (_, database):
        rows = await database.read(all_rows)
        report = await database.read(lambda connection: usage(connection, ("workflow", "run"), Period(0)))
    steps = {row["request"]: (row["run"], row["workflow"]) for row in rows if row["run"]}
    assert steps == {f"{named}.{name}": (named, "two") for name in "ab"} | {
        f"{inline}.{name}": (inline, "inline:two") for name in "ab"
    }
    sums = {group.names: (group["requests"], group["completion"] > 0) for group in report.groups}
    assert sums[("two", named)] == sums[("inline:two", inline)] == (2, True)
    lines = {line.get("id"): line for line in request_lines()}
    assert (lines[f"{named}.b"]["run"], lines[f"{named}.b"]["workflow"]) == (named, "two")
    assert sum("run" in line for line in lines.values()) == 4
