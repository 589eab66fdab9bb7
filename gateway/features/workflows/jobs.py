"""Compilation of a program, as an operation of the parser process: hostile text may take 0.1 s."""

from __future__ import annotations

import orjson

from gateway.features.workflows.language.compiling import PYTHON, compile_text
from gateway.features.workflows.language.faults import DocumentError


def compile_program(body: bytes) -> tuple[bytes]:
    """The document of a program, as JSON. Raises GatewayError."""
    try:
        return (orjson.dumps(compile_text(body.decode("utf-8", "surrogatepass"), PYTHON).source),)
    except DocumentError as error:
        raise error.answer() from None
