"""HTML page of a report: one file without network access or other dependencies.

`rlctl.plugins.console.board` serves the same page and scripts, which there load their data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

# Scripts of the page in order, and those that only the board has.
SCRIPTS = ("charts.js", "draw.js", "search.js", "timeline.js", "samples.js", "page.js")
BOARD_SCRIPTS = ("board.js", "table.js", "overview.js", "live.js", "actions.js")


def page(content: Mapping[str, Any]) -> str:
    """Return the page for `content.content`, with plotly's JavaScript inlined."""
    scripts = [plotly(), "\n".join([*map(part, SCRIPTS), "showReport();"])]
    return render(
        {
            "title": html.escape(str(content["title"])),
            "policy": f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            "style": f"<style>\n{part('page.css')}</style>",
            "content": _inside_a_script(content),
            "settings": "",
            "scripts": "\n".join(f"<script>{text}</script>" for text in scripts),
        }
    )


def render(parts: Mapping[str, str]) -> str:
    """Return the page with its marks `{{name}}` replaced."""
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], part("page.html"))


def part(name: str) -> str:
    """Return a file of the page."""
    return (files("rlctl.plugins.console.report") / name).read_text(encoding="utf-8")


def plotly() -> str:
    """Return plotly's JavaScript."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _policy(scripts: list[str]) -> str:
    """Return a Content-Security-Policy that lets only these inline scripts run."""
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts
    ]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _inside_a_script(content: Mapping[str, Any]) -> str:
    """Encode as JSON with `<` escaped, so that no text can end the script element."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
