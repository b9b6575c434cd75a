"""Who owns which block: a free list, and a block table for each request. Torch-free, and without any KV itself.

    request 7   block table [ 4, 0, 9 ]    40 tokens in blocks of 16: 4 and 0 are full, 9 has 8 tokens and 8 free slots
    free list   2, 5, 1, 3, 6, 7, 8        every other block, oldest first

A token's place is found by two divisions: token `i` of a request lies in block `table[i // block_size]`, slot
`i % block_size`. So blocks need not be neighbours, and the waste is at most `block_size - 1` slots a request.

The verbs come in pairs: ask (`can_allocate`, `can_append`), then act (`allocate`, `append`), then `free`. v0.6 lets
requests share blocks.
"""

from collections import deque


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens.

    Every block is in exactly one place, the free list or one table. A request's table has exactly as many blocks as its
    tokens need; `check_integrity` says so.

    Raises:
        ValueError: from every verb, when it is used against these rules. These are faults of the engine, and the
            message names them; users never see one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: got num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = deque(range(num_blocks))
        self._tables: dict[str, list[int]] = {}
        self._num_tokens: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need: the last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a new request can have room for its first `num_tokens` tokens."""
        return self.num_blocks_for(num_tokens) <= self.num_free_blocks

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Begin a request's table, with room for `num_tokens` tokens."""
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has blocks already: append to them, or free them first")
        if num_tokens < 1:
            raise ValueError(f"request {request_id} asks for room for {num_tokens} tokens")
        if not self.can_allocate(num_tokens):
            raise ValueError(f"request {request_id} needs more than the {self.num_free_blocks} free blocks")
        self._tables[request_id], self._num_tokens[request_id] = [], 0
        self._grow(request_id, num_tokens)

    def can_append(self, request_id: str, num_tokens: int = 1) -> bool:
        """Whether a request can have room for `num_tokens` more; most of the time its last block has it."""
        return self._num_missing(request_id, num_tokens) <= self.num_free_blocks

    def append(self, request_id: str, num_tokens: int = 1) -> None:
        """Make room for `num_tokens` more tokens of a request."""
        if num_tokens < 1:
            raise ValueError(f"request {request_id} asks for room for {num_tokens} tokens")
        if not self.can_append(request_id, num_tokens):
            raise ValueError(f"request {request_id} needs more than the {self.num_free_blocks} free blocks")
        self._grow(request_id, num_tokens)

    def free(self, request_id: str) -> None:
        """Take all blocks of a request back."""
        table = self._table(request_id)
        # The last block first, so that it is used again first. (Nothing hangs on it yet; from v0.6 on it is a prompt's
        # first blocks that another request may still find a use for.)
        self._free.extend(reversed(table))
        del self._tables[request_id], self._num_tokens[request_id]

    def reclaim(self, request_id: str | None = None) -> None:
        """Take all blocks of a request back (without a name: of all), though a verb was cut short at any line of it.

        An error, or Ctrl-C, may leave a block in two places or in none. Free is then whatever no other table holds: to
        know that takes a look at the whole pool, which `free` can do without.
        """
        for cut_short in {*self._tables, *self._num_tokens} if request_id is None else {request_id}:
            self._tables.pop(cut_short, None)
            self._num_tokens.pop(cut_short, None)
        owned = {block for table in self._tables.values() for block in table}
        self._free = deque(block for block in range(self.num_blocks) if block not in owned)

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a request in the order of its tokens; a copy."""
        return list(self._table(request_id))

    def num_tokens(self, request_id: str) -> int:
        """Tokens that a request has room for."""
        self._table(request_id)
        return self._num_tokens[request_id]

    def check_integrity(self) -> None:
        """Raise an `AssertionError` unless every block has exactly one place and every table its right length."""
        owned = [block for table in self._tables.values() for block in table]
        assert sorted([*owned, *self._free]) == list(range(self.num_blocks)), "a block is lost, or in two places"
        assert self._tables.keys() == self._num_tokens.keys(), "a request has blocks but no tokens, or the reverse"
        for request_id, table in self._tables.items():
            assert len(table) == self.num_blocks_for(self._num_tokens[request_id]), f"{request_id}: wrong table length"

    def _table(self, request_id: str) -> list[int]:
        if request_id not in self._tables:
            raise ValueError(f"request {request_id} has no blocks: it was never allocated, or has been freed already")
        return self._tables[request_id]

    def _num_missing(self, request_id: str, num_tokens: int) -> int:
        table = self._table(request_id)
        return self.num_blocks_for(self._num_tokens[request_id] + num_tokens) - len(table)

    def _grow(self, request_id: str, num_tokens: int) -> None:
        for _ in range(self._num_missing(request_id, num_tokens)):
            self._tables[request_id].append(self._free.popleft())
        self._num_tokens[request_id] += num_tokens
