"""Codex, OpenCode and Claude Code as programs (`scripts/clients.sh`): without a network, in homes and folders of their own."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Final

from tests.support.paths import ROOT

AGENTS: Final = Path(os.environ.get("WARMROUTE_CLIENTS", ROOT / ".clients")) / "node_modules" / ".bin"
AUTHORITIES: Final = ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")  # variables with a file of certificates that the agents trust
LIMIT_S: Final = 600.0  # against a program that hangs; a busy machine needs minutes


async def run(home: Path, *command: str, said: str = "", limit_s: float = LIMIT_S, **env: str) -> str:
    """Run an agent in a home of its own; returns what it has printed. said: on its standard input. Raises AssertionError with
    that if its status is not 0, TimeoutError.
    """
    folder = home / "work"
    folder.mkdir(parents=True, exist_ok=True)  # it is there when a session goes on
    (folder / "a-file.txt").write_text("x", encoding="utf-8")
    kept = {name: os.environ[name] for name in ("PATH", *AUTHORITIES) if name in os.environ}
    place = {**kept, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), **env}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=place,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(said.encode()), limit_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = out.decode("utf-8", "replace")
    assert process.returncode == 0, text
    return text


async def codex(home: Path, url: str, number: int, *more: str, calls: str = "", limit_s: float = LIMIT_S) -> str:
    """more: lines of its provider's configuration. calls: what its message asks for, for a simulated replica."""
    config = home / ".codex" / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    lines = ['model = "m"', 'model_provider = "warm"', "[model_providers.warm]", 'name = "warm"', f'base_url = "{url}/v1"']
    config.write_text("\n".join([*lines, *more, 'wire_api = "responses"', 'env_key = "X_KEY"\n']), encoding="utf-8")
    options = "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"
    message = f"list the files, number {number}{calls}"
    return await run(home, str(AGENTS / "codex"), "exec", *options, message, limit_s=limit_s, X_KEY="k")


async def opencode(home: Path, url: str, number: int, provider: str, calls: str = "", limit_s: float = LIMIT_S) -> str:
    """calls: as above; on its standard input, for it puts what is on its command line between quotes."""
    config = home / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    options = {"options": {"baseURL": f"{url}/v1", "apiKey": "k"}, "models": {"m": {"name": "m"}}}
    providers = {"warm": {"npm": "@ai-sdk/openai-compatible", **options}, "anthropic": options}
    model = f"{provider}/m"
    quiet = {"autoupdate": False, "share": "disabled", "model": model, "small_model": model}
    config.write_text(json.dumps({**quiet, "provider": providers}), encoding="utf-8")
    message = f"list the files, number {number}"
    return await run(home, str(AGENTS / "opencode"), "run", "-m", model, message, said=calls, limit_s=limit_s)


async def claude_code(home: Path, url: str, number: int, calls: str = "", *more: str, limit_s: float = LIMIT_S) -> str:
    """Asks for models of its own, which are aliases; it is told of no other address, and of a proxy that is not there.

    more: options.
    """
    here = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "k", "NO_PROXY": "127.0.0.1"}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    message = f"list the files, number {number}{calls}"
    options = "--allowedTools", "Bash", *more
    return await run(home, str(AGENTS / "claude"), "-p", message, *options, limit_s=limit_s, **here, **quiet)
