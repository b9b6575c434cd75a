"""`python -m v0_5_bench.server --profile`: POST /start_profile and /stop_profile, the routes that vLLM has for this.

The second one answers with the parts of the steps since the first (`profiler.py`), and with the processor time that the
event loop took meanwhile: it runs beside the engine's thread, so that its time is in the steps only as far as the two
wait for each other. The clocks are put in and taken out by the engine's thread, between two steps. As vLLM's, the two
need no key: whoever asks for `--profile` measures.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from ...server.errors import error_response
from .profiler import Profiler

if TYPE_CHECKING:
    from fastapi import FastAPI


def install(app: "FastAPI") -> None:
    """Add the two routes to a server that has not started."""
    running: list[tuple[Profiler, float]] = []
    serving = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: "FastAPI") -> AsyncIterator[Any]:
        async with serving(app) as state:
            yield state
        while running:  # nobody has ended it; a clock that stayed would hold the engine, and its memory
            running.pop()[0].__exit__(None, None, None)

    app.router.lifespan_context = lifespan

    async def between_steps(command: Callable[[], object]) -> None:
        """Have the engine's thread do this; what it raises is raised here, and that thread goes on."""
        app.state.engine.check_serving()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            try:
                command()
            except Exception as error:
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                loop.call_soon_threadsafe(done.set_result, None)

        app.state.engine.call_soon(call)
        await done

    @app.post("/start_profile", include_in_schema=False)
    async def start_profile() -> Response:
        """Begin to take the time."""
        if running:
            return error_response(400, "A profile is running already: POST /stop_profile ends it.")
        profiler = Profiler(app.state.engine.engine)
        running.append((profiler, time.thread_time()))
        try:
            await between_steps(profiler.__enter__)
        except Exception:
            running.clear()
            raise
        return JSONResponse({"status": "ok"})

    @app.post("/stop_profile", include_in_schema=False)
    async def stop_profile() -> Response:
        """End it; the answer is what was found."""
        if not running:
            return error_response(400, "No profile is running: POST /start_profile begins one.")
        profiler, begin = running.pop()
        seconds = time.thread_time() - begin
        await between_steps(lambda: profiler.__exit__(None, None, None))
        summary = profiler.summary()
        num_steps = max(summary["num_steps"], 1)
        return JSONResponse(summary | {"event_loop_cpu_ms": seconds * 1e3 / num_steps})
