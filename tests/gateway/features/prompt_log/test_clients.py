"""The modules for clients in `docs/clients/` give the names of the vectors, or refuse."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import running
from tests.gateway.features.prompt_log.kept import SAID, kept_in
from tests.gateway.features.prompt_log.test_vectors import VECTORS
from tests.support.compiled import documented
from tests.support.fakes import FakeReplica, answers
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


def test_the_client_in_python_refuses_a_custom_call() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    with pytest.raises(ValueError, match="custom"):
        module().head([{"role": "assistant", "content": None, "tool_calls": [call]}])


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


async def test_a_chat_survives_a_lost_answer_a_purge_and_a_second_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(CLIENTS)
    module: Any = importlib.import_module("prompt_log_chat")
    async with FakeReplica([answers()]) as replica, running(replica, **kept_in(tmp_path)) as run:

        def conversation() -> None:
            chat, other = (module.Chat(run.url, "k", "m", "talk") for _ in range(2))
            assert chat.say("one")
            assert chat.say("two")
            assert len(replica.requests[-1].json["messages"]) == 3
            lost = module.Chat(run.url, "k", "m", "talk")
            lost.messages, lost.head = chat.messages[:2], "gone"
            assert lost.recover("two"), "the answer to the second turn was lost"
            assert (lost.messages, lost.head) == (chat.messages, chat.head)
            assert not lost.recover("never said")
            with sqlite3.connect(tmp_path / "state.db") as file:
                file.execute("delete from warmroute_responses")
                file.commit()
            assert chat.say("three"), "the whole is sent again"
            assert len(replica.requests[-1].json["messages"]) == 5
            assert chat.say("four")
            other.messages, other.head = list(chat.messages), chat.head
            assert chat.say("from here")
            assert not other.say("from there")
            assert not other.say("still there")
            other.merge()
            texts = [message["content"] for message in other.messages]
            said = ["one", "two", "three", "four", "from here", "from there", "still there"]
            assert texts == [text for each in said for text in (each, SAID["content"])]
            assert other.say("and on")
            chat.merge()
            assert (chat.messages, chat.head) == (other.messages, other.head), "it had said nothing new"

        await asyncio.to_thread(conversation)
        page = (ROOT / "docs" / "prompt-log.md").read_text("utf-8")
        source = (CLIENTS / "prompt_log_chat.py").read_text("utf-8")
        assert "\n".join(source.partition("def told")[2].splitlines()[2:4]) in page, "the page shows the same parser"
        assert module.told('input="pl1_a", length=2, kept=?0, ref') == {
            "input": "pl1_a",
            "length": 2,
            "kept": False,
            "ref": True,
        }


def test_the_parser_on_the_page_reads_a_header() -> None:
    node = shutil.which("node") or missing("Node is missing")
    page = (ROOT / "docs" / "prompt-log.md").read_text("utf-8")
    program = page.partition("```js\n")[2].partition("```")[0]
    header = json.dumps('input="pl1_a", length=2, kept=?0, ref')
    command = [node, "-e", f"{program}console.log(JSON.stringify(told({header})))"]
    printed = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    assert json.loads(printed) == {"input": "pl1_a", "length": 2, "kept": False, "ref": True}
