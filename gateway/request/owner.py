"""The owner of a request's objects: only the same owner may read the objects that features store for it."""

from __future__ import annotations

from hashlib import blake2b

from gateway.request.client import Caller, ClientRequest


def owner(request: ClientRequest, caller: Caller) -> str:
    """The owner by tenant, else by credentials (`owner_of`)."""
    headers = request.headers
    return owner_of(caller.tenant, headers.get("Authorization"), headers.get("X-Api-Key"))


def owner_of(tenant: str, authorization: str | None, api_key: str | None) -> str:
    """The tenant, else a digest of the credentials, else "" for clients without credentials.

    authorization, api_key: the values of these headers, which may not be UTF-8.
    """
    if tenant:
        octets = tenant.encode("utf-8", "surrogateescape")
        return f"tenant:{tenant}" if tenant.isprintable() else f"octets:{octets.hex()}"  # databases refuse such texts
    credentials = authorization or api_key or ""
    return f"key:{blake2b(credentials.encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}" if credentials else ""
