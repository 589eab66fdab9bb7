"""A client gets the answers that it would get without the gateway that uploads deltas: other pools, other models, keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.features.prompt_log.delta.command import config_of
from gateway.features.prompt_log.delta.delta_form import DeltaForm
from gateway.features.prompt_log.delta.expiring_keys import ExpiringKeys
from gateway.features.prompt_log.naming.chain import head_name
from gateway.features.prompt_log.naming.forms import names_in
from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import Running, running
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.prompt_log.delta.test_delta_end_to_end import LONG
from tests.gateway.features.prompt_log.delta.test_sync_command import parsed
from tests.gateway.features.prompt_log.delta.two_gateways import TwoGateways, delta_config, two_gateways
from tests.gateway.features.prompt_log.kept import (
    CHAT,
    FORMS,
    MESSAGES,
    NOW,
    RESPONSES,
    SAID,
    body_of,
    called,
    engine,
    in_turn,
    kept_in,
)
from tests.gateway.features.prompt_log.test_sealed import SEALED, sealed_at, seals, two
from tests.support.fakes import Behaviour, FakeReplica, answers, dies, http, models, status, writes


def sealed_turns(path: str) -> list[Any]:
    """A conversation whose second turn has a sealed part of the first pool."""
    if path == RESPONSES:
        return [LONG, SEALED[path], {"type": "message", "role": "assistant", "content": "hello"}, NOW]
    return [LONG, {"role": "assistant", "content": [SEALED[path], {"type": "text", "text": "hello"}]}, NOW]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_sealed_parts_go_to_another_pool_as_they_do_without_a_name(path: str, tmp_path: Path) -> None:
    """Sealed parts bind a request with a name. Of a client that does not know the header they do not: it may know better."""
    async with (
        FakeReplica([seals(path, stream=False)]) as big,
        FakeReplica([engine(path, stream=False)], listing=models("little")) as small,
        two(tmp_path, big, small) as far,
        running(**delta_config(far.url)) as near,
    ):
        both = TwoGateways(near, far, small)
        assert (await both.ask(path, [LONG]))[0] == 200
        for number in (1, 2):
            code, _, raw = await both.ask(path, sealed_turns(path), model="little")
            assert (code, len(small.requests)) == (200, number), raw
            both.form.heads = ExpiringKeys(1)  # as after a restart
        assert await both.counts() == {"delta": 1, "whole": 2}
        names = names_in(json.dumps(body_of(path, sealed_turns(path))).encode(), FORMS[path])
        _, found = await called(far, "GET", head_name(names.chain))
        assert found["issuer"] == "big", "the pool that made them, and not the one that got them last"


@pytest.mark.parametrize("fault", [dies, status(503)])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_sealed_parts_go_to_the_fallback_of_a_pool_that_is_down(path: str, fault: Behaviour, tmp_path: Path) -> None:
    async with (
        FakeReplica([in_turn(seals(path, stream=False), fault)]) as big,
        FakeReplica([engine(path, stream=False)], listing=models("little")) as small,
        two(tmp_path, big, small) as far,
        running(**delta_config(far.url)) as near,
    ):
        both = TwoGateways(near, far, small)
        assert (await both.ask(path, [LONG]))[0] == 200
        code, _, raw = await both.ask(path, sealed_turns(path))
        assert (code, len(small.requests), sealed_at(small, path)) == (200, 1, [SEALED[path]]), raw
        assert await both.counts() == {"whole": 1, "delta": 1}


async def test_sealed_parts_of_a_fallback_stay_there_while_it_is_up(tmp_path: Path) -> None:
    path = MESSAGES
    big, small = in_turn(status(503), engine(path, stream=False)), seals(path, stream=False)
    async with (
        FakeReplica([big]) as one,
        FakeReplica([small], listing=models("little")) as other,
        two(tmp_path, one, other) as far,
        running(**delta_config(far.url)) as near,
    ):
        both = TwoGateways(near, far, other)
        for turns in ([LONG], sealed_turns(path)):
            assert (await both.ask(path, turns))[0] == 200
        assert (len(one.requests), len(other.requests)) == (1, 2)
        await far.post({"name": other.name}, "/warmroute/drain")
        assert (await both.ask(path, sealed_turns(path)))[0] == 200
        assert (len(one.requests), len(other.requests)) == (2, 2)


async def test_a_model_that_the_other_gateway_does_not_list_is_asked_for(tmp_path: Path) -> None:
    """It serves models by the beginnings of their names, and its clients' own workflows, which no list has."""
    pools = {"models": ["adapter-"]}
    async with FakeReplica([answers()]) as replica:
        pool = {"replicas": [replica.url], **pools}
        async with running(pools=[pool], **kept_in(tmp_path)) as far, running(**config_of_sync(far)) as near:
            both = TwoGateways(near, far, replica)
            assert (await both.ask(CHAT, [LONG], model="adapter-7"))[0] == 200
            (code, _, raw), (_, _, expected) = await both.ask(CHAT, [LONG], model="no"), await asked(far, model="no")
            assert (code, json.loads(raw)["error"]["code"], raw) == (404, "model_not_found", expected)


