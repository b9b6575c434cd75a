"""The block manager alone: its arithmetic, its refusals, and thousands of random operations."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from v0_2_block_manager.block_manager import BlockManager


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_table_has_as_many_blocks_as_its_tokens_need(num_tokens, num_blocks):
    manager = BlockManager(num_blocks=8, block_size=16)
    manager.allocate("a", num_tokens)
    assert len(manager.block_table("a")) == num_blocks
    assert manager.num_free_blocks == 8 - num_blocks
    assert manager.num_tokens("a") == num_tokens


def test_a_block_is_taken_with_the_first_token_that_does_not_fit():
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.allocate("a", 3)
    lengths = []
    for _ in range(6):
        manager.append("a")
        lengths.append(len(manager.block_table("a")))
    assert lengths == [1, 2, 2, 2, 2, 3]


def test_several_tokens_are_appended_at_once_over_several_blocks():
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.allocate("a", 2)
    manager.append("a", 11)
    assert len(manager.block_table("a")) == 4
    assert manager.num_tokens("a") == 13


def test_blocks_are_used_oldest_first_and_need_not_be_neighbours():
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.allocate("a", 4)
    manager.allocate("b", 4)
    manager.free("a")
    manager.append("b", 8)
    assert manager.block_table("b") == [1, 2, 3]
    manager.append("b")
    assert manager.block_table("b") == [1, 2, 3, 0]


def test_the_last_block_of_a_freed_request_is_used_again_first():
    manager = BlockManager(num_blocks=3, block_size=4)
    manager.allocate("a", 12)
    manager.free("a")
    manager.allocate("b", 12)
    assert manager.block_table("b") == [2, 1, 0]


def test_what_can_be_asked_can_be_done_to_the_last_block():
    manager = BlockManager(num_blocks=3, block_size=4)
    assert manager.can_allocate(12)
    assert not manager.can_allocate(13)
    manager.allocate("a", 5)
    assert manager.can_append("a", 3 + 4)
    assert not manager.can_append("a", 3 + 5)
    manager.append("a", 7)
    assert manager.num_free_blocks == 0
    assert not manager.can_append("a")
    assert not manager.can_allocate(1)


def test_a_refused_operation_changes_nothing():
    manager = BlockManager(num_blocks=2, block_size=4)
    manager.allocate("a", 4)
    for refused in (
        lambda: manager.allocate("b", 5),
        lambda: manager.append("a", 5),
        lambda: manager.allocate("a", 1),
        lambda: manager.append("a", 0),
        lambda: manager.append("a", -3),
        lambda: manager.free("b"),
        lambda: manager.append("b"),
        lambda: manager.block_table("b"),
    ):
        with pytest.raises(ValueError, match=r"request [ab] "):
            refused()
        assert (manager.block_table("a"), manager.num_tokens("a"), manager.num_free_blocks) == ([0], 4, 1)
        manager.check_integrity()


def test_an_allocation_of_no_tokens_is_refused_and_leaves_no_table():
    manager = BlockManager(num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match="room for 0 tokens"):
        manager.allocate("a", 0)
    manager.allocate("a", 1)


@pytest.mark.parametrize("verb", ["free", "block_table", "append", "can_append", "num_tokens"])
def test_an_unknown_and_a_freed_request_are_clear_errors(verb):
    manager = BlockManager(num_blocks=2, block_size=4)
    manager.allocate("a", 4)
    manager.free("a")
    for request_id in ("a", "never"):
        with pytest.raises(
            ValueError, match=f"request {request_id} has no blocks: it was never allocated, or has been"
        ):
            getattr(manager, verb)(request_id)
    assert manager.num_free_blocks == 2


def test_a_table_handed_out_is_a_copy():
    manager = BlockManager(num_blocks=2, block_size=4)
    manager.allocate("a", 4)
    manager.block_table("a").append(1)
    assert manager.block_table("a") == [0]


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_blocks_is_refused(arguments):
    with pytest.raises(ValueError, match="a pool needs blocks"):
        BlockManager(*arguments)


def test_the_integrity_check_finds_a_lost_a_doubled_and_a_surplus_block():
    for damage, message in (
        (lambda manager: manager._free.pop(), "lost, or in two places"),
        (lambda manager: manager._free.append(0), "lost, or in two places"),
        (lambda manager: manager._free.__setitem__(0, 0), "lost, or in two places"),  # the count is right
        (lambda manager: manager._tables["a"].append(manager._free.pop()), "wrong table length"),
    ):
        manager = BlockManager(num_blocks=4, block_size=4)
        manager.allocate("a", 4)
        manager.check_integrity()
        damage(manager)
        with pytest.raises(AssertionError, match=message):
            manager.check_integrity()


class AnyOrder(RuleBasedStateMachine):
    """Requests come, grow and go in any order; a model that knows only token counts says what must hold."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(num_blocks=13, block_size=4)
        self.num_tokens: dict[str, int] = {}
        self.num_requests = 0

    def _blocks(self, num_tokens):
        return (num_tokens + 3) // 4

    @property
    def _num_free(self):
        return 13 - sum(self._blocks(num_tokens) for num_tokens in self.num_tokens.values())

    @rule(target=requests, num_tokens=st.integers(1, 30))
    def allocate(self, num_tokens):
        request_id = str(self.num_requests)
        self.num_requests += 1
        fits = self._blocks(num_tokens) <= self._num_free
        assert self.manager.can_allocate(num_tokens) == fits
        if not fits:
            with pytest.raises(ValueError, match="free blocks"):
                self.manager.allocate(request_id, num_tokens)
            return multiple()
        self.manager.allocate(request_id, num_tokens)
        self.num_tokens[request_id] = num_tokens
        return request_id

    @rule(request_id=requests, num_tokens=st.integers(1, 9))
    def append(self, request_id, num_tokens):
        old = self.num_tokens[request_id]
        fits = self._blocks(old + num_tokens) - self._blocks(old) <= self._num_free
        table = self.manager.block_table(request_id)
        assert self.manager.can_append(request_id, num_tokens) == fits
        if not fits:
            with pytest.raises(ValueError, match="free blocks"):
                self.manager.append(request_id, num_tokens)
            return
        self.manager.append(request_id, num_tokens)
        self.num_tokens[request_id] += num_tokens
        assert self.manager.block_table(request_id)[: len(table)] == table  # what is written stays where it is

    @rule(request_id=consumes(requests))
    def free(self, request_id):
        self.manager.free(request_id)
        del self.num_tokens[request_id]
        with pytest.raises(ValueError, match="has no blocks"):
            self.manager.free(request_id)

    @precondition(lambda self: not self.num_tokens)
    @rule()
    def nothing_is_owned_when_nobody_is_there(self):
        assert self.manager.num_free_blocks == 13

    @invariant()
    def every_block_has_one_place_and_every_table_its_length(self):
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self._num_free
        for request_id, num_tokens in self.num_tokens.items():
            assert len(self.manager.block_table(request_id)) == self._blocks(num_tokens)


class TestAnyOrder(AnyOrder.TestCase):
    # 100 runs of up to 60 operations: some thousands, the same ones each time.
    settings = settings(
        max_examples=100,
        stateful_step_count=60,
        suppress_health_check=list(HealthCheck),
    )
