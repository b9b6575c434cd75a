"""What a page needs to watch the engine: `WS /events`, the recording, control, and the page itself.

    GET  /visualizer            the page (`web/`), which asks for nothing that is not ours
    WS   /events                a snapshot, then events (`viewers.py`)
    GET  /events/recording      the same as JSON lines, to be replayed
    POST /events/control        pause, single steps, slow motion; only with --allow-control

A page can set no header on a WebSocket. It sends its API key as a second subprotocol, `mini-vllm.key.` and the key in
base64url: a query would stand in every log on the way. Who else watches sends `Authorization`, as for everything.
`middleware.py` checks both before the connection is accepted, and refuses pages of other origins.
"""

import asyncio
import contextlib
import mimetypes
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from ..async_engine import AsyncEngine
from .errors import error_response
from .protocol import ControlRequest
from .responses import ErrorBody, Pace, respond
from .server_args import ServerArgs
from .viewers import EngineEndedError, Viewers

WEB = Path(__file__).parents[1] / "web"
SUBPROTOCOL = "mini-vllm"
HEADERS = {
    # Nothing from elsewhere, no script but ours, and no text of a model that could become one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
LINES = 1000  # of the recording, in one chunk of the answer


def install(app: FastAPI, engine: AsyncEngine, args: ServerArgs, about: dict[str, Any]) -> None:
    """Add these routes to an app.

    Args:
        app: the server's.
        engine: what is watched.
        args: the server's flags.
        about: what every snapshot says beside the engine's state.
    """
    viewers = Viewers(engine, about, {"allow_control": args.allow_control}, most_recorded=args.max_recorded_events)
    files = {path.name: path for path in WEB.iterdir() if path.is_file()}

    @app.websocket("/events")
    async def events(websocket: WebSocket) -> None:
        if viewers.is_full:
            refusal = "As many watch as may: close one of the other pages."
            await websocket.send_denial_response(error_response(503, refusal, "service_unavailable_error"))
            return
        asked = websocket.scope["subprotocols"]
        await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in asked else None)
        sending = asyncio.create_task(_send(websocket, viewers))
        listening = asyncio.create_task(_until_gone(websocket))
        try:
            await asyncio.wait({sending, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, listening):
                task.cancel()
            await asyncio.wait({sending, listening})

    @app.get("/events/recording", response_class=Response, responses={401: {"model": ErrorBody}})
    async def recording() -> Response:
        """The run so far as JSON lines, from when it was first watched; the oldest part may be gone."""
        messages = viewers.recording()
        if not messages:
            why = (
                "it is switched off (--max-recorded-events 0)" if not args.max_recorded_events else "nobody has watched"
            )
            return error_response(404, f"Nothing is recorded: {why}. Open /visualizer, and ask again.")
        headers = {"Content-Disposition": 'attachment; filename="mini-vllm.jsonl"'}
        return StreamingResponse(_lines(messages), headers=headers, media_type="application/jsonl")

    @app.post("/events/control", responses={200: {"model": Pace}, 403: {"model": ErrorBody}})
    async def control(body: ControlRequest, _: Request) -> Response:
        """Pause the engine, let it make single steps, or slow it down."""
        if not args.allow_control:
            return error_response(403, "This server was started without --allow-control: it takes no orders.")
        engine.check_serving()
        pace = engine.set_pace(paused=body.paused, delay=body.delay, num_steps=body.steps or 0)
        return respond(Pace(paused=pace.paused, delay=pace.delay))

    @app.get("/visualizer", include_in_schema=False)
    async def visualizer(request: Request) -> Response:
        """To the folder, so that the page finds its files beside it."""
        return RedirectResponse("visualizer/" + (f"?{request.url.query}" if request.url.query else ""))

    @app.get("/visualizer/{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        """A file of the page."""
        path = files.get(name or "index.html")
        if path is None:
            raise HTTPException(404)
        return FileResponse(path, headers=HEADERS, media_type=mimetypes.guess_type(path.name)[0])


async def _send(websocket: WebSocket, viewers: Viewers) -> None:
    """Send until the viewer has gone, or there is no more."""
    with contextlib.suppress(WebSocketDisconnect):
        try:
            async with contextlib.aclosing(viewers.watch()) as messages:
                async for message in messages:
                    await websocket.send_text(message)
        except EngineEndedError:
            await websocket.close(1011, "The engine has stopped after an internal error.")


async def _until_gone(websocket: WebSocket) -> None:
    """A viewer has nothing to say: whatever it sends is read and dropped."""
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass


async def _lines(messages: Sequence[str]) -> AsyncIterator[str]:
    for start in range(0, len(messages), LINES):
        yield "".join(f"{message}\n" for message in messages[start : start + LINES])
