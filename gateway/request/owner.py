"""The owner of a request's objects: what features store for it, only the same owner may read."""

from __future__ import annotations

from hashlib import blake2b

from gateway.request.client import Caller, ClientRequest


def owner(request: ClientRequest, caller: Caller) -> str:
    """By its tenant, else by its credentials (`owner_of`)."""
    headers = request.headers
    return owner_of(caller.tenant, headers.get("Authorization"), headers.get("X-Api-Key"))


def owner_of(tenant: str, authorization: str | None, api_key: str | None) -> str:
    """The tenant, else a digest of the credentials, else "" for clients without credentials.

    authorization, api_key: these headers. The texts may have bytes that are not UTF-8, as headers may.
    """
    if tenant:
        octets = tenant.encode("utf-8", "surrogateescape")
        return f"tenant:{tenant}" if tenant.isprintable() else f"octets:{octets.hex()}"  # databases refuse such texts
    credentials = authorization or api_key or ""
    return f"key:{blake2b(credentials.encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}" if credentials else ""
