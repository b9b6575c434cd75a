"""The block manager alone: what is shared, counted, found, copied and forgotten, and thousands of random operations."""

import hashlib
from collections import OrderedDict
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from v0_6_prefix_cache import hash_chain
from v0_6_prefix_cache.block_manager import BlockManager


def reader(token_ids):
    """A request's tokens, as `find_prefix` and `publish` ask for them."""
    return lambda start, end: list(token_ids[start:end])


def new(num_blocks=8, block_size=4, **options):
    return BlockManager(num_blocks, block_size, **options)


def allocate(manager, request_id, token_ids, salt=None, num_reusable=None, publishes=True):
    """What the scheduler does with a new request whose tokens are computed in one step; returns what was found."""
    prefix = manager.find_prefix(reader(token_ids), len(token_ids) - 1 if num_reusable is None else num_reusable, salt)
    manager.allocate(request_id, len(token_ids), prefix, salt)
    if publishes:
        manager.publish(request_id, reader(token_ids))
    manager.check_integrity()
    return prefix


def refs(manager):
    return [manager.ref_count(block) for block in range(manager.num_blocks)]


def free_list(manager):
    return list(manager._free)


def test_a_table_has_as_many_blocks_as_its_tokens_need_whether_they_are_found_or_new():
    manager = new()
    manager.allocate("a", 9)
    assert (manager.block_table("a"), manager.num_tokens("a"), manager.num_free_blocks) == ([0, 1, 2], 9, 5)
    manager.publish("a", reader(range(9)))
    assert allocate(manager, "b", range(14)) == [0, 1]
    assert manager.block_table("b") == [0, 1, 3, 4]
    assert refs(manager) == [2, 2, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("num_reusable", "found"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (99, 3)])
def test_only_whole_blocks_within_what_may_be_reused_are_found(num_reusable, found):
    manager = new()
    allocate(manager, "a", range(15))
    assert manager.find_prefix(reader(range(200)), num_reusable) == [0, 1, 2][:found]


def test_finding_changes_nothing():
    manager = new()
    allocate(manager, "a", range(9))
    manager.free("a")
    before = free_list(manager)
    assert manager.find_prefix(reader(range(9)), 9) == [0, 1]
    assert (free_list(manager), refs(manager)) == (before, [0] * 8)


def test_what_is_not_published_is_not_found():
    manager = new()
    allocate(manager, "a", range(9), publishes=False)
    assert manager.find_prefix(reader(range(9)), 8) == []
    manager.free("a")
    assert manager.find_prefix(reader(range(9)), 8) == []


def test_a_block_is_published_when_it_is_full_and_once():
    manager = new()
    manager.allocate("a", 3)
    manager.publish("a", reader(range(3)))
    assert manager._published == {}
    for num_tokens, num_published in ((4, 1), (5, 1), (7, 1), (8, 2)):
        manager.append("a", num_tokens - manager.num_tokens("a"))
        manager.publish("a", reader(range(num_tokens)))
        assert len(manager._published) == num_published
        manager.check_integrity()
    manager.append("a", 9)  # several blocks at once
    manager.publish("a", reader(range(17)))
    assert manager.find_prefix(reader(range(17)), 17) == [0, 1, 2, 3]


def test_publishing_hashes_each_block_once():
    manager = new()
    manager.allocate("a", 1)
    with mock.patch.object(hash_chain, "digest", wraps=hash_chain.digest) as digest:
        for num_tokens in range(2, 17):
            manager.append("a")
            manager.publish("a", reader(range(num_tokens)))
        assert digest.call_count == 4


def test_of_two_requests_that_have_computed_the_same_the_first_is_found_and_both_go_on():
    manager = new()
    for name in "ab":
        manager.allocate(name, 9)
    for name in "ab":
        manager.publish(name, reader(range(9)))
        manager.check_integrity()
    assert manager.find_prefix(reader(range(9)), 9) == manager.block_table("a")[:2]
    # b's next block lies behind two that are not found, and is found behind a's.
    manager.append("b", 3)
    manager.publish("b", reader(range(12)))
    assert manager.find_prefix(reader(range(12)), 12) == [*manager.block_table("a")[:2], manager.block_table("b")[2]]
    # The blocks of b that nobody can find are the first to be used again.
    manager.free("b")
    assert free_list(manager)[:2] == [3, 4]


