"""The generations of this process that belong to tokens.

    start ──► a task: claims the token in the store ──► the lifecycle of any request ──► the turn is stored: the token has ended
                        │                                                            ├── the store is late: it is tried again
                        └── it is another's now: nothing is generated                └── there is none: the token is free again
    every TICK_S: a token that was stopped or taken over elsewhere, or whose key was revoked, ends its generation
    every RENEW_S: the generations are alive

The task belongs to the process: a client that leaves, at any time, changes nothing. A shutdown waits for generations as for
requests; unfinished ones end, and their tokens are free. Places are shared with responses in the background.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from gateway.core import Core
from gateway.database.failures import StoreError, StoreFailed
from gateway.dialects.api_request import ApiRequest
from gateway.errors import GatewayError, over_budget, shutting_down
from gateway.features.histories.lazy import LazyStore
from gateway.features.prompt_log.bases import log_error, not_answering
from gateway.features.prompt_log.once.request import OnceRequest
from gateway.features.prompt_log.once.run import OnceRun
from gateway.features.runs.beginning import places_full
from gateway.features.runs.event_log import Logs
from gateway.features.runs.places import RunPlaces
from gateway.features.runs.process_runs import TICK_S, ProcessRuns
from gateway.features.runs.runs import Runs
from gateway.request.client import Caller
from gateway.request.exchange import Exchange

if TYPE_CHECKING:
    from gateway.features.prompt_log.once.store import OnceStore, StoredToken, TokenKey

log = logging.getLogger("warmroute.state")

MAX_UNKEPT: Final = 1000
_TRIES: Final = 5  # to store a late turn, and to free a token, while the store does not answer


class OnceRuns(ProcessRuns[OnceRun]):
    """The generations of one process (see the module), by their tokens. pause_s: between two attempts to end one in the store,
    while that does not answer.
    """

    unsynchronized = "tokens cannot be compared with the store"

    def __init__(self, core: Core, state: LazyStore[Any]) -> None:
        runs = core.part(Runs)  # of the same feature as the store
        super().__init__(runs.logs if runs is not None else Logs(), core.clock)
        self._places = runs.places if runs is not None else RunPlaces(0, 0)
        self._core = core
        self._state = state
        self._store: OnceStore | None = None
        self._unkept: dict[TokenKey, OnceRun] = {}  # ended, whole, and only in the log
        self._begun = 0
        self._closing = False
        self.pause_s = TICK_S

    @property
    def places(self) -> RunPlaces:
        """The places of background work, which generations take."""
        return self._places

    async def open(self) -> OnceStore:
        """Raises StoreFailed."""
        if self._store is None:
            state = await self._state.get()
            from gateway.features.prompt_log.once.store import OnceStore

            if self._store is None:  # else another request has opened it in the meantime
                self._store = OnceStore(state.database, self._core.wall_clock)
                self._state.sweeps.append(self._store.purge)
        return self._store

    def find(self, key: TokenKey) -> OnceRun | None:
        """The generation of a token that runs here, or whose whole answer is only here."""
        return self._runs.get(key) or self._unkept.get(key)

    def is_mine(self, runner: str) -> bool:
        """True for a runner of this process."""
        return runner.startswith(self.runner)

    def forget(self, run: OnceRun) -> None:
        """Drops an answer that is only here. Idempotent."""
        if self._unkept.get(run.key) is run:
            del self._unkept[run.key]

    # -- starts

    def start(self, exchange: Exchange, key: TokenKey, digest: str, seen: StoredToken | None) -> OnceRun:
        """Starts a generation, which takes the parsed request, and claims its token. seen: the token as it is stored.

        Raises GatewayError 413, 429 or 503.
        """
        if self._core.running.draining or self._closing:
            raise shutting_down()
        account = exchange.request.lease.account
        if not self._places.admit(key[0], account.client):
            raise places_full(self._places, key[0])
        lease = account.lease()
        if not lease.grow(len(exchange.api.body)):
            lease.close()
            self._places.release(key[0], account.client)
            raise over_budget(0, account.largest, len(exchange.api.body))
        self._begun += 1
        id_ = f"{self.runner}-{self._begun}"
        run = OnceRun(key, id_, digest, self.logs, account.lease(), self._core.clock, stream=exchange.api.stream)
        run.api, exchange.api = exchange.api, stub_of(exchange.api)
        run.api.strip_usage = False  # a follower's stream is without it, if that has not asked for it
        run.request = request = OnceRequest(exchange.request, run, lease)
        self._runs[key] = run
        self._active.set()
        work = self._run(run, request, exchange.caller, seen)
        run.task = asyncio.get_running_loop().create_task(work, name=f"once {id_}")
        return run

    async def _run(self, run: OnceRun, request: OnceRequest, caller: Caller, seen: StoredToken | None) -> None:
        run.started = True
        try:
            outcome = await self._claimed(run, seen)
            run.claimed.set_result(outcome)
            if outcome is True and run.stopped is None and run.api is not None:
                api, run.api = run.api, None
                await self._core.lifecycle.run(request, api, caller)
        except (asyncio.CancelledError, ConnectionError):
            if run.stopped is None and not (self._closing or self._core.running.over):
                raise
        finally:
            run.settling = True
            if not run.claimed.done():
                run.claimed.set_result(run.stopped or shutting_down())
            await self._settle(run, request)

    async def _claimed(self, run: OnceRun, seen: StoredToken | None) -> bool | GatewayError:
        from gateway.features.prompt_log.once.store import MAX_TOKENS, TooManyTokensError

        try:
            store = await self.open()
            run.mark = store.ended(run.key, run.id)
            return await store.claim(run.key, run.digest, run.id, seen)
        except TooManyTokensError:
            text = f"You have {MAX_TOKENS:,} tokens ('once') of the last day, which is the maximum."
            return log_error(429, "too_many_tokens", text, "once")
        except StoreFailed as failure:
            return not_answering(failure)

    async def _settle(self, run: OnceRun, request: OnceRequest) -> None:
        """The end of a generation, however it ends."""
        key, client = run.key, request.lease.account.client
        try:
            if not run.kept:
                await self._store_late(run)
            if not run.kept:
                await self._withdraw(run)
        finally:
            request.lease.close()
            if self._runs.get(key) is run:
                del self._runs[key]
            if run.held and not run.kept and run.stopped is None and len(self._unkept) < MAX_UNKEPT:
                self._unkept[key] = run
            self._places.release(key[0], client)
            run.finish(complete=False)
            run.ended.set()

    async def _store_late(self, run: OnceRun) -> None:
        """Stores the turn of an answer that has gone out without it, because the store was late or failed: else another process
        would generate it again.
        """
        turn = run.turn
        for _ in range(_TRIES):
            if turn is None or turn.put_later is None or run.stopped is not None or self._closing:
                return
            try:
                turn.expires_at = await turn.put_later()
            except StoreFailed:
                await asyncio.sleep(self.pause_s)
            except StoreError:
                return
            else:
                return

    async def _withdraw(self, run: OnceRun) -> None:
        """Frees its token. If the store does not answer, that happens when the runner seems dead."""
        if isinstance(run.claimed.result(), bool) and not run.claimed.result():
            return
        for _ in range(_TRIES):
            try:
                await (await self.open()).withdraw(run.key, run.id)
            except StoreFailed as failure:
                log.warning("a token is not free before its runner seems dead", extra={"reason": str(failure)})
                if self._closing:
                    return
                await asyncio.sleep(self.pause_s)
            else:
                return

    # -- periodic work

    def _holds_ended(self) -> bool:
        for run in list(self._unkept.values()):
            if self.logs.find(run.log_key) is None:
                self.forget(run)
        return bool(self._unkept)

    async def _synchronize(self) -> None:
        mine, theirs = [run for run in self._runs.values() if run.mark and run.claimed.done()], self.watched.keys()
        for run in mine:
            await self._require_valid(run)
        if not (mine or theirs):
            return
        store = await self.open()
        if mine:
            there = await store.mine([run.id for run in mine])
            for run in mine:
                if run.id not in there:
                    run.stop(stopped())
            await self._renew(lambda: store.renew([run.id for run in mine]))
        if theirs:
            self.watched.end_missing(await store.running_among(theirs), theirs)

    async def _require_valid(self, run: OnceRun) -> None:
        """Stops a generation whose caller is refused now."""
        callers, request = self._core.callers, run.request
        if request is None:
            return
        try:
            if callers.looks_up:
                await callers.look_up(request.headers)
            callers.of(request)
        except GatewayError as error:
            if error.status < 500:  # else keys cannot be read now
                run.stop(error)

    async def close(self) -> None:
        """Ends all generations. Idempotent."""
        self._closing = True
        await self._end_all(lambda run: run.stop(shutting_down()))


def stub_of(api: ApiRequest) -> ApiRequest:
    """A parsed request without its body, for a request that only follows."""
    made = ApiRequest(api.model, None, "", stream=api.stream, metered=False, body=b"")
    made.alias, made.strip_usage = api.alias, api.strip_usage
    return made


def stopped() -> GatewayError:
    text = "The generation of this token was stopped. Send the request again; the token is free."
    return log_error(409, "once_stopped", text, "once")
