"""Problems between values of the configuration that are valid by themselves: listeners and replicas at one address, two
replicas with one name, incomplete keys and certificates, tokens in clear text, model prefixes claimed by two pools, aliases of
aliases, prices out of the order of their dates, fallbacks that lead nowhere or in a circle, pools without any replica. Features
check their own sections (`hints.CLASHES`).

The values come by key, without the values that have a problem of their own (`ParsedConfig.good`), so that such a value does
not hide problems between others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gateway.config.aliases import Aliases, chains
from gateway.config.hints import CLASHES, SOURCES
from gateway.config.kinds import ROLES, unix_time
from gateway.config.listen import KEYWORDS, listener_problems
from gateway.config.parse import Key, Problem, key_name
from gateway.config.schema import (
    MAX_FALLBACKS,
    MAX_REPLICAS,
    Config,
    KeyConfig,
    PoolConfig,
    PriceConfig,
    ReplicaConfig,
    TlsConfig,
)
from gateway.config.sections import marked
from gateway.errors import first_names

ALIASES = "model_aliases"


def _wrong_keys(values: Mapping[Key, Any]) -> Iterator[Problem]:
    """Problems of the keys of operators, and of the listeners' certificate."""
    admin_key, read_key = values.get(("admin_key",)), values.get(("read_key",))
    if read_key and not admin_key:
        yield Problem(("read_key",), "WARMROUTE_READ_KEY needs WARMROUTE_ADMIN_KEY, for those who may change anything")
    if values.get(("tls", "key_file")) and not values.get(("tls", "cert_file")):
        yield Problem(("tls", "key_file"), "a key without a certificate: set tls.cert_file")
    if admin_key and read_key == admin_key:
        yield Problem(("read_key",), "WARMROUTE_READ_KEY is that of WARMROUTE_ADMIN_KEY: the holder could change everything")


def clashes(kind: type[Config], values: Mapping[Key, Any]) -> Iterator[Problem]:
    """All problems. kind: type of the whole file. values: of a file, by key. O(values)."""
    replicas = {key: value for key, value in values.items() if isinstance(value, ReplicaConfig)}
    yield from listener_problems(
        {name: values[name,] for name in KEYWORDS if (name,) in values},
        has_admin_key=bool(values.get(("admin_key",))),
        replicas={(*key, "url"): replica.url for key, replica in replicas.items()},
    )
    yield from _wrong_keys(values)
    if len(replicas) > MAX_REPLICAS:
        yield Problem(("pools",), f"at most {MAX_REPLICAS} replicas are possible, got {len(replicas)}")
    for key, first in repeated((key, replica.name) for key, replica in replicas.items()):
        name = replicas[key].name
        if replicas[key].url == replicas[first].url:
            yield Problem(key, f"the replica {name!r} is listed twice, first as {key_name(first)}")
        else:
            yield Problem(key, f"the name {name!r} is that of {key_name(first)} already; give each replica its own `name`")
    yield from _wrong_access(values, replicas)
    pools: dict[Key, str] = {
        key: value for key, value in values.items() if len(key) == 3 and key[0] == "pools" and key[2] == "name" and value
    }
    for key, first in repeated(pools.items()):
        yield Problem(key, f"the name {pools[key]!r} is that of {key_name(first)} already")
    prefixes: dict[Key, str] = {key: value for key, value in values.items() if len(key) == 4 and key[2] == "models"}
    for key, first in repeated(prefixes.items()):
        yield Problem(key, f"the model prefix {prefixes[key]!r} is claimed twice, first by {key_name(first)}")
    aliases: dict[str, str] = {str(key[1]): value for key, value in values.items() if len(key) == 2 and key[0] == ALIASES}
    for alias, model, further in chains(aliases):
        own = f"or add `{model}: {model}` if the model {model!r} is meant"
        text = f"{model!r} is itself an alias, of {further!r}: write that, {own}"
        yield Problem((ALIASES, alias), text)
    yield from _wrong_prices(values.get(("prices",), {}))
    yield from _wrong_roles(
        values, found=any((name,) not in values or sources(values[name,]) for name, sources in marked(kind, SOURCES))
    )
    for _, wrong in marked(kind, CLASHES):
        yield from wrong(values)
    if ("pools",) in values:  # else a fallback may name an invalid pool
        yield from _wrong_fallbacks(values["pools",], Aliases(aliases))


def _wrong_roles(values: Mapping[Key, Any], *, found: bool) -> Iterator[Problem]:
    """Pools without a replica that answers. found: sources may find some."""
    for key, value in values.items():
        if len(key) != 3 or key[0] != "pools":
            continue
        lists = {role: values.get((*key[:2], role)) for role in ROLES}  # None: an invalid one, shown already
        if key[2] == "replicas" and not value and not found and all(each == () for each in lists.values()):
            yield Problem(key, "at least one replica URL is expected, or a source in `discovery`")
        elif key[2] == "prefill" and value and lists["decode"] == () and not found:
            yield Problem(key, "replicas that only compute prompts answer nothing: list those that take them over in `decode`")


