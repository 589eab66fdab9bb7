"""Names of blocks: the same for the same prefix of the same tenant, and for nothing else."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from replica.cache.prefix import Prefix, Scope, chained


@given(st.lists(st.integers(0, 99), max_size=40), st.lists(st.integers(0, 99), max_size=40), st.integers(1, 8))
def test_keys_do_not_depend_on_how_the_tokens_came(head: list[int], tail: list[int], size: int) -> None:
    prefix = Prefix(head, size)
    prefix.extend(tail)
    assert prefix.keys == Prefix(head + tail, size).keys
    assert len(prefix.keys) == len(head + tail) // size


def test_a_key_stands_for_the_whole_prefix_of_one_tenant() -> None:
    head, tail = list(range(16)), list(range(100, 116))
    assert Prefix(head + tail, 16).keys[0] == Prefix(head, 16).keys[0]
    assert Prefix(head + tail, 16).keys[1] != Prefix(tail + tail, 16).keys[1]
    scopes = [Scope(), Scope(salt=""), Scope(salt="a"), Scope(salt="ab")]
    keys = {key for scope in scopes for key in Prefix(head + tail, 16, scope).keys}
    assert len(keys) == 2 * len(scopes)


def test_no_salt_is_another_tenants_block() -> None:
    """A salt that is spelled like what a block's key is the hash of."""
    parent, tokens = b"=keys of a block", array("I", b"four tokens, yes")
    salt = (parent + tokens.tobytes())[1:].decode()
    assert Scope(salt=salt).root() != chained(parent, tokens)


def test_keys_are_the_same_in_every_process_and_version() -> None:
    """Checkpoints and events outlive a process. These are blake2b of the parent's key and the tokens."""
    assert Prefix(range(4), 4).keys[0].hex() == "6b95aeb3e92edc662165c3d51325abba"
    assert Prefix(range(4), 4, Scope(salt="s")).keys[0].hex() == "770c4809b232ca335e789b0cc85f9320"
