"""The hash chain alone: what a digest stands for, and what happens when two prefixes have the same one."""

import hashlib
import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v0_6_prefix_cache import hash_chain
from v0_6_prefix_cache.hash_chain import Link, digest, extend, root


def chain(*blocks, salt=None):
    """The link of the last of these blocks."""
    link = root(salt)
    for block in blocks:
        link = extend(link, block)
    return link


def test_a_digest_is_the_sha_256_of_the_parents_and_of_the_tokens():
    first, second = chain([1, 2, 3]), chain([1, 2, 3], [4, 5, 6])
    assert first.digest == hashlib.sha256(root(None).digest + array("q", [1, 2, 3]).tobytes()).digest()
    assert second.digest == hashlib.sha256(first.digest + array("q", [4, 5, 6]).tobytes()).digest()
    assert digest(b"a", b"b") == hashlib.sha256(b"ab").digest()


def test_the_same_prefix_has_the_same_digest_and_another_one_has_another():
    links = [
        chain([1, 2], [3, 4]),
        chain([3, 4], [1, 2]),
        chain([1, 2], [3, 5]),
        chain([9, 2], [3, 4]),  # an equal block behind another past
        chain([3, 4]),
        chain([1, 2, 3, 4]),
        chain([1, 2], [3, 4], salt="x"),
        chain([1, 2], [3, 4], salt="y"),
        chain([1, 2], [3, 4], salt=""),
        chain([1, 2], [3, 4], [5, 6]),
    ]
    assert len({link.digest for link in links}) == len(links)
    assert links[0].digest == chain([1, 2], [3, 4]).digest
    for one, other in itertools.combinations(links, 2):
        assert not one.equals(other)
        assert not other.equals(one)


def test_large_ids_are_told_apart_and_their_bytes_never_run_into_each_other():
    assert len({chain(block).digest for block in ([1, 256], [257, 0], [256, 1], [2**31], [2**40], [0, 2**32])}) == 6


@pytest.mark.parametrize("salt", ["", "x", "a" * 10_000, "中文 🙂", "\ud83d"])
def test_any_text_can_be_a_salt(salt):
    assert root(salt).digest == root(salt).digest != root(None).digest
    assert root(salt).equals(root(salt))
    assert not root(salt).equals(root(None))


def test_equal_chains_that_were_made_apart_are_equal():
    assert chain([1, 2], [3, 4]).equals(chain([1, 2], [3, 4]))
    assert chain([1, 2], salt="x").equals(chain([1, 2], salt="x"))


def test_prefixes_with_one_digest_are_told_apart_by_their_tokens(monkeypatch):
    monkeypatch.setattr(hash_chain, "digest", lambda parent, content: b"")
    assert not chain([1, 2]).equals(chain([1, 3]))
    assert not chain([1, 2], [5, 6]).equals(chain([9, 9], [5, 6]))
    assert not chain([1, 2]).equals(chain([1, 2], [1, 2]))
    assert not chain([1, 2], [1, 2]).equals(chain([1, 2]))
    assert not chain([1, 2], salt="x").equals(chain([1, 2], salt="y"))
    assert not root("").equals(root(None))
    assert chain([1, 2], [5, 6]).equals(chain([1, 2], [5, 6]))


def test_two_chains_are_compared_only_as_far_as_they_are_not_the_same_objects():
    class Counted(tuple):
        num_compared = 0

        def __ne__(self, other):
            Counted.num_compared += 1
            return super().__ne__(other)

    last = root(None)
    for number in range(1000):
        last = Link(str(number).encode(), Counted([number]), last)
    one, other = (Link(b"", Counted([1]), last) for _ in range(2))
    assert one.equals(other)
    assert Counted.num_compared == 1


def test_a_very_long_chain_is_thrown_away_without_running_out_of_stack():
    last = root(None)
    for _ in range(300_000):
        last = Link(b"", (), last)
    del last


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=4),
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=4),
    st.sampled_from([None, "", "x"]),
    st.sampled_from([None, "", "x"]),
)
def test_links_are_equal_where_salt_and_tokens_are(blocks, others, salt, other_salt):
    one, other = chain(*blocks, salt=salt), chain(*others, salt=other_salt)
    assert one.equals(other) == (one.digest == other.digest) == ((blocks, salt) == (others, other_salt))