def test_between_two_chunks_a_request_takes_over_what_another_has_published_since():
    manager = new()
    for name, num_tokens in (("a", 8), ("b", 6)):  # of prompts that begin with the same 14 tokens
        manager.allocate(name, num_tokens)
        manager.publish(name, reader(range(num_tokens)))
    assert manager.catch_up("b", reader(range(14)), 13) == 8  # a's second block in place of b's own, which has 2 tokens
    assert manager.block_table("b") == [2, 1]
    assert [manager.ref_count(block) for block in range(4)] == [1, 2, 1, 0]
    manager.append("a", 6)
    manager.publish("a", reader(range(14)))
    assert manager.catch_up("b", reader(range(14)), 13) == 12
    assert manager.block_table("b") == [2, 1, manager.block_table("a")[2]]
    assert manager.catch_up("b", reader(range(14)), 13) == 12  # a's last block is not full
    manager.check_integrity()
    # It goes on publishing behind what it has taken over.
    manager.append("b", 4)
    manager.publish("b", reader(range(16)))
    assert manager.find_prefix(reader(range(16)), 16)[3] == manager.block_table("b")[3]


@pytest.mark.parametrize(("num_reusable", "num_tokens"), [(7, 6), (8, 8), (11, 8), (12, 12)])
def test_a_request_catches_up_only_within_what_may_be_reused(num_reusable, num_tokens):
    manager = new()
    manager.allocate("a", 12)
    manager.allocate("b", 6)
    manager.publish("b", reader(range(6)))
    manager.publish("a", reader(range(12)))
    assert manager.catch_up("b", reader(range(12)), num_reusable) == num_tokens
    manager.check_integrity()


def test_without_the_cache_under_another_salt_and_after_a_reset_nobody_catches_up():
    for caching, salt, forgets in ((False, None, False), (True, "x", False), (True, None, True)):
        manager = BlockManager(16, 4, caching)
        manager.allocate("a", 12)
        manager.allocate("b", 6, (), salt)
        manager.publish("b", reader(range(6)))
        manager.publish("a", reader(range(12)))
        if forgets:
            manager.forget()
        assert manager.catch_up("b", reader(range(14)), 13) == 6
        manager.check_integrity()


def test_owners_are_counted_and_a_block_is_free_again_when_nobody_owns_it():
    manager = new(num_blocks=4)
    manager.allocate("a", 8)
    assert (refs(manager), free_list(manager)) == ([1, 1, 0, 0], [2, 3])
    manager.fork("a", "b")
    assert (refs(manager), free_list(manager)) == ([2, 2, 0, 0], [2, 3])
    manager.free("a")
    assert (refs(manager), free_list(manager)) == ([1, 1, 0, 0], [2, 3])
    manager.free("b")
    # What nobody can find is the first to be used again, and of a request its last block is put there first.
    assert (refs(manager), free_list(manager)) == ([0] * 4, [0, 1, 2, 3])
    manager.check_integrity()


def test_a_shared_block_is_free_when_its_last_owner_has_gone():
    manager = new()
    allocate(manager, "a", range(9))
    allocate(manager, "b", range(9))
    assert refs(manager)[:4] == [2, 2, 1, 1]
    manager.free("a")
    assert (refs(manager)[:4], manager.num_free_blocks) == ([1, 1, 0, 1], 5)
    manager.check_integrity()
    manager.free("b")
    assert (refs(manager), manager.num_free_blocks) == ([0] * 8, 8)
    manager.check_integrity()


