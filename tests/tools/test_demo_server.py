"""The demo's last act: a server, OpenAI's client, and an orderly end."""

import pytest

import v0_5_bench
from common.tokenizer import Tokenizer
from tests.kit.server import running
from tools import demo_server


def test_openais_client_streams_the_models_answer_and_the_server_ends_with_0(tiny, capsys):
    pytest.importorskip("openai")
    assert demo_server.main(["Hi", "--max-tokens", "5", "--model", str(tiny.folder)]) == 0
    out, err = capsys.readouterr()
    tokenizer = Tokenizer.from_folder(tiny.folder)
    tokens = tiny.tokens(tokenizer.chat_token_ids([{"role": "user", "content": "Hi"}]), 5)
    assert out == tokenizer.decode(tokens) + "\n"
    assert "The server has ended with exit code 0." in err


def test_a_server_that_runs_already_is_asked_and_goes_on(tiny, capsys):
    pytest.importorskip("openai")
    with running(v0_5_bench, tiny.folder) as server:
        assert demo_server.main(["Hi", "--max-tokens", "5", "--base-url", server.url]) == 0
        assert server.http.get("/health").status_code == 200
    tokenizer = Tokenizer.from_folder(tiny.folder)
    tokens = tiny.tokens(tokenizer.chat_token_ids([{"role": "user", "content": "Hi"}]), 5)
    out, err = capsys.readouterr()
    assert out == tokenizer.decode(tokens) + "\n"
    assert "has ended" not in err


def test_a_server_that_does_not_start_is_told_in_one_sentence(capsys):
    pytest.importorskip("openai")
    assert demo_server.main(["Hi", "--model", "/nowhere"]) == 1
    assert "error: v0_4_http did not start" in capsys.readouterr().err
