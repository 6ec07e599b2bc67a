"""`async-grpo watch [RUN_DIR ...]`: runs in a browser, live and side by side.

Runs in: a process of its own, on any machine that sees the runs' directories. Hides HTTP.
Invariants: nothing is written; no request names a file; one under a name that could be made to lead
here is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
from pathlib import Path
from typing import Any

from async_grpo.config.command_line import RUN, RUNS, Parser
from async_grpo.errors import SetupError

DESCRIPTION = "Show runs in a browser, live and side by side, until Ctrl-C."
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
PAGE = Path(__file__).with_name("page.html")
_HEADERS = {"Cache-Control": "no-store", "X-Frame-Options": "DENY"}


def arguments(parser: Parser) -> None:
    """Take any number of runs, and where the page is."""
    runs = f"run directories, or directories of runs: the newest in each (default: {RUNS})"
    parser.add_argument("run_dirs", metavar=RUN, nargs="*", type=Path, default=[RUNS], help=runs)
    parser.add_argument("--port", metavar="N", type=int, default=0, help="default: a free one")
    host = f"interface that it listens on; whoever reaches it may look (default: {LOOPBACK})"
    parser.add_argument("--host", metavar="NAME", default=LOOPBACK, help=host)


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, which is raised again. Raises SetupError for a taken port."""
    import uvicorn

    try:
        listening = socket.create_server((options.host, options.port))
    except (OSError, OverflowError) as error:
        at = f"--host {options.host} --port {options.port}"
        raise SetupError(f"{at} cannot be listened on ({error}): choose another one") from error
    app = application(options.run_dirs, options.host)
    print(f"http://{options.host}:{listening.getsockname()[1]}/", flush=True)
    quiet = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(quiet).run([listening])
    return 0


def application(run_dirs: list[Path], host: str) -> Any:
    """Make the ASGI application: these runs, and the metrics that the page names."""
    from starlette import applications, responses, routing
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from async_grpo.tools.watch.follow import FollowedRun

    page = PAGE.read_text(encoding="utf-8")
    runs = [FollowedRun(run_dir, re.findall(r'data-metric="(.+?)"', page)) for run_dir in run_dirs]

    async def show(request: Any) -> Any:
        return responses.HTMLResponse(page, headers=_HEADERS)

    async def data(request: Any) -> Any:
        seen = json.dumps([run.look(request.query_params.get("after", "")) for run in runs])
        return responses.Response(seen, media_type="application/json", headers=_HEADERS)

    app = applications.Starlette(routes=[routing.Route("/", show), routing.Route("/data", data)])
    names = ["*"] if host == EVERYWHERE else [host, LOOPBACK, "localhost"]
    return TrustedHostMiddleware(app, names, www_redirect=False)
