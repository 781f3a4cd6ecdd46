"""What a server logs, on stderr."""

from __future__ import annotations

import logging


def set_up_logging(*, access_log: bool) -> None:
    """Our own INFO lines, everybody's warnings, and with access_log a line for each request."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    logging.getLogger("jaxserve.access").setLevel(logging.INFO if access_log else logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)
