"""HTML page of a report: one file without network access or other dependencies."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rlctl.errors import MissingExtraError


def page(content: Mapping[str, Any]) -> str:
    """Return the page for `content.content`, with plotly's JavaScript inlined.

    Raises MissingExtraError without plotly.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "a report draws its figures with plotly, which is not installed",
            hint="pip install 'rlctl[report]'",
        ) from error
    parts = {
        "title": html.escape(str(content["title"])),
        "style": _part("page.css"),
        "plotly": get_plotlyjs(),
        "content": _inside_a_script(content),
        "charts": _part("charts.js"),
        "search": _part("search.js"),
        "timeline": _part("timeline.js"),
        "script": _part("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _part("page.html"))


def _part(name: str) -> str:
    return (files("rlctl.runs.report") / name).read_text(encoding="utf-8")


def _inside_a_script(content: Mapping[str, Any]) -> str:
    """Encode as JSON with `<` escaped, so that no text can end the script element."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
