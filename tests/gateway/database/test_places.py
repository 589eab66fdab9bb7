"""Where files are that the configuration gives no path."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.database.places import with_path


def test_the_default_is_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert with_path("sqlite", "a.sqlite") == f"sqlite:///{tmp_path}/warmroute/a.sqlite"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_path("sqlite", "a.sqlite") == f"sqlite:///{tmp_path}/.local/state/warmroute/a.sqlite"


def test_a_url_with_a_place_stays_as_it_is() -> None:
    for url in ("sqlite:///b.sqlite", "postgresql://u@h/n"):
        assert with_path(url, "a.sqlite") == url
