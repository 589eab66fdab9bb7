"""Authorities and certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.tools import tool

_EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Paths of PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; its own is `ca`. folder: for its files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        subject = ["-subj", f"/CN={name}", "-days", "30"]
        _openssl("req", "-x509", *_EC, "-keyout", self._key, "-out", self.ca, *subject)

    def certificate(self, name: str, *, san: str = "DNS:replica.test", expired: bool = False) -> Certificate:
        cert, key, request = (self._folder / f"{self._name}-{name}.{end}" for end in ("pem", "key", "csr"))
        _openssl("req", *_EC, "-keyout", key, "-out", request, "-subj", f"/CN={name}", "-addext", f"subjectAltName={san}")
        days = ["-days", "-1" if expired else "30"]
        signed = ["-CA", self.ca, "-CAkey", self._key, "-copy_extensions", "copy"]
        _openssl("x509", "-req", "-in", request, "-out", cert, *signed, *days)
        return Certificate(cert, key)


def _openssl(*arguments: object) -> None:
    subprocess.run([tool("openssl"), *map(str, arguments)], check=True, capture_output=True)
