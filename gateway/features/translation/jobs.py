"""Translation of a large body, as an operation of the parser process."""

from __future__ import annotations

from gateway.dialects.json_structure import exceeds, too_complex
from gateway.features.translation.table import TRANSLATIONS


def translate(body: bytes, name: str) -> tuple[bytes, bytes, list[str]]:
    """The fields of a TranslatedRequest. name: of the dialect. Raises GatewayError."""
    if exceeds(body):
        raise too_complex()
    translated = TRANSLATIONS[name].request(body)
    return translated.body, translated.echo, list(translated.left_out)