def test_blocks_without_a_name_are_used_first_then_those_freed_first_and_of_a_request_its_last():
    manager = new(num_blocks=7)
    allocate(manager, "a", range(9))  # 0, 1 published, 2 not
    allocate(manager, "b", range(50, 58))  # 3, 4 published
    manager.free("a")
    manager.free("b")
    assert free_list(manager) == [2, 5, 6, 1, 0, 4, 3]
    assert allocate(manager, "c", range(9)) == [0, 1]  # in use again, from the middle of the list
    assert free_list(manager) == [5, 6, 4, 3]
    manager.free("c")
    assert free_list(manager) == [2, 5, 6, 4, 3, 1, 0]  # and now the latest
    manager.check_integrity()


def test_a_block_that_is_taken_for_something_else_is_not_found_any_more():
    manager = new(num_blocks=3)
    allocate(manager, "a", range(12))
    manager.free("a")
    assert free_list(manager) == [2, 1, 0]
    allocate(manager, "b", range(50, 54), publishes=False)
    assert manager.find_prefix(reader(range(12)), 12) == [0, 1]
    manager.append("b", 4)
    assert manager.find_prefix(reader(range(12)), 12) == [0]
    manager.append("b", 4)
    assert manager.find_prefix(reader(range(12)), 12) == []
    assert manager._published == {}
    # They hold what b has computed, once that is so.
    manager.publish("b", reader(range(50, 62)))
    assert manager.find_prefix(reader(range(50, 62)), 12) == [2, 1, 0]


def test_nothing_is_found_behind_a_block_that_is_gone():
    manager = new(num_blocks=4)
    allocate(manager, "a", range(4))
    allocate(manager, "b", range(8))
    assert manager.block_table("b") == [0, 1]
    manager.free("a")
    manager.free("b")
    manager._free.move_to_end(0, last=False)  # as if the first had not been used for longest
    allocate(manager, "c", range(50, 54))
    assert manager.find_prefix(reader(range(8)), 8) == []
    # Computed again, it leads to the second, which is still there.
    allocate(manager, "d", range(5))
    assert manager.find_prefix(reader(range(8)), 8) == [manager.block_table("d")[0], 1]
    manager.check_integrity()


def test_a_free_block_is_taken_out_of_the_middle_of_the_list_in_constant_time():
    assert isinstance(new()._free, OrderedDict)  # a list or a deque would look at each before it


def test_blocks_that_are_found_count_against_the_free_ones_only_if_nobody_owns_them():
    manager = new(num_blocks=4)
    allocate(manager, "a", range(8))
    allocate(manager, "b", range(50, 58))
    prefix = manager.find_prefix(reader(range(8)), 8)
    assert manager.can_allocate(8, prefix)
    assert not manager.can_allocate(9, prefix)
    manager.free("a")
    assert manager.can_allocate(8, prefix)  # two free blocks, and both of them found
    assert not manager.can_allocate(9, prefix)
    manager.allocate("c", 8, prefix)
    manager.check_integrity()


def test_a_request_with_another_salt_or_none_finds_nothing():
    manager = new(num_blocks=20)
    for salt in (None, "", "x", "y"):
        assert allocate(manager, f"first {salt}", range(9), salt) == []
        assert allocate(manager, f"second {salt}", range(9), salt) == manager.block_table(f"first {salt}")[:2]


def test_a_fork_owns_the_same_blocks_and_copies_the_last_before_it_writes():
    manager = new()
    allocate(manager, "a", range(6))
    manager.fork("a", "b")
    manager.fork("a", "c")
    manager.check_integrity()
    assert manager.block_table("a") == manager.block_table("b") == manager.block_table("c") == [0, 1]
    assert refs(manager)[:2] == [3, 3]
    assert manager.append("a") == (1, 2)
    assert (manager.block_table("a"), refs(manager)[:3]) == ([0, 2], [3, 2, 1])
    assert manager.append("a") is None
    assert manager.append("c") == (1, 3)
    assert manager.append("b") is None  # the last owner writes where it is
    assert (manager.block_table("b"), refs(manager)[:4]) == ([0, 1], [3, 1, 1, 1])
    manager.check_integrity()
    for name in "abc":
        manager.free(name)
    assert (refs(manager), manager.num_free_blocks) == ([0] * 8, 8)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 6])
