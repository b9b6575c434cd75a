"""`--show-blocks`: a request's block table as it grows, and the text that each block holds. For people to watch.

    + block 3      table [0, 1, 2, 3], 1452 blocks free
    block 3        ■■■■■■■■■■■■■■■■  The answer to this question lies in the

One sign is one slot: an empty square (blue) for a token of the prompt, a full one (orange) for a generated token, a dot
for a slot that is free.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from common.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.console import Console

    from .llm import LLM


def show_blocks(llm: "LLM", stream: Iterator[RequestOutput], console: "Console") -> Iterator[RequestOutput]:
    """Pass the stream on, and print what happened to the blocks at each of its steps."""
    token_ids: list[int] = []
    num_seen = 0  # blocks of the table that have been printed as taken
    table: list[int] = []
    for output in stream:
        if not token_ids:
            token_ids = list(output.prompt_token_ids)
            if output.outputs[0].index:
                console.print(f"choice {output.outputs[0].index}", style="dim")
        table = llm.block_manager.block_table(output.request_id)
        num_prompt = len(output.prompt_token_ids)
        if len(table) > num_seen:
            if num_seen:  # the block before is full now
                _print_block(console, llm, table, num_seen - 1, token_ids, num_prompt)
            free = llm.block_manager.num_free_blocks
            console.print(
                f"+ block {_short(table[num_seen:]):<7} table [{_short(table)}], {free} blocks free", style="dim"
            )
            for index in range(num_seen, len(table) - 1):  # those that a prompt has filled at once
                _print_block(console, llm, table, index, token_ids, num_prompt)
            num_seen = len(table)
        token_ids += output.outputs[0].token_ids
        yield output
        if output.outputs[0].finish_reason is not None:
            # The last token was sampled and never computed: it has no slot.
            _print_block(console, llm, table, num_seen - 1, token_ids[:-1], num_prompt)
            console.print(f"- all {len(table)} blocks go back to the free list", style="dim")
            token_ids, num_seen = [], 0


def _short(blocks: list[int]) -> str:
    """The numbers, without the middle of a long table."""
    names = list(map(str, blocks))
    return ", ".join(names if len(names) <= 12 else [*names[:4], "...", *names[-4:]])


def _print_block(
    console: "Console", llm: "LLM", table: list[int], index: int, token_ids: list[int], num_prompt: int
) -> None:
    """One line: the block's number, its slots, its text."""
    block_size = llm.block_manager.block_size
    start = index * block_size
    held = token_ids[start : start + block_size]
    num_from_prompt = min(max(num_prompt - start, 0), len(held))
    line = Text(f"block {table[index]:<9} ")
    line.append("□" * num_from_prompt, "blue").append("■" * (len(held) - num_from_prompt), "dark_orange")
    line.append("·" * (block_size - len(held)), "dim")
    text = b"".join(map(llm.tokenizer.token_bytes, held)).decode(errors="replace")
    line.append(f"  {text}".replace("\n", "⏎"))
    console.print(line, no_wrap=True, overflow="ellipsis")
