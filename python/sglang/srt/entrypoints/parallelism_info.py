"""`GET /parallelism_config?rank=R` on the engine's own HTTP port.

The answer is the bootstrap server's, passed on: the port may be served by several worker processes, of which none need
be the one that hosts the ranks' registrations. A client so needs one address and one key for an engine.
"""

from __future__ import annotations

import requests
from fastapi import APIRouter
from fastapi.responses import JSONResponse

router = APIRouter()
_TIMEOUT_S = 5.0


@router.get("/parallelism_config")
def parallelism_config(rank: int) -> JSONResponse:
    """A `RankParallelismConfig` as JSON. `rank` is the index into `scheduler_actors`.

    404 if there is no such rank or the engine does not register ranks; 503 with Retry-After while the rank has not
    registered or can't be asked.
    """
    from sglang.srt.entrypoints.http_server import get_global_state  # which imports this module

    server_args = get_global_state().tokenizer_manager.server_args
    if not server_args.registers_parallelism_config():
        return _error(
            404,
            "this engine does not register its ranks; start it with --enable-engine-info-bootstrap "
            "or --enable-rdt-weight-sync",
        )
    url = f"{server_args.engine_info_bootstrap_url}/parallelism_config"
    try:
        answer = requests.get(url, params={"rank": rank}, timeout=_TIMEOUT_S)
    except requests.exceptions.RequestException as error:
        return _error(503, f"the ranks' registrations can't be asked for at {url}: {error}")
    return JSONResponse(
        answer.json(),
        status_code=answer.status_code,
        headers={k: v for k, v in answer.headers.items() if k.lower() == "retry-after"},
    )


def _error(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=headers)