def test_a_copy_and_further_blocks_are_taken_at_once_or_not_at_all(num_tokens):
    num_new = 1 + max(0, num_tokens - 2 + 3) // 4  # the copy, and what does not go into it
    for num_free in range(num_new + 1):
        manager = new(num_blocks=2 + num_free)
        allocate(manager, "a", range(6))
        manager.fork("a", "b")
        assert manager.can_append("a", num_tokens) == (num_free == num_new)
        if num_free < num_new:
            with pytest.raises(ValueError, match="request a needs more"):
                manager.append("a", num_tokens)
            assert manager.block_table("a") == [0, 1]
        else:
            assert manager.append("a", num_tokens) == (1, 2)
        manager.check_integrity()


def test_a_full_last_block_is_common_for_ever():
    manager = new()
    allocate(manager, "a", range(8))
    manager.fork("a", "b")
    assert manager.append("a") is None
    assert manager.append("b") is None
    assert (manager.block_table("a"), manager.block_table("b")) == ([0, 1, 2], [0, 1, 3])


def test_a_fork_goes_on_publishing_where_the_first_was():
    manager = new()
    allocate(manager, "a", range(6))
    manager.fork("a", "b")
    manager.append("a", 2)
    manager.append("b", 2)
    texts = {"a": [*range(6), 8, 9], "b": [*range(6), 7, 7]}
    for name, token_ids in texts.items():
        manager.publish(name, reader(token_ids))
        manager.check_integrity()
    for name, token_ids in texts.items():
        assert manager.find_prefix(reader(token_ids), 8) == manager.block_table(name)


def test_without_caching_forks_share_and_nothing_is_found():
    manager = new(enable_prefix_caching=False)
    allocate(manager, "a", range(8))
    assert allocate(manager, "b", range(8)) == []
    manager.fork("a", "c")
    assert refs(manager)[:4] == [2, 2, 1, 1]
    assert manager._published == {}


def test_forget_lets_nothing_be_found_nor_what_requests_of_before_compute_later():
    manager = new(num_blocks=12)
    allocate(manager, "gone", range(50, 58))
    manager.free("gone")
    allocate(manager, "a", range(6))
    manager.fork("a", "b")
    before = refs(manager)
    manager.forget()
    manager.check_integrity()
    assert refs(manager) == before
    manager.append("a", 3)
    manager.publish("a", reader(range(9)))
    manager.fork("a", "c")
    manager.append("c", 3)
    manager.publish("c", reader(range(12)))
    for token_ids in (range(50, 58), range(12)):
        assert manager.find_prefix(reader(token_ids), 8) == []
    allocate(manager, "d", range(9))
    assert manager.find_prefix(reader(range(9)), 8) == manager.block_table("d")[:2]


def test_a_refused_operation_changes_nothing():
    manager = new(num_blocks=3)
    allocate(manager, "a", range(6))
    manager.fork("a", "b")
    before = (manager.block_table("a"), manager.num_tokens("a"), refs(manager), free_list(manager))
    for refused in (
        lambda: manager.allocate("c", 5),
        lambda: manager.allocate("c", 9, [0]),
        lambda: manager.allocate("c", 0),
        lambda: manager.allocate("a", 1),
        lambda: manager.append("a", 3),
        lambda: manager.append("a", 0),
        lambda: manager.fork("a", "b"),
        lambda: manager.fork("c", "d"),
        lambda: manager.free("c"),
        lambda: manager.append("c"),
        lambda: manager.block_table("c"),
        lambda: manager.num_tokens("c"),
    ):
        with pytest.raises(ValueError, match=r"request [abc] "):
            refused()
        assert (manager.block_table("a"), manager.num_tokens("a"), refs(manager), free_list(manager)) == before
        manager.check_integrity()


