"""A server that has ended frees its engine's memory at once, though the application around it is still there.

FastAPI's own objects refer to each other, so that nothing but the garbage collector would ever free them.
"""

import pytest

from tests.kit.memory import Watched, without_garbage_collector
from tests.kit.server import bodies, connect, wait_for_aborts

SINCE = "v0_4"


def nothing(server):
    pass


def answers(server):
    assert server.complete(max_tokens=5).status_code == 200
    assert server.chat(max_tokens=5).status_code == 200


def streams_to_the_end(server):
    assert bodies(server.chat(stream=True, max_tokens=5))


def a_stream_whose_client_leaves(server):
    with connect(server, "/v1/completions", prompt="a", max_tokens=400, ignore_eos=True, stream=True) as connection:
        connection.recv(1)
    wait_for_aborts(server, 1)


def refusals(server):
    assert server.complete(max_tokens=100_000).status_code == 400
    assert server.complete(model="other").status_code == 404


def a_failed_step(server):
    assert server.complete(prompt="z").status_code == 500
    assert "error" in bodies(server.complete(prompt="z", stream=True))[0]


def a_dead_engine(server):
    def schedule():
        raise RuntimeError("a fault of ours")

    server.engine.scheduler.schedule = schedule
    assert server.complete().status_code == 503
    assert server.http.get("/health").status_code == 503


@pytest.mark.parametrize(
    "use",
    [
        nothing,
        answers,
        streams_to_the_end,
        a_stream_whose_client_leaves,
        refusals,
        a_failed_step,
        a_dead_engine,
    ],
)
def test_a_server_that_has_ended_leaves_neither_its_model_nor_its_kv_after(serve, use):
    watched = []
    with without_garbage_collector():
        with serve(Watched(watched), num_blocks=200, block_size=4) as server:
            use(server)
            app = server.app
        del server
        assert [what for what, is_there in watched if is_there() is not None] == []
        assert app.state.engine is not None
    assert ("kv_cache" in dict(watched)) == (use not in (nothing, refusals, a_dead_engine))
