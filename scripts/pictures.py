"""Pictures of the live page for the documents, of a real gateway with simulated replicas under made-up traffic.

    python -m scripts.pictures [--seconds 90] [--out docs/images] [--only NAME,...]

Needs playwright and a chromium: `make install` and `make tools`, or Debian's. It writes ui-*.png. Look at them before you
commit them: that they are good is for eyes to say.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from PIL import Image
from playwright.async_api import Page, async_playwright

from gateway.commands.demo.processes import Process, admin_url, listening_url, ready_url

ROOT = Path(__file__).parent.parent
TENANTS = ("search", "ide", "support-bot")
MODELS = (("coder", "qwen3-coder-480b", 3), ("chat", "llama-3.3-70b", 1))
WORDS = "the cache holds what was computed before and a request that begins alike need not compute it again"
PRICES = {"*": {"input": 0.9, "cached_input": 0.09, "output": 2.7}}
CONVERSATIONS = 18  # at once
WORKFLOWS = ("panel", "cascade", "hedge")  # of docs/workflows
Json = dict[str, Any]


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS.split(), k=words))


@dataclass(frozen=True, slots=True)
class Stage:
    """A gateway that runs. keys: secrets, by tenant."""

    url: str
    admin: str
    keys: dict[str, str]
    session: aiohttp.ClientSession


@contextlib.asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    with contextlib.ExitStack() as ends:
        pools = []
        for pool, model, count in MODELS:
            replicas = []
            for number in range(1, count + 1):
                flags = ["--engine", "sim", "--port", "0", "--served-model-name", model, "--kv-tokens", "60000"]
                process = Process("replica", ["replica", *flags, "--prefill-rate", "6000", "--speed", "1"])
                ends.callback(process.stop)
                url = await asyncio.to_thread(process.wait_for, ready_url)
                replicas.append({"url": url, "name": f"{pool}-{number}"})
            pools.append({"name": pool, "models": [model], "replicas": replicas})
        file = folder / "warmroute.yaml"
        settings: Json = {
            "pools": pools,
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "workers": 2,
            "prices": PRICES,
        }
        (folder / "workflows").mkdir()
        for name in WORKFLOWS:
            source = (ROOT / "docs" / "workflows" / f"{name}.yaml").read_text()
            source = source.replace("qwen3-8b", MODELS[0][1]).replace("qwen3-32b", MODELS[1][1]).replace("600", "200")
            (folder / "workflows" / f"{name}.yaml").write_text(source)
        settings["workflows"] = {"directory": f"{folder}/workflows"}
        settings |= {"keys": {"url": f"sqlite:///{folder}/keys.sqlite"}, "state": {"url": "off"}, "snapshot": {"file": "off"}}
        file.write_text(yaml.safe_dump(settings))
        gateway = Process("gateway", ["serve", "--config", str(file)])
        ends.callback(gateway.stop)
        url = await asyncio.to_thread(gateway.wait_for, listening_url)
        admin = await asyncio.to_thread(gateway.wait_for, admin_url)
        async with aiohttp.ClientSession() as session:
            yield Stage(url, admin, await made_keys(session, admin), session)


async def made_keys(session: aiohttp.ClientSession, admin: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    limits: dict[str, Json] = {
        "search": {"budget_usd_day": 1.2, "requests_per_minute": 1200},
        "ide": {"budget_usd_day": 5.0, "budget_usd_month": 80.0, "uncached_tokens_per_minute": 2_000_000},
        "support-bot": {"models": ["llama-*"], "expires_at": "2031-01-01"},
    }
    for tenant in TENANTS:
        body = {"tenant": tenant, "name": f"{tenant} production", **limits[tenant]}
        async with session.post(f"{admin}/warmroute/keys", json=body) as answer:
            keys[tenant] = (await answer.json())["key"]
    return keys


class Traffic:
    """Conversations of coding agents: a head that many share, then turns that extend each other."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._chance = random.Random(11)
        self._heads = [text(self._chance, words) for words in (4200, 2600, 1900, 1500, 1200, 900, 700, 400)]

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CONVERSATIONS):
                group.create_task(self._client(random.Random(number), stop))
            group.create_task(self._runs(stop))

    async def _runs(self, stop: asyncio.Event) -> None:
        headers = {"Authorization": f"Bearer {self._stage.keys['ide']}"}
        for number in itertools.count():
            if stop.is_set():
                return
            messages = [{"role": "user", "content": f"{number} {text(self._chance, 3000)}"}]
            body = {"workflow": WORKFLOWS[number % len(WORKFLOWS)], "inputs": {"messages": messages}}
            async with self._stage.session.post(f"{self._stage.url}/v1/workflows/runs", json=body, headers=headers) as answer:
                await answer.read()

    async def _client(self, chance: random.Random, stop: asyncio.Event) -> None:
        while not stop.is_set():
            tenant = chance.choices(TENANTS, weights=(3, 4, 2))[0]
            model = MODELS[1][1] if tenant == "support-bot" else MODELS[0][1]
            head = (
                self._heads[-2 + chance.randrange(2)]
                if tenant == "support-bot"
                else self._heads[min(5, int(chance.expovariate(0.7)))]
            )
            if chance.random() < 0.08:
                head = text(chance, 900)  # that nobody has sent before
            messages = [{"role": "system", "content": head}]
            for _ in range(chance.randint(2, 9)):
                messages.append({"role": "user", "content": text(chance, chance.randint(20, 350))})
                answer = await self._ask(tenant, model, messages, chance)
                messages.append({"role": "assistant", "content": answer})
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), chance.expovariate(1.0))
                if stop.is_set():
                    return

    async def _ask(self, tenant: str, model: str, messages: list[Json], chance: random.Random) -> str:
        body = {"model": model, "messages": messages, "stream": True, "max_tokens": chance.randint(20, 160)}
        body["stream_options"] = {"include_usage": True}
        headers = {"Authorization": f"Bearer {self._stage.keys[tenant]}"}
        if chance.random() < 0.01:
            body["model"] = "qwen3-code"  # a name that nobody serves
        async with self._stage.session.post(f"{self._stage.url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
            if answer.status == 429:
                await asyncio.sleep(5)
        return text(random.Random(len(messages)), 60)


async def overview(page: Page) -> None:
    await page.get_by_role("img", name="Requests per second").wait_for()


async def replicas(page: Page) -> None:
    await page.get_by_role("button", name="Drain coder-1").wait_for()


async def requests(page: Page) -> None:
    await page.get_by_role("button", name="explain request").nth(8).wait_for()


async def explain(page: Page) -> None:
    await requests(page)
    await page.get_by_role("button", name="Pause").click()
    rows = page.get_by_role("row").filter(has_text="coder-").filter(has_text="200")
    await rows.nth(2).get_by_role("button").click()
    await page.get_by_text("The decision").wait_for()


async def runs(page: Page) -> None:
    row = page.get_by_role("row").filter(has_text="hedge").filter(has_text="completed")
    await row.get_by_role("button").first.click(timeout=90_000)


async def index(page: Page) -> None:
    for _ in range(3):
        await page.locator("g[aria-expanded=false]").first.click()
        await page.wait_for_timeout(700)
    await page.locator("g[aria-level='2']").first.click()
    await page.get_by_text("Holders", exact=True).wait_for()


async def keys(page: Page) -> None:
    await page.get_by_text("support-bot production").wait_for()


@dataclass(frozen=True, slots=True)
class Picture:
    fragment: str
    ready: Callable[[Page], Any]
    scheme: str = "light"
    size: tuple[int, int] = (1280, 800)


PICTURES = {
    "overview": Picture("overview", overview),
    "overview-dark": Picture("overview", overview, "dark"),
    "replicas": Picture("replicas", replicas, size=(1280, 560)),
    "requests": Picture("requests", requests),
    "runs": Picture("runs", runs, size=(1280, 560)),
    "explain": Picture("requests", explain),
    "index": Picture("index", index),
    "index-dark": Picture("index", index, "dark"),
    "keys": Picture("keys", keys, size=(1280, 460)),
    "phone": Picture("overview", overview, size=(360, 740)),
    "phone-requests": Picture("requests", requests, "dark", (360, 740)),
}


def save(picture: bytes, path: Path) -> None:
    """With 256 colours, which makes it a third as large."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


async def take(stage: Stage, names: list[str], out: Path) -> None:
    program = ROOT / ".tools" / "bin" / "chromium"
    path = str(program) if program.exists() else shutil.which("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in names:
            picture = PICTURES[name]
            width, height = picture.size
            context = await browser.new_context(color_scheme=picture.scheme, viewport={"width": width, "height": height})  # type: ignore[arg-type]
            page = await context.new_page()
            page.on("console", lambda message: print("console:", message.text))
            page.on("pageerror", lambda error: print("error:", error))
            await page.goto(f"{stage.admin}/warmroute/ui/#{picture.fragment}")
            await picture.ready(page)
            await page.wait_for_timeout(2500)
            save(await page.screenshot(), out / f"ui-{name}.png")
            print(out / f"ui-{name}.png")
            await context.close()
        await browser.close()


async def run(options: argparse.Namespace) -> None:
    names = options.only.split(",") if options.only else list(PICTURES)
    with tempfile.TemporaryDirectory() as folder:
        async with staged(Path(folder)) as stage:
            stop = asyncio.Event()
            traffic = asyncio.create_task(Traffic(stage).run(stop))
            await asyncio.sleep(options.seconds)
            await take(stage, names, Path(options.out))
            stop.set()
            await traffic


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="of traffic before the first picture")
    parser.add_argument("--out", default=str(ROOT / "docs" / "images"))
    parser.add_argument("--only", default="", help=", ".join(PICTURES))
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
