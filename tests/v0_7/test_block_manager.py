"""What v0.7 adds to the block manager: how far a request could grow, and room that is given back."""

import pytest

from v0_7_speculative.block_manager import BlockManager


def reader(token_ids):
    return lambda start, end: list(token_ids[start:end])


def test_room_is_what_the_last_block_and_all_free_ones_can_hold():
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.allocate("a", 5)
    assert manager.num_room("a") == 3 + 2 * 4
    manager.allocate("b", 5)
    assert manager.num_room("a") == manager.num_room("b") == 3


@pytest.mark.parametrize(("num_tokens", "table"), [(0, [0, 1, 2]), (1, [0, 1]), (4, [0, 1]), (5, [0]), (8, [0])])
def test_blocks_that_the_tokens_left_do_not_need_are_given_back(num_tokens, table):
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.allocate("a", 9)
    manager.shrink("a", num_tokens)
    assert (manager.block_table("a"), manager.num_tokens("a")) == (table, 9 - num_tokens)
    assert manager.num_free_blocks == 4 - len(table)
    manager.check_integrity()


@pytest.mark.parametrize("num_tokens", [-1, 9, 10])
def test_a_request_keeps_at_least_one_token(num_tokens):
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.allocate("a", 9)
    with pytest.raises(ValueError, match="request a cannot give back"):
        manager.shrink("a", num_tokens)
    assert manager.num_tokens("a") == 9


def test_room_that_was_given_back_is_taken_again_and_only_what_is_verified_is_published():
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.allocate("a", 3)
    manager.publish("a", reader(range(3)))
    manager.append("a", 5)  # a known token, and four drafts
    manager.shrink("a", 4)
    manager.publish("a", reader(range(4)))
    assert manager.find_prefix(reader(range(99)), 99) == [0]
    manager.append("a", 5)
    assert (manager.block_table("a"), manager.num_tokens("a")) == ([0, 1, 2], 9)
    manager.check_integrity()
