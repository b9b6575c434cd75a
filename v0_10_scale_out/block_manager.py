"""Who owns which block: tables that share blocks, and a free list that remembers. Torch-free, and without any KV.

    request 7   block table [ 4, 0, 9 ]    40 tokens in blocks of 16: 4 and 0 are full, 9 has 8 tokens and 8 free slots
    request 8   block table [ 4, 0, 2 ]    begins with the same 32 tokens: 4 and 0 have two owners, a `ref_count` of 2
    free list   5, 1, 3, 6, 7, 8           least recently used first; 7 and 8 still hold what a former owner computed

A token's place is found by two divisions: token `i` of a request lies in block `table[i // block_size]`, slot
`i % block_size`.

A full block whose KV is computed is *published*: its hash, which stands for all tokens up to its end, leads to it
(`hash_chain.py`). A new request takes over the longest chain of published blocks that its tokens begin with, whether
others own them or nobody does. Freed blocks keep their hash until they are needed for something else.

The verbs come in pairs: ask (`find_prefix`, `can_allocate`, `can_append`), then act (`allocate`, `append`), then
`publish` what was computed, and `free` at the end. `catch_up` looks for a prefix again, between the chunks of a prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .events import (
    BlockAllocated,
    BlockCached,
    BlockCopied,
    BlockEvicted,
    BlockFreed,
    BlockShared,
    CacheReset,
    EventBus,
)
from .hash_chain import Link, extend, root

TokenIds = Callable[[int, int], list[int]]  # of a request, from one position up to another: `Request.token_ids`


class Chain(NamedTuple):
    """How far a request's blocks have been published: so many, and the link of the last."""

    num_blocks: int
    last: Link


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens.

    A block is in the free list, or in as many tables as its reference count says. A request's table has exactly as many
    blocks as its tokens need; `check_integrity` says so. `events` is told of each block's fate.

    Raises:
        ValueError: from every verb, when it is used against these rules. These are faults of the engine, and the
            message names them; users never see one.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, events: EventBus | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: got num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.events = EventBus() if events is None else events
        self.reclaim()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns, whether they can still be found or not."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need: the last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, token_ids: TokenIds, num_tokens: int, salt: str | None = None) -> list[int]:
        """The blocks that hold the KV of a request's first tokens already, in their order.

        Args:
            token_ids: the request's tokens.
            num_tokens: how many of them may be taken over: whole blocks within these.
            salt: only blocks that were computed under the same one are found.
        """
        return self._walk(Chain(0, root(salt)), token_ids, num_tokens) if self.enable_prefix_caching else []

    def can_allocate(self, num_tokens: int, prefix: Sequence[int] = ()) -> bool:
        """Whether a new request can have room for its first `num_tokens` tokens, of which `prefix` holds some."""
        num_shared = sum(self._ref_counts[block] > 0 for block in prefix)
        return self.num_blocks_for(num_tokens) - num_shared <= self.num_free_blocks

    def allocate(self, request_id: str, num_tokens: int, prefix: Sequence[int] = (), salt: str | None = None) -> None:
        """Begin a request's table with the blocks that `find_prefix` has found, and room for `num_tokens` in all."""
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has blocks already: append to them, or free them first")
        if num_tokens < 1:
            raise ValueError(f"request {request_id} asks for room for {num_tokens} tokens")
        if not self.can_allocate(num_tokens, prefix):
            raise ValueError(f"request {request_id} needs more than the {self.num_free_blocks} free blocks")
        for block in prefix:
            self._own(block, request_id)
        self._tables[request_id], self._num_tokens[request_id] = list(prefix), 0
        if self.enable_prefix_caching:
            self._chains[request_id] = Chain(len(prefix), self._link(prefix[-1]) if prefix else root(salt))
        self._grow(request_id, num_tokens)

    def fork(self, request_id: str, child_id: str) -> None:
        """Give another request the same table: both own all of its blocks, the last one too, full or not."""
        table = self._table(request_id)
        if child_id in self._tables:
            raise ValueError(f"request {child_id} has blocks already: free them first")
        for block in table:
            self._own(block, child_id)
        self._tables[child_id], self._num_tokens[child_id] = list(table), self._num_tokens[request_id]
        if request_id in self._chains:
            self._chains[child_id] = self._chains[request_id]

    def can_append(self, request_id: str, num_tokens: int = 1) -> bool:
        """Whether a request can have room for `num_tokens` more; most of the time its last block has it."""
        num_needed = self._num_missing(request_id, num_tokens) + self._must_copy(request_id)
        return num_needed <= self.num_free_blocks

    def append(self, request_id: str, num_tokens: int = 1) -> tuple[int, int] | None:
        """Make room for `num_tokens` more tokens of a request.

        Returns:
            Where the next token goes into a block that others own, too: that block, and the free one that has taken
            its place in the table. The first has to be copied into the second before anything is written.
        """
        if num_tokens < 1:
            raise ValueError(f"request {request_id} asks for room for {num_tokens} tokens")
        if not self.can_append(request_id, num_tokens):
            raise ValueError(f"request {request_id} needs more than the {self.num_free_blocks} free blocks")
        copy = None
        if self._must_copy(request_id):
            table = self._table(request_id)
            shared, table[-1] = table[-1], self._take(request_id)
            self._release(shared, request_id)
            copy = shared, table[-1]
            self.events.emit(BlockCopied, *copy, request_id)
        self._grow(request_id, num_tokens)
        return copy

    def num_room(self, request_id: str) -> int:
        """How many tokens more a request could have room for, once it may write into its last block."""
        num_slots = (len(self._table(request_id)) + self.num_free_blocks) * self.block_size
        return num_slots - self._num_tokens[request_id]

    def shrink(self, request_id: str, num_tokens: int) -> None:
        """Take back the room for a request's last tokens, which it will not keep. They are not published."""
        table = self._table(request_id)
        if not 0 <= num_tokens < self._num_tokens[request_id]:
            raise ValueError(f"request {request_id} cannot give back the room for {num_tokens} tokens")
        self._num_tokens[request_id] -= num_tokens
        while len(table) > self.num_blocks_for(self._num_tokens[request_id]):
            self._release(table.pop(), request_id)

    def publish(self, request_id: str, token_ids: TokenIds) -> None:
        """Let a request's full blocks be found. All tokens it has room for are computed now: their KV is written."""
        if request_id not in self._chains:
            return
        table = self._table(request_id)
        num_published, last = self._chains[request_id]
        for index in range(num_published, self._num_tokens[request_id] // self.block_size):
            link = extend(last, token_ids(index * self.block_size, (index + 1) * self.block_size))
            published = self._published.setdefault(link.digest, table[index])
            if published == table[index]:
                self._links[published] = link
                self.events.emit(BlockCached, published)
            # Another request's block that holds the same is found first, and ours never. Its link goes on as ours.
            last = self._link(published) if self._link(published).equals(link) else link
            self._chains[request_id] = Chain(index + 1, last)

    def catch_up(self, request_id: str, token_ids: TokenIds, num_tokens: int) -> int:
        """Take over what others have published since, in place of the blocks that a request has yet to fill.

        Args:
            request_id: between two steps: all tokens that it has room for are computed.
            token_ids: its tokens.
            num_tokens: how many of them may be taken over, as in `find_prefix`.

        Returns:
            Tokens that it has room for now, all of them computed.
        """
        table = self._table(request_id)
        if request_id in self._chains:
            num_published, _ = self._chains[request_id]
            blocks = self._walk(self._chains[request_id], token_ids, num_tokens)
            for block in blocks:
                self._own(block, request_id)
            if blocks:
                for block in table[num_published:]:
                    self._release(block, request_id)
                table[num_published:] = blocks
                self._num_tokens[request_id] = len(table) * self.block_size
                self._chains[request_id] = Chain(len(table), self._link(blocks[-1]))
        return self._num_tokens[request_id]

    def free(self, request_id: str) -> None:
        """Take a request out of its blocks' owners; those that nobody owns any more are free."""
        table = self._table(request_id)
        # The last block first, so that it is used again first: a prompt's first blocks are the ones that other requests
        # may find, and no block can be found without those before it.
        for block in reversed(table):
            self._release(block, request_id)
        del self._tables[request_id], self._num_tokens[request_id]
        self._chains.pop(request_id, None)

    def reclaim(self) -> None:
        """Make all blocks free and forget what they hold, though a verb was cut short at any line of it.

        An error, or Ctrl-C, may leave a block in two places or in none, and nobody knows which of them are written.
        """
        self._free = OrderedDict.fromkeys(range(self.num_blocks))
        self._ref_counts = [0] * self.num_blocks
        self._tables: dict[str, list[int]] = {}
        self._num_tokens: dict[str, int] = {}
        self._published: dict[bytes, int] = {}  # digest -> the block that is found by it
        self._links: list[Link | None] = [None] * self.num_blocks  # of each block: what it is found by
        self._chains: dict[str, Chain] = {}

    def forget(self) -> None:
        """Let nothing be found that has been computed so far, or is computed by the requests that are here."""
        self._published, self._links, self._chains = {}, [None] * self.num_blocks, {}
        self.events.emit(CacheReset)

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a request in the order of its tokens; a copy."""
        return list(self._table(request_id))

    def ref_count(self, block: int) -> int:
        """How many requests own a block."""
        return self._ref_counts[block]

    def cached_blocks(self) -> list[int]:
        """The blocks that can be found by what they hold, owned or not."""
        return list(self._published.values())

    def num_tokens(self, request_id: str) -> int:
        """Tokens that a request has room for."""
        self._table(request_id)
        return self._num_tokens[request_id]

    def check_integrity(self) -> None:
        """Raise an `AssertionError` unless owners, free list and published blocks say the same."""
        owners = [0] * self.num_blocks
        for block in (block for table in self._tables.values() for block in table):
            owners[block] += 1
        assert owners == self._ref_counts, "a reference count is not the number of owners"
        assert set(self._free) == {block for block, num in enumerate(owners) if num == 0}, "a block is lost, or in use"
        assert self._tables.keys() == self._num_tokens.keys(), "a request has blocks but no tokens, or the reverse"
        assert self._chains.keys() <= self._tables.keys(), "a request without blocks publishes"
        for request_id, table in self._tables.items():
            assert len(table) == self.num_blocks_for(self._num_tokens[request_id]), f"{request_id}: wrong table length"
            assert len(set(table)) == len(table), f"{request_id}: a block twice in one table"
        found = {block: link.digest for block, link in enumerate(self._links) if link is not None}
        assert found == {block: digest for digest, block in self._published.items()}, "a hash leads to another block"

    def _table(self, request_id: str) -> list[int]:
        if request_id not in self._tables:
            raise ValueError(f"request {request_id} has no blocks: it was never allocated, or has been freed already")
        return self._tables[request_id]

    def _walk(self, chain: Chain, token_ids: TokenIds, num_tokens: int) -> list[int]:
        """The published blocks that follow a chain, as long as they hold a request's tokens."""
        blocks: list[int] = []
        num_blocks, last = chain
        for start in range(num_blocks * self.block_size, num_tokens - self.block_size + 1, self.block_size):
            link = extend(last, token_ids(start, start + self.block_size))
            block = self._published.get(link.digest)
            if block is None:
                break
            last = self._link(block)
            if not last.equals(link):  # two prefixes with one digest
                break
            blocks.append(block)
        return blocks

    def _link(self, block: int) -> Link:
        link = self._links[block]
        assert link is not None, f"block {block} is not published"
        return link

    def _num_missing(self, request_id: str, num_tokens: int) -> int:
        table = self._table(request_id)
        return self.num_blocks_for(self._num_tokens[request_id] + num_tokens) - len(table)

    def _must_copy(self, request_id: str) -> bool:
        """Whether the next token goes into a block that others own. A full one is never written again."""
        return self._num_tokens[request_id] % self.block_size > 0 and self._ref_counts[self._table(request_id)[-1]] > 1

    def _grow(self, request_id: str, num_tokens: int) -> None:
        for _ in range(self._num_missing(request_id, num_tokens)):
            self._tables[request_id].append(self._take(request_id))
        self._num_tokens[request_id] += num_tokens

    def _take(self, request_id: str) -> int:
        """The free block that was not used for the longest time; what it held cannot be found any more."""
        block, _ = self._free.popitem(last=False)
        link, self._links[block] = self._links[block], None
        if link is not None:
            del self._published[link.digest]
            self.events.emit(BlockEvicted, block)
        self._ref_counts[block] = 1
        self.events.emit(BlockAllocated, block, request_id)
        return block

    def _own(self, block: int, request_id: str) -> None:
        self._free.pop(block, None)
        self._ref_counts[block] += 1
        self.events.emit(BlockShared, block, request_id, self._ref_counts[block])

    def _release(self, block: int, request_id: str) -> None:
        self._ref_counts[block] -= 1
        self.events.emit(BlockFreed, block, request_id, self._ref_counts[block])
        if self._ref_counts[block] == 0:
            self._free[block] = None
            if self._links[block] is None:  # of no use to anybody: the first to be taken
                self._free.move_to_end(block, last=False)
