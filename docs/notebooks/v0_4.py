# %% [markdown]
# # v0.4: poke at the server
#
# A server is easiest to understand from both sides of the wire. So this notebook starts the server of
# [v0.4](../milestones/v0_4.md) in a thread of its own, asks it over a real socket, and looks into the engine
# behind it meanwhile. The client is Python's own `http.client`: you see what is sent, not what a library makes of
# it.
#
# On your machine: `python docs/notebooks/v0_4.py`, or `make notebooks` and then Jupyter.

# %%
import asyncio
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import uvicorn

from v0_4_http import LLMEngine
from v0_4_http.server.app import build_app
from v0_4_http.server.server_args import ServerArgs

engine = LLMEngine(num_blocks=64)
app = build_app(engine, ServerArgs(log_level="warning", served_model_name=["smollm"]))
listener = socket.create_server(("127.0.0.1", 0))  # port 0: a free one
PORT = listener.getsockname()[1]
server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
thread.start()
while not server.started:
    time.sleep(0.01)
print("it listens")

# %% [markdown]
# ## A whole answer
#
# One POST, one JSON object. Besides the text it says why the text ended, and how many tokens were read and
# written.

# %%
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


def request(method: str, path: str, **body: object) -> http.client.HTTPResponse:
    """Send a request; the response is open, and can be read line by line."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    headers = {"Content-Type": "application/json"} if body else {}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    return connection.getresponse()


def chat(**fields: object) -> http.client.HTTPResponse:
    """Ask why the sky is blue, greedily."""
    fields = {"messages": QUESTION, "temperature": 0} | fields
    return request("POST", "/v1/chat/completions", **fields)


response = chat(max_tokens=12)
answer = json.loads(response.read())
print(response.status)
print(json.dumps(answer, indent=2))
TEXT = answer["choices"][0]["message"]["content"]
assert answer["choices"][0]["finish_reason"] == "length"
assert answer["usage"] == {"prompt_tokens": 36, "completion_tokens": 12, "total_tokens": 48}

# %% [markdown]
# ## The same as a stream
#
# With `stream: true` the answer comes as *server-sent events*: a line that begins with `data:`, and an empty one
# after it. The first event is shown below as it comes over the wire, of the others only what differs.
#
# *Predict: how many events are there for three tokens?*

# %%
response = chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
print(response.headers["Content-Type"])
first, empty = response.readline(), response.readline()
print(first.decode().rstrip())
assert first.startswith(b"data: {")
assert not empty.strip()

events = [first, *filter(bytes.strip, response)]
for event in events[1:-1]:
    chunk = json.loads(event.removeprefix(b"data: "))
    print("data: ...", json.dumps(chunk["choices"] or chunk["usage"]))
print(events[-1].decode().rstrip())
assert len(events) == 3 + 4
assert events[-1].strip() == b"data: [DONE]"

# %% [markdown]
# Seven: the role, three pieces of text, an empty one with the reason, the counts that were asked for, and
# `[DONE]`.
#
# When does each event arrive? Not at the end: the engine hands a token over as soon as its step is done.

# %% tags=["timed"]


def stream(**fields: object) -> list[tuple[float, dict]]:
    """The choices of a streamed answer, each with the second in which it came."""
    start, choices = time.perf_counter(), []
    for raw in chat(stream=True, **fields):
        if raw.startswith(b"data: {"):
            [choice] = json.loads(raw.removeprefix(b"data: "))["choices"]
            choices.append((time.perf_counter() - start, choice))
    return choices


choices = stream(max_tokens=12)
pieces = [(seconds, choice["delta"].get("content")) for seconds, choice in choices]
pieces = [(1000 * seconds, text) for seconds, text in pieces if text]

figure, axes = plt.subplots(figsize=(6, 2.2))
axes.vlines([ms for ms, _ in pieces], 0, 1, color="#5c6bc0", linewidth=2)
for ms, text in pieces:
    axes.text(ms, 1.05, text.strip(), rotation=60, fontsize=9)
axes.spines["left"].set_visible(False)
axes.set(xlabel="ms since the request", xlim=(0, None), ylim=(0, 2), yticks=[])

assert "".join(text for _, text in pieces) == TEXT, "streamed or whole, the text is the same"
assert len(pieces) == 12
assert pieces[-1][0] - pieces[0][0] > 11, "not all at once"

# %% [markdown]
# The first gap is the time to the first token (TTFT): the prompt is computed in it. The others are the
# inter-token latency.
#
# ## A stop string, and what is held back
#
# A stop string ends the answer, and must not be seen. But it comes in pieces. The engine cannot show ` in` while
# it may be the beginning of ` in the end`, nor take it back once it is shown. So it *holds back* the longest end
# of the text that a stop string begins with.
#
# The answer goes `... question lies in the intricate dance of light`.
#
# *Predict: with the stop string `in the end`, which of these words come late, and with which word do they come?*

# %%


def deltas(**fields: object) -> list[str]:
    """The pieces of text of a stream, one for each event."""
    texts = [choice["delta"].get("content") for _, choice in stream(max_tokens=12, **fields)]
    return [text for text in texts if text]


free, held = deltas(), deltas(stop=["in the end"])
print("without:", free)
print("with:   ", held)
assert "".join(free) == "".join(held) == TEXT, "it did not come to the stop string"
assert "in the intricate" in held, "three words in one event"

# %% [markdown]
# The space before `in` comes at once, since it begins no stop string. `in` and `the` wait. With `intricate` it is
# clear that it was not the end after all, and the three come together.
#
# Now a stop string that is met.

# %%
choices = [choice for _, choice in stream(max_tokens=12, stop=["in the intricate"])]
print([choice["delta"].get("content") for choice in choices])
print({name: choices[-1][name] for name in ("finish_reason", "stop_reason")})
text = "".join(choice["delta"].get("content") or "" for choice in choices)
assert text == TEXT[: TEXT.index("in the intricate")]
assert choices[-1]["finish_reason"] == "stop"
assert choices[-1]["stop_reason"] == "in the intricate"

# %% [markdown]
# ## Wrong requests
#
# Whatever can be known to be wrong is refused before anything runs, with status 400 and an object that says which
# parameter it was.
#
# *Predict: which of these are refused? `temperature` 3, a field that nobody knows, `tools`, an answer longer than
# the context, a model that is not served.*

# %%
requests = {
    "temperature": {"temperature": 3},
    "an unknown field": {"max_tokens": 1, "colour": "blue"},
    "tools": {"tools": [{"type": "function", "function": {"name": "look_up"}}]},
    "too long": {"max_tokens": 5000},
    "another model": {"model": "gpt-4"},
}
statuses = {}
for name, fields in requests.items():
    response = chat(**fields)
    body = json.loads(response.read())
    statuses[name] = response.status
    print(f"{name}: {response.status}")
    if "error" in body:
        print(json.dumps(body["error"], indent=2))
assert list(statuses.values()) == [400, 200, 400, 400, 404]

# %% [markdown]
# A field that would change the answer and is not supported is refused; one that nobody knows cannot change it,
# and is passed over. The same holds for streams: they are refused with a status, too, since nothing has been sent
# yet.

# %%
response = chat(temperature=3, stream=True)
print(response.status, response.headers["Content-Type"])
assert response.status == 400

# %% [markdown]
# ## Whoever leaves is aborted
#
# Ask for a long answer, read three events, and hang up. The engine is in this process, so you can watch its
# blocks.
#
# *Predict: how many blocks does the request have when you leave? And a moment later?*

# %%
blocks = engine.scheduler.block_manager
response = chat(stream=True, max_tokens=500)
for _ in range(3):
    print(response.readline().decode().rstrip()[:60], "...")
    response.readline()
num_taken = blocks.num_blocks - blocks.num_free_blocks
response.close()

left = time.perf_counter()
while engine.has_unfinished_requests() and time.perf_counter() - left < 20:
    time.sleep(0.005)
print(num_taken, "blocks while it ran")
print(blocks.num_blocks - blocks.num_free_blocks, "blocks after you had left")
assert num_taken >= 3
assert blocks.num_free_blocks == blocks.num_blocks
assert not engine.has_unfinished_requests()

# %% [markdown]
# Nobody computes the other tokens, and the blocks are somebody else's.
#
# ## Four clients at once
#
# Each client has a thread here; in the server they are coroutines, and in the engine they share each step.
#
# *Predict: one answer of 24 tokens takes some time. How many times as long do four take, asked at once?*

# %% tags=["timed"]


def ask() -> bytes:
    """One client's question, and its answer."""
    return chat(max_tokens=24).read()