def config_of_sync(far: Running) -> dict[str, Any]:
    """The pools of `warmroute sync`."""
    options = parsed("--upstream", far.url)
    (pool,) = config_of(options).pools
    return delta_config(far.url, models=list(pool.models))


async def asked(run: Running, **more: Any) -> tuple[int, Any, bytes]:
    headers = {"Authorization": "Bearer k"}
    async with run.session.post(run.url + CHAT, json=body_of(CHAT, [LONG], **more), headers=headers) as answer:
        return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/models/no"])
async def test_the_model_list_is_that_of_the_clients_key(path: str, tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as far, running(**config_of_sync(far)) as near:
        _, key = await made(far)
        for headers in (bearer(key), bearer("wr-no"), {}, {**bearer(key), "anthropic-version": "2023-06-01"}):
            found = []
            for run in (near, far):
                async with run.session.get(run.url + path, headers=headers) as answer:
                    found.append((answer.status, await answer.read()))
            assert found[0] == found[1]


async def test_a_model_without_logs_ends_no_deltas_of_others_behind_keys(tmp_path: Path) -> None:
    """The models of a gateway with keys are unknown here, so that all of them have one label."""
    async with (
        FakeReplica([answers()], listing=models("m", "other")) as replica,
        keyed(tmp_path, replica, **kept_in(tmp_path)) as far,
        running(**config_of_sync(far)) as near,
    ):
        _, key = await made(far)
        both = TwoGateways(near, far, replica)
        assert (await both.ask(CHAT, [LONG], key))[0] == 200
        preparers = far.gateway.extensions.preparers
        kept, preparers[:] = list(preparers), []
        assert (await both.ask(CHAT, [LONG], key, model="other"))[0] == 200
        preparers[:] = kept
        assert (await both.ask(CHAT, [LONG, SAID, NOW], key))[0] == 200
        assert await both.counts() == {"whole": 1, "off": 1, "delta": 1}


async def test_attempts_ask_for_the_form_once_a_pool_has_the_option() -> None:
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        form, forms = run.gateway[DeltaForm].of, run.gateway.extensions.forms
        assert form not in forms
        for _ in range(2):
            await reload(run, replica, pools=[{"replicas": [replica.url], "delta": True}])
            assert forms.count(form) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_says_whether_its_client_wanted_it_stored(stream: bool, tmp_path: Path) -> None:
    """The turn is kept in any case, which is told by the names, not by the response."""
    async with FakeReplica([engine(RESPONSES, stream=stream)]) as replica, two_gateways(replica, tmp_path) as both:
        for store in (False, True):
            for turns in ([LONG], [LONG, SAID, NOW]):
                code, _, raw = await both.ask(RESPONSES, turns, stream=stream, store=store)
                other = b'"store":%b' % (b"false" if store else b"true")
                assert (code, b'"store":%b' % (b"true" if store else b"false") in raw, other in raw) == (200, True, False)
        assert await both.counts() == {"whole": 2, "delta": 2}


async def test_a_missing_page_of_a_proxy_between_the_gateways_changes_no_later_request() -> None:
    """A replica without the path of an API gets its requests in chat. A gateway has all paths."""
    page = writes(http(404, b"<html>Not Found</html>", "text/html"))
    async with FakeReplica([page, engine(RESPONSES, stream=False)]) as far, running(**delta_config(far.url)) as near:
        found = []
        for _ in range(2):
            async with near.session.post(near.url + RESPONSES, json=body_of(RESPONSES, [LONG])) as answer:
                found.append(answer.status)
        assert found == [404, 200]
        assert [request.path for request in far.requests] == [RESPONSES, RESPONSES]
