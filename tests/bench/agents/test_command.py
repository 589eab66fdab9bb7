"""The command's options: what is left out, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.agents.__main__ import installed, parse, planned
from bench.agents.run import Plan
from bench.gateway.systems import Setting


def test_a_plan_has_what_is_given_then_what_quick_says() -> None:
    assert planned(parse([])) == Plan()
    quick = planned(
        parse(["--quick", "--turns", "9", "--kv-tokens", "5000", "--tools", "100", "--engine", "llamacpp", "--keep"])
    )
    assert (quick.conversations, quick.turns) == (12, 9)
    assert (quick.model.kv_tokens, quick.shape.tools, quick.engine, quick.keep) == (5000, 100, "llamacpp", True)


def test_variants_are_ours_with_more_flags() -> None:
    options = parse(["--variant", "sticky=--policy sticky --workers 2", "--only", "warmroute,sticky,round-robin"])
    ours, sticky, round_robin = installed(options)
    at = Setting(1, 2, ("http://127.0.0.1:3",), Path(), "python")
    assert sticky.command(at) == [*ours.command(at), "--policy", "sticky", "--workers", "2"]
    assert round_robin.command(at)[-2:] == ["--policy", "round_robin"]
    assert [system.name for system in (ours, sticky, round_robin)] == ["warmroute", "sticky", "round-robin"]


def test_a_name_that_no_system_has_is_refused() -> None:
    with pytest.raises(SystemExit, match="nginx9: not one of warmroute, sglang-router"):
        installed(parse(["--only", "warmroute,nginx9"]))