def seconds_for(num_clients: int) -> float:
    """How long it takes until so many clients have their answers."""
    start = time.perf_counter()
    with ThreadPoolExecutor() as clients:
        for answer in [clients.submit(ask) for _ in range(num_clients)]:
            answer.result()
    return time.perf_counter() - start


one, four = seconds_for(1), seconds_for(4)
print(f"one: {one:.2f} s, four at once: {four:.2f} s, {four / one:.1f} times as long")
assert four < 4 * one

# %% [markdown]
# ## What the server counts
#
# `/metrics` is for Prometheus, under vLLM's names. It has counted all that you did above.

# %%
exposition = request("GET", "/metrics").read().decode()
values = {}
for line in exposition.splitlines():
    if not line.startswith("#") and "_bucket" not in line and "_created" not in line:
        name, _, value = line.rpartition(" ")
        reason = name.partition('finished_reason="')[2].partition('"')[0]
        values[name.partition("{")[0] + (f" ({reason})" if reason else "")] = float(value)
for name, value in values.items():
    print(f"{value:>10.4g}  {name}")
assert values["vllm:request_success_total (abort)"] == 1, "you left once"
assert values["vllm:request_success_total (stop)"] == 1, "the stop string was met once"
assert values["vllm:num_requests_running"] == 0
assert values["vllm:kv_cache_usage_perc"] == 0

# %% [markdown]
# ## The end
#
# The server ends in order: its engine's thread, too. (At a terminal that is Ctrl-C, or SIGTERM.)

# %%
server.should_exit = True
thread.join(timeout=30)
assert not thread.is_alive()
print("it has ended")

# %% [markdown]
# ## Poke on
#
# - Ask for `n=3` as a stream. How do you tell the choices apart?
# - Stop at `"."`, and put `include_stop_str_in_output: true` beside it. What changes in the last piece of text?
# - Start the server with `ServerArgs(max_queued_requests=1)` and `LLMEngine(max_num_seqs=1)`, and let ten clients
#   ask at once. What do most of them get, and which header tells them when to come back?
# - Let `engine.model_runner.run` raise for one request of two. What does the other one see?
