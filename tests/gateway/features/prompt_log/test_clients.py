"""The modules for clients in `docs/clients/` give the names of the vectors, or refuse."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.features.prompt_log.test_vectors import VECTORS
from tests.support.compiled import documented
from tests.support.paths import ROOT
from tests.support.tools import missing

CLIENTS = ROOT / "docs" / "clients"
CHAT = [(each, body) for each in VECTORS["vectors"] for body in each.get("bodies", {}).get("chat", ())]
pytestmark = documented
REFUSED = {"image", "image-detail", "image-url", "file", "names-and-more", "unknown-part"}
PROGRAM = """
import { readFileSync } from "node:fs";
import * as client from %s;
const { numbers, vectors } = JSON.parse(readFileSync(%s));
const out = { numbers: {}, hashes: {}, heads: [] };
for (const bits of Object.keys(numbers)) out.numbers[bits] = client.jcs(Buffer.from(bits, "hex").readDoubleBE());
for (const { name, entries, frame } of vectors) {
  let chain = client.EMPTY;
  const heads = (entries ?? []).map((entry) => client.headName((chain = client.extend(chain, entry))));
  out.hashes[name] = { heads, frame: frame && client.frameName(frame) };
}
for (const { name, bodies } of vectors)
  for (const body of bodies?.chat ?? []) {
    let head = "refused";
    try { head = client.head(body.messages); } catch {}
    out.heads.push([name, head]);
  }
console.log(JSON.stringify(out));
"""


def module() -> Any:
    spec = importlib.util.spec_from_file_location("client_of_the_docs", CLIENTS / "prompt_log.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def expected(refused: set[str]) -> list[tuple[str, str]]:
    return [(vector["name"], "refused" if vector["name"] in refused else vector["head"]) for vector, _ in CHAT]


@pytest.mark.parametrize("name", ["prompt_log.py", "prompt_log.mjs"])
def test_a_client_is_short(name: str) -> None:
    assert len((CLIENTS / name).read_text("utf-8").splitlines()) <= 60


def test_the_client_in_python_names_what_it_reads() -> None:
    client, found = module(), []
    for vector, body in CHAT:
        try:
            head = client.head(body["messages"])
        except ValueError:
            head = "refused"
        found.append((vector["name"], head))
    assert found == expected(REFUSED | {"numbers"})


def test_the_client_in_javascript_has_the_names_of_all_vectors(tmp_path: Path) -> None:
    node = shutil.which("node") or missing("node is missing")
    vectors = Path(__file__).with_name("vectors.json")
    program = tmp_path / "program.mjs"
    program.write_text(PROGRAM % (json.dumps((CLIENTS / "prompt_log.mjs").as_uri()), json.dumps(str(vectors))))
    told = json.loads(subprocess.run([node, program], capture_output=True, check=True, timeout=60).stdout)
    assert told["numbers"] == VECTORS["numbers"]
    for vector in VECTORS["vectors"]:
        if "frame_name" in vector:
            assert told["hashes"][vector["name"]] == {"heads": vector.get("heads", []), "frame": vector["frame_name"]}
    assert [tuple(each) for each in told["heads"]] == expected(REFUSED)
