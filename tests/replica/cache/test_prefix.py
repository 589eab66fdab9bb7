"""Names of blocks: the same for the same prefix of the same tenant, and for nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from replica.cache.prefix import Prefix, Scope


@given(st.lists(st.integers(0, 99), max_size=40), st.lists(st.integers(0, 99), max_size=40), st.integers(1, 8))
def test_keys_do_not_depend_on_how_the_tokens_came(head: list[int], tail: list[int], size: int) -> None:
    prefix = Prefix(head, size)
    prefix.extend(tail)
    assert prefix.keys == Prefix(head + tail, size).keys
    assert len(prefix.keys) == len(head + tail) // size


def test_a_key_stands_for_the_whole_prefix_of_one_adapter_and_one_tenant() -> None:
    head, tail = list(range(16)), list(range(100, 116))
    assert Prefix(head + tail, 16).keys[0] == Prefix(head, 16).keys[0]
    assert Prefix(head + tail, 16).keys[1] != Prefix(tail + tail, 16).keys[1]
    scopes = [Scope(), Scope(salt=""), Scope(adapter=""), Scope("a"), Scope(salt="a"), Scope("a", "b"), Scope("ab")]
    keys = {key for scope in scopes for key in Prefix(head + tail, 16, scope).keys}
    assert len(keys) == 2 * len(scopes)


def test_keys_are_the_same_in_every_process_and_version() -> None:
    """Checkpoints and events outlive a process. These are blake2b of the parent's key and the tokens."""
    assert Prefix(range(4), 4).keys[0].hex() == "037c9c9faba5a667be0e7301a49f0c68"
    assert Prefix(range(4), 4, Scope(salt="s")).keys[0].hex() == "9e1d34e9bd3705b543de20ba9a96b8d3"
