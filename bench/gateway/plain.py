"""A plain aiohttp proxy with round robin, as a minimal baseline.

python -m bench.gateway.plain PORT URL...
"""

from __future__ import annotations

import asyncio
import sys

from aiohttp import ClientSession, TCPConnector, web


async def serve(port: int, replicas: list[str]) -> None:
    session, turn = ClientSession(connector=TCPConnector(limit=0)), 0

    async def forward(request: web.Request) -> web.StreamResponse:
        nonlocal turn
        turn += 1
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        async with session.post(replicas[turn % len(replicas)] + request.path, data=body, headers=headers) as upstream:
            answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]})
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                await answer.write(chunk)
            return answer

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2:]))
