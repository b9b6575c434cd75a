"""`--show-blocks`: what a learner sees."""

from tests.kit.tokenizers import byte_tokenizer
from v0_2_block_manager.generate import main


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


def test_the_pools_formula_is_printed_with_its_numbers(tiny, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["Hi", "--model", str(tiny.folder), "--num-blocks", "10", "--max-tokens", "1", "--raw"])
    expected = "10 blocks of 2 x 2 layers x 2 KV heads x 16 x 4 bytes x 16 tokens = 8.00 KiB, together 80.00 KiB"
    assert expected in capsys.readouterr().err
