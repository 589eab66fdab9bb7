"""The scope of a request's prompt: its model, its tenant, its session."""

from __future__ import annotations

from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest, router_prompt
from gateway.request.client import Caller
from router import Prompt, session_key
from router.types import MOST_SEQUENCES


def prompt_of(live: Live, api: ApiRequest, caller: Caller, label: str, address: str = "", adapter: str = "") -> Prompt:
    """A request's prompt for the router, seeded so that different models and cache salts never match each other, nor, with
    `routing.isolation: tenant`, different tenants.

    label: the model's bounded name. address: of the client. adapter: its name, or "".
    """
    client, session = caller.number(address), session_of(api, caller, label)
    prompt = router_prompt(api, live.blocks, label, session, client, scope_of(live, caller))
    prompt.origin, prompt.images = caller.origin(address, client), api.images
    if adapter:
        prompt.adapter = adapter
    if api.answers > 1:
        prompt.sequences = sequences_of(api)
    if caller.agent or caller.parent:
        prompt.parent_key = _parent_key(api, caller, label)
    return prompt


def sequences_of(api: ApiRequest) -> int:
    """The sequences that an engine runs for a request, as far as they are believed: the client says how many."""
    return min(api.answers, MOST_SEQUENCES)


def session_of(api: ApiRequest, caller: Caller, label: str) -> tuple[str, int]:
    """The session of a request: its name, or "", and its number for the router's memory. The number may come from a less
    reliable name, because a name that never repeats does no harm there. Only generations show what a replica has of a session.
    """
    name = caller.session or api.session
    known = (name or caller.weak_session) if api.metered else ""
    return name, session_key(_agent_of(known, caller.agent), label, caller.tenant) if known else 0


def _parent_key(api: ApiRequest, caller: Caller, label: str) -> int:
    """The number of the agent that has started this one: of the same session, or of another one."""
    if not api.metered:
        return 0
    parent = _agent_of(caller.session, caller.parent) if caller.agent else caller.parent
    return session_key(parent, label, caller.tenant)


def _agent_of(session: str, agent: str) -> str:
    """A name for an agent of a session: headers have no line ends."""
    return f"{session}\n{agent}" if agent else session


def scope_of(live: Live, caller: Caller) -> tuple[str, ...]:
    """Names that separate the prompts of this caller from others, beside the model and the cache salt."""
    return (caller.tenant,) if live.isolates_tenants else ()