def test_the_integrity_check_finds_what_is_lost_doubled_miscounted_or_misnamed():
    for damage, message in (
        (lambda manager: manager._free.popitem(), "a block is lost, or in use"),
        (lambda manager: manager._free.update({0: None}), "a block is lost, or in use"),
        (lambda manager: manager._ref_counts.__setitem__(0, 1), "a reference count is not the number of owners"),
        (lambda manager: manager._tables["b"].__setitem__(0, 1), "a reference count is not the number of owners"),
        (lambda manager: manager._num_tokens.update(a=9), "a: wrong table length"),
        (lambda manager: manager._published.clear(), "a hash leads to another block"),
        (lambda manager: manager._links.__setitem__(0, None), "a hash leads to another block"),
        (lambda manager: manager._chains.update(z=manager._chains["a"]), "a request without blocks publishes"),
        (lambda manager: manager._num_tokens.update(z=4), "a request has blocks but no tokens, or the reverse"),
    ):
        manager = new()
        allocate(manager, "a", range(6))
        allocate(manager, "b", range(6))
        damage(manager)
        with pytest.raises(AssertionError, match=message):
            manager.check_integrity()


class Naive:
    """What must hold, said as simply as it can be: texts, owners, and a list of free blocks."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.texts = {}  # request -> its tokens so far, behind its salt
        self.tables = {}
        self.contents = {}  # block -> the text up to its end, for what can be found in it
        self.num_passed = {}  # request -> its first blocks, which were published or had an equal at that time
        self.outside = set()  # requests from before a reset
        self.free = list(range(num_blocks))

    def is_free(self, block):
        return all(block not in table for table in self.tables.values())

    def take(self, blocks):
        for block in blocks:
            self.free.remove(block)

    def release(self, table):
        for block in reversed(table):
            if self.is_free(block):
                self.free.insert(len(self.free) if block in self.contents else 0, block)


class AnyOrder(RuleBasedStateMachine):
    """Requests come, share, fork, grow, publish and go in any order, with digests that often collide."""

    @initialize(
        num_blocks=st.integers(4, 14), block_size=st.sampled_from([1, 2, 3]), bits=st.sampled_from([0, 1, 2, 256])
    )
    def start(self, num_blocks, block_size, bits):
        def digest(parent, content):
            whole = hashlib.sha256(parent + content).digest()
            return whole if bits == 256 else bytes([whole[0] % 2**bits])

        self.patch = mock.patch.object(hash_chain, "digest", digest)
        self.patch.start()
        self.exact = bits == 256
        self.manager, self.naive = BlockManager(num_blocks, block_size), Naive(num_blocks, block_size)
        self.num_requests = 0

    def teardown(self):
        if hasattr(self, "patch"):
            for request_id in list(self.naive.tables):
                self.manager.free(request_id)
            self.manager.check_integrity()
            assert self.manager.num_free_blocks == self.manager.num_blocks
            self.patch.stop()

    def new_id(self):
        self.num_requests += 1
        return str(self.num_requests)

    def pick(self, choice):
        ids = list(self.naive.tables)
        return ids[choice % len(ids)] if ids else None

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from([None, None, "x"]))
    def arrive(self, token_ids, salt):
        naive, manager, size, request_id = self.naive, self.manager, self.naive.block_size, self.new_id()
        text = (salt, *token_ids)
        prefix = manager.find_prefix(reader(token_ids), len(token_ids) - 1, salt)
        # Never a wrong block, whatever collides: each holds just this text.
        assert [naive.contents[block] for block in prefix] == [text[: 1 + size * (i + 1)] for i in range(len(prefix))]
        assert len(prefix) * size < len(token_ids)
        if self.exact:  # and never one too few: the next was nowhere
            assert (len(prefix) + 1) * size >= len(token_ids) or text[: 1 + size * (len(prefix) + 1)] not in set(
                naive.contents.values()
            )
        num_needed = -(-len(token_ids) // size) - sum(not naive.is_free(block) for block in prefix)
        assert manager.can_allocate(len(token_ids), prefix) == (num_needed <= len(naive.free))
        if num_needed > len(naive.free):
            with pytest.raises(ValueError, match="free blocks"):
                manager.allocate(request_id, len(token_ids), prefix, salt)
            return
        manager.allocate(request_id, len(token_ids), prefix, salt)
        naive.num_passed[request_id] = len(prefix)
        self.grown(request_id, text, prefix)

    @rule(choice=st.integers(0, 99), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, choice, token_ids):
        request_id = self.pick(choice)
        if request_id is None:
            return
        naive, size, table = self.naive, self.naive.block_size, list(self.naive.tables[request_id])
        num_before = len(naive.texts[request_id]) - 1
        copies = num_before % size > 0 and sum(table[-1] in other for other in naive.tables.values()) > 1
        num_new = -(-(num_before + len(token_ids)) // size) - len(table) + copies
        assert self.manager.can_append(request_id, len(token_ids)) == (num_new <= len(naive.free))
        if num_new > len(naive.free):
            with pytest.raises(ValueError, match="free blocks"):
                self.manager.append(request_id, len(token_ids))
            return
        expected = (table[-1], naive.free[0]) if copies else None
        assert self.manager.append(request_id, len(token_ids)) == expected
        self.grown(request_id, naive.texts[request_id] + tuple(token_ids), table[:-1] if copies else table)

    def grown(self, request_id, text, kept):
        """A request has a longer text: its table goes on with the free blocks, in their order."""
        naive = self.naive
        table = self.manager.block_table(request_id)
        assert table[: len(kept)] == kept
        naive.take([block for block in kept if block in naive.free])
        new_blocks = table[len(kept) :]
        assert new_blocks == naive.free[: len(new_blocks)]  # least recently used first
        naive.take(new_blocks)
        for block in new_blocks:
            naive.contents.pop(block, None)
        naive.tables[request_id], naive.texts[request_id] = table, text

    @rule(choice=st.integers(0, 99))
    def fork(self, choice):
        request_id, child = self.pick(choice), self.new_id()
        if request_id is not None:
            self.manager.fork(request_id, child)
            self.naive.tables[child] = list(self.naive.tables[request_id])
            self.naive.texts[child] = self.naive.texts[request_id]
            self.naive.num_passed[child] = self.naive.num_passed[request_id]
            self.naive.outside |= {child} if request_id in self.naive.outside else set()

    @rule(choice=st.integers(0, 99))
    def publish(self, choice):
        request_id = self.pick(choice)
        if request_id is None:
            return
        naive, text = self.naive, self.naive.texts[request_id]
        self.manager.publish(request_id, reader(text[1:]))
        for index, block in enumerate(naive.tables[request_id]):
            end = 1 + naive.block_size * (index + 1)
            if block in naive.contents:
                assert naive.contents[block] == text[:end]
            elif self.manager._links[block] is not None:
                assert end <= len(text), "a block is published before it is full"
                assert request_id not in naive.outside
                naive.contents[block] = text[:end]
            elif self.exact and request_id not in naive.outside and index >= naive.num_passed[request_id]:
                assert end > len(text) or text[:end] in naive.contents.values()
        naive.num_passed[request_id] = (len(text) - 1) // naive.block_size

    @rule(choice=st.integers(0, 99))
    def leave(self, choice):
        request_id = self.pick(choice)
        if request_id is not None:
            self.manager.free(request_id)
            table = self.naive.tables.pop(request_id)
            del self.naive.texts[request_id]
            self.naive.outside.discard(request_id)
            self.naive.release(table)

    @rule(really=st.integers(0, 4))
    def forget(self, really):
        if really == 0:
            self.manager.forget()
            self.naive.contents.clear()
            self.naive.outside = set(self.naive.tables)

    @invariant()
    def owners_order_and_names_are_as_they_must_be(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        naive, manager = self.naive, self.manager
        assert list(manager._free) == naive.free
        assert manager.num_free_blocks == len(naive.free)
        for block in range(manager.num_blocks):
            assert manager.ref_count(block) == sum(block in table for table in naive.tables.values())
            assert (manager._links[block] is not None) == (block in naive.contents)
        for request_id, table in naive.tables.items():
            assert manager.block_table(request_id) == table
            assert manager.num_tokens(request_id) == len(naive.texts[request_id]) - 1


def test_in_any_order_with_any_collisions_no_block_is_wrong_lost_or_miscounted():
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(max_examples=150, stateful_step_count=50, suppress_health_check=list(HealthCheck)),
    )
