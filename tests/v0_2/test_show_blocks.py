"""`--show-blocks`: what a learner sees."""

import io

from rich.console import Console

from common.sampling_params import SamplingParams
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import byte_tokenizer
from v0_2_block_manager import LLM
from v0_2_block_manager.generate import main
from v0_2_block_manager.show_blocks import _short, show_blocks


def test_the_table_is_shown_as_it_grows_with_the_text_of_each_block(tiny, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    options = ["--block-size", "4", "--num-blocks", "10", "--max-tokens", "5", "--ignore-eos", "--raw"]
    assert main(["abcdef", "--model", str(tiny.folder), "--show-blocks", *options]) == 0
    captured = capsys.readouterr()
    generated = tiny.tokens(list(b"abcdef"), 5)
    # (An unfinished character at the end is dropped.)
    assert captured.out.rstrip("\n") == byte_tokenizer().decode(generated).rstrip("\ufffd")
    lines = [line.rstrip() for line in captured.err.split("\n")]
    start = lines.index("+ block 0, 1    table [0, 1], 8 blocks free")
    assert lines[start + 1] == "block 0         □□□□  abcd"
    assert lines[start + 2].startswith("block 1         □□■■  ef")
    # 6 + 5 - 1 = 10 tokens have KV: the third block has two of them, and two free slots.
    assert lines[start + 3] == "+ block 2       table [0, 1, 2], 7 blocks free"
    assert lines[start + 4].startswith("block 2         ■■··  ")
    assert lines[start + 5] == "- all 3 blocks go back to the free list"


def test_choices_whole_characters_and_newlines_are_shown_in_colour():
    prompt = "中文\n🙂"  # 3 + 3 + 1 + 4 bytes: the second block holds the second character's end
    model = ScriptModel([65, 66, 67], prompt_len=11)
    llm = LLM(model, tokenizer=byte_tokenizer(), block_size=4, num_blocks=10)
    console = Console(record=True, width=100, file=io.StringIO(), color_system="standard", force_terminal=True)
    params = SamplingParams(temperature=0.0, max_tokens=3, n=2)
    assert len(list(show_blocks(llm, llm.stream(prompt, params), console))) == 6
    html = console.export_html(clear=False)
    assert "color: #000080" in html  # a prompt's slots are blue
    lines = [line.rstrip() for line in console.export_text().split("\n")]
    assert lines[0] == "+ block 0, 1, 2 table [0, 1, 2], 7 blocks free"
    assert lines[1].startswith("block 0         □□□□  中")
    assert lines[2].endswith("⏎\ufffd") or "⏎" in lines[2]
    assert "choice 1" in lines
    assert lines.count("- all 4 blocks go back to the free list") == 2


def test_a_long_table_is_shown_without_its_middle():
    assert _short(list(range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert _short(list(range(60))) == "0, 1, 2, 3, ..., 56, 57, 58, 59"


def test_the_pools_formula_is_printed_with_its_numbers(tiny, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["Hi", "--model", str(tiny.folder), "--num-blocks", "10", "--max-tokens", "1", "--raw"])
    expected = "10 blocks of 2 x 2 layers x 2 KV heads x 16 x 4 bytes x 16 tokens = 8.00 KiB, together 80.00 KiB"
    assert expected in capsys.readouterr().err
