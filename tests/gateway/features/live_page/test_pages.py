"""The files of the live page: what a browser may do with them, and that they are in every package."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.gateway.conftest import running
from tests.support.compiled import COMPILED
from tests.support.fakes import FakeReplica
from tests.support.packages import Kind, packed
from tests.support.paths import ROOT

STATIC = ROOT / "gateway" / "features" / "live_page" / "static"
MOST_LINES = 200  # of a file of ours
MOST_BYTES = 400_000  # of all of them
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
OWN = [name for name in FILES if not name.startswith("vendor/")]


async def test_every_file_is_served_with_a_strict_policy() -> None:
    async with FakeReplica() as one, running(one, admin_key="secret") as run:
        for name in ["", *FILES]:
            code, headers, raw = await run.get(f"/warmroute/ui/{name}", headers={"Accept-Encoding": "identity"})
            assert code == 200, "also without the key: there is nothing of the gateway in it"
            assert raw == (STATIC / (name or "index.html")).read_bytes()
            policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert not headers["Content-Type"].startswith("application/octet")


async def test_files_are_packed_and_not_sent_twice() -> None:
    async with FakeReplica() as one, running(one) as run:
        path = run.admin_url + "/warmroute/ui/app.js"
        async with run.session.get(path, headers={"Accept-Encoding": "gzip"}, auto_decompress=False) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert gzip.decompress(await answer.read()) == (STATIC / "app.js").read_bytes()
            etag = answer.headers["ETag"]
        zipped = {"Accept-Encoding": "gzip"}
        for known in (etag, f'"other", W/{etag}', "*"):
            async with run.session.get(path, headers={**zipped, "If-None-Match": known}) as again:
                assert (again.status, await again.read()) == (304, b"")
                assert again.headers["ETag"] == etag
        for known in ('"other"', etag.strip('"')[:8], "nonsense"):
            async with run.session.get(path, headers={**zipped, "If-None-Match": known}) as other:
                assert other.status == 200
        async with run.session.get(path, headers={"Accept-Encoding": "identity", "If-None-Match": etag}) as plain:
            assert (plain.status, await plain.read()) == (200, (STATIC / "app.js").read_bytes())
            assert plain.headers["ETag"] != etag, "it has other bytes"


@pytest.mark.parametrize(
    ("accepted", "zipped"),
    [
        ("gzip, deflate, br", True),
        ("br, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("*;q=0", False),
        ("identity", False),
        ("x-notgzip", False),
        ("", False),
    ],
)
async def test_a_file_is_packed_for_those_who_take_that(accepted: str, zipped: bool) -> None:
    async with FakeReplica() as one, running(one) as run:
        path = run.admin_url + "/warmroute/ui/app.js"
        async with run.session.get(path, headers={"Accept-Encoding": accepted}, auto_decompress=False) as answer:
            assert ("Content-Encoding" in answer.headers) is zipped
            raw = await answer.read()
        assert (gzip.decompress(raw) if zipped else raw) == (STATIC / "app.js").read_bytes()


async def test_a_path_leads_to_its_files_only() -> None:
    async with FakeReplica() as one, running(one) as run:
        async with run.session.get(run.admin_url + "/warmroute/ui", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "ui/")
        for name in (
            "none.js",
            "vendor",
            "vendor/",
            "%2e%2e/live.py",
            "..%2flive.py",
            "%2fetc%2fpasswd",
            "app.js%00",
            "x" * 5000,
        ):
            code, _, raw = await run.get(f"/warmroute/ui/{name}")
            assert code in (400, 404), name
            assert len(raw) < 1000
        async with run.session.get(run.url + "/warmroute/ui/") as answer:
            assert answer.status == 404, "not on the clients' port"


def test_what_is_not_ours_is_as_its_makers_have_it() -> None:
    manifest = json.loads((STATIC / "vendor" / "manifest.json").read_text("utf-8"))
    listed = {each["file"]: each for each in manifest["files"]}
    assert {name.removeprefix("vendor/") for name in FILES if name.startswith("vendor/")} == {*listed, "manifest.json"}
    for name, each in listed.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == each["sha256"], name
        assert re.fullmatch(r"\d+\.\d+\.\d+", each["version"])
        assert f"{each['package']}-LICENSE.txt".lower() in map(str.lower, listed)


def test_our_files_are_small_and_refer_to_nothing_outside() -> None:
    assert sum((STATIC / name).stat().st_size for name in FILES) < MOST_BYTES
    for name in OWN:
        text = (STATIC / name).read_text("utf-8")
        assert len(text.splitlines()) <= MOST_LINES, name
        assert not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|//cdn|\beval\(|innerHTML|dangerouslySet|document\.write", text
        ), name
        if name.endswith(".html"):
            assert "<style" not in text
            assert not re.search(r"<script(?![^>]*src=)", text)
            assert not re.search(r"\s(on\w+|style)=", text)
        if name.endswith((".js", ".css")):
            assert text.startswith(("//", "/*")), f"{name} begins by saying what it is"
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in FILES, f"{name} imports {imported}"


@pytest.mark.skipif(COMPILED, reason="a compiled copy has nothing to build packages of")
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_packages_have_all_files(kind: Kind, tmp_path: Path) -> None:
    assert {f"gateway/features/live_page/static/{name}" for name in FILES} <= packed(kind, tmp_path)
