"""Names of a large body, as an operation of the parser process."""

from __future__ import annotations

from gateway.dialects.json_structure import exceeds, too_complex
from gateway.features.prompt_log.header import invalid
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.forms import LogNames, names_in


def compute(body: bytes, form: str) -> tuple[str, int, bytes, tuple[bytes, ...]]:
    """The fields of the body's LogNames. Raises GatewayError 400 or 413."""
    if exceeds(body):
        raise too_complex()
    names = named(body, form)
    return names.frame, names.length, names.chain, names.latest


def named(body: bytes, form: str) -> LogNames:
    """Raises GatewayError 400."""
    try:
        return names_in(body, form)
    except NoNameError as error:
        raise invalid(f"This conversation has no name: {error.reason}.", error.param) from None
