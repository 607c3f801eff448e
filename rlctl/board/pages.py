"""HTML page and static files of the board: the front end of `rlctl.runs.report`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from aiohttp import web

from rlctl import __version__
from rlctl.runs.report.page import BOARD_SCRIPTS, SCRIPTS, part, plotly, render

_SCRIPTS = (*SCRIPTS, *BOARD_SCRIPTS)
_TYPES = {"js": "text/javascript", "css": "text/css"}


class Pages:
    """Files by name; their address has a digest, so that browsers may keep them.

    Raises MissingExtraError without plotly.
    """

    def __init__(self, settings: Mapping[str, str | bool]) -> None:
        # `</script>` cannot occur: the values are a token of base64 and flags.
        self.settings = json.dumps(settings)
        own = {name: part(name) for name in (*_SCRIPTS, "page.css")}
        self.files = own | {"plotly.js": plotly()}
        text = "".join([__version__, *self.files.values()])
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    def page(self) -> web.Response:
        """Return the page; which view it shows depends on the query of its address."""
        links = "\n".join(
            f'<script defer src="/static/{self.digest}/{name}"></script>' for name in _SCRIPTS
        )
        text = render(
            {
                "title": "rlctl board",
                "policy": "",
                "style": f'<link rel="stylesheet" href="/static/{self.digest}/page.css">',
                "content": "",
                "settings": self.settings,
                "scripts": links,
            }
        )
        return web.Response(text=text, content_type="text/html")

    async def static(self, request: web.Request) -> web.Response:
        """Return a script or the style sheet."""
        name = request.match_info["name"]
        text = self.files.get(name)
        if text is None:
            raise web.HTTPNotFound
        return web.Response(
            text=text,
            content_type=_TYPES[name.rpartition(".")[2]],
            headers={"Cache-Control": "private, max-age=31536000, immutable"},
        )