def _wrong_prices(prices: Mapping[str, Sequence[PriceConfig]]) -> Iterator[Problem]:
    """Dates out of order, and tiers that begin at the same length."""
    for model, versions in prices.items():
        for place, price in enumerate(versions):
            key = ("prices", model, *((place,) if len(versions) > 1 else ()))
            if place and not price.since:
                yield Problem((*key, "since"), "missing: from when on do these prices hold? A date is expected")
            elif place and versions[place - 1].since and unix_time(versions[place - 1].since) >= unix_time(price.since):
                text = (
                    f"{price.since} is not after {versions[place - 1].since}, the date of the prices before: give them in order"
                )
                yield Problem((*key, "since"), text)
            tiers = [tier.above for tier in price.tiers]
            if len(set(tiers)) < len(tiers):
                yield Problem((*key, "tiers"), "two tiers begin above the same number of prompt tokens")


def _wrong_access(values: Mapping[Key, Any], replicas: Mapping[Key, ReplicaConfig]) -> Iterator[Problem]:
    """Keys without a source or with two, certificates without a use, and one replica with two kinds of connections."""
    for key, value in values.items():
        if isinstance(value, KeyConfig) and bool(value.env) == bool(value.file):
            yield Problem(key, f"either env or file is expected, got {'both' if value.env else 'neither'}")
        if isinstance(value, TlsConfig) and value.key_file and not value.cert_file:
            yield Problem((*key, "key_file"), "it is the key of a cert_file, which is missing")
    first: dict[str, Key] = {}
    for key, replica in replicas.items():
        if replica.tls is not None and not replica.url.startswith("https:"):
            yield Problem((*key, "tls"), f"TLS needs an https URL, got {replica.url}")
        known = first.setdefault(replica.url, key)
        other = replicas[known]
        if (replica.key, replica.tls, replica.engine) != (other.key, other.tls, other.engine):
            yield Problem(key, f"{key_name(known)} has the same URL with another key, other TLS options or another engine")


def _wrong_fallbacks(pools: Sequence[PoolConfig], aliases: Aliases) -> Iterator[Problem]:
    """Fallbacks that lead nowhere, in a circle, or too far. O(pools): a chain is followed up to its maximum length."""
    named = {pool.name: pool for pool in Config(pools=tuple(pools)).pools}
    for place, (name, pool) in enumerate(named.items() if len(named) == len(pools) else ()):
        key, fallback = ("pools", place, "fallback"), pool.fallback
        if fallback is None:
            continue
        if fallback.pool == name:
            yield Problem((*key, "pool"), f"the pool {name!r} cannot be its own fallback")
        elif fallback.pool not in named:
            known = first_names([each for each in named if each != name]) or "none: there is no other pool"
            yield Problem((*key, "pool"), f"{fallback.pool!r} is no pool's name; possible are: {known}")
        elif wrong := _wrong_chain(name, named):
            yield Problem((*key, "pool"), wrong)
        if (further := aliases.of(fallback.model)) and further != fallback.model:
            yield Problem((*key, "model"), f"{fallback.model!r} is an alias, of {further!r}: write that")


def _wrong_chain(name: str, named: Mapping[str, PoolConfig]) -> str:
    """The problem of a chain of fallbacks that begins here; "": none. A circle is reported for each pool in it."""
    chain = [name]
    while (further := named[chain[-1]].fallback) is not None and further.pool in named:
        chain.append(further.pool)
        if further.pool == name:
            return f"the fallbacks form a circle: {' -> '.join(chain)}"
        if further.pool in chain[:-1]:
            return ""
        if len(chain) > MAX_FALLBACKS + 1:
            return f"the chain of fallbacks is too long: at most {MAX_FALLBACKS} pools may follow each other"
    return ""


def address_problem(config: Config, url: str) -> str:
    """The problem between a replica at this URL and this configuration's listeners; "": none."""
    listeners = {name: getattr(config, name) for name in KEYWORDS}
    problems = listener_problems(listeners, has_admin_key=bool(config.admin_key), replicas={("url",): url})
    return next((str(problem) for problem in problems if problem.key == ("url",)), "")


def repeated(values: Iterable[tuple[Key, str]]) -> Iterator[tuple[Key, Key]]:
    """(key, key of the value's first appearance) of each repeated value."""
    first: dict[str, Key] = {}
    for key, value in values:
        if first.setdefault(value, key) != key:
            yield key, first[value]
