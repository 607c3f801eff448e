"""Final answer of a response: last box, marked answer, last formula or last number."""

from __future__ import annotations

import re

_MAX_BOXES = 20
_MAX_SEARCHED = 10_000  # characters from the end
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# Several boxes in one formula are a list.
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$]|\\quad)*(?:[,;]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)"
    r"(?:[,;\s$]|\\quad|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*"
)
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_MARK = re.compile(r"####[ \t]*(\S[^\n]*)")
_SAID = re.compile(
    r"\b(?:answer|result|solution)(?:\s+[a-z]+){0,6}?[\s*]{0,9}(?:\bis\b|\bare\b|\bequals\b|[:=])"
    r"[\s*:=]{0,9}(?P<answer>[^\n]*\w[^\n]*)",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$((?:\\.|[^$\n\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
_SENTENCE_END = re.compile(
    r"[.!?](?=\s+[A-Z]|\s*$)|\s(?:because|since|as|so|for|which|where|when|after)\s|\\\]|,\s+(?:but|so|and)\s"
)
_NUMBER = re.compile(
    r"(?<![\w.])[-\N{MINUS SIGN}]?\\?[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?"
    r"|(?<![\w.])-?\.\d+"
)
_DENIED = re.compile(
    r"(?:\bnot|n't|\bisn't|\bnever|\bincorrect|\bwrong)\s*$|^(?:not|never|wrong|unknown)\b",
    re.IGNORECASE,
)


def without_thoughts(response: str) -> str:
    """Return the response after its last `</think>`; a thought that has no end has no answer."""
    said = response.rpartition("</think>")[2]
    return said.partition("<think>")[0]


def final_answer(response: str) -> str | None:
    """Return the final answer as written, or None if the response has none."""
    said = without_thoughts(response)
    boxes = list(_BOX.finditer(said))
    if boxes:
        return _boxed(said, boxes)
    said = said[-_MAX_SEARCHED:]
    for pattern in (_TAG, _MARK):
        found = pattern.findall(said)
        if found:
            return found[-1].strip() or None
    stated = _stated(said)
    if stated is not None:
        return stated or None
    formulas = _FORMULA.findall(said)
    if formulas:
        return next(part for part in formulas[-1] if part)
    whole = said.strip().strip("*").strip()
    if len(whole) <= 40 and not re.search(r"[A-Za-z]{3}", whole):
        return whole or None
    numbers = list(_NUMBER.finditer(said))
    if not numbers or _DENIED.search(said[: numbers[-1].start()]):
        return None
    return numbers[-1][0]


def _boxed(said: str, boxes: list[re.Match[str]]) -> str | None:
    """Return the content of the last box; several boxes in one formula are a list."""
    found: list[str] = []
    end = 0
    for box in boxes[-_MAX_BOXES:]:
        if box.start() < end:
            continue  # a box in the box
        between = said[end : box.start()]
        inner, length = _content(said, box)
        if inner is None or inner in found or not _BETWEEN_BOXES.fullmatch(between):
            found = []
        if inner is None:
            continue
        found.append(inner)
        end = box.end() + length
    return ", ".join(found) or None


def _content(said: str, box: re.Match[str]) -> tuple[str | None, int]:
    rest = said[box.end() :]
    start = len(rest) - len(rest.lstrip())
    if rest[start : start + 1] == "{":
        end = _closing_brace(rest, start)
        if end < 0:
            return None, 0
        return rest[start + 1 : end], end + 1
    match = re.match(r"\s*(\\[d]?frac\s*\d\d|[^\s$,;]+)", rest)
    if match is None:
        return None, 0
    return match[1].rstrip(".$)"), match.end()


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return start + match.start()
    return -1


def _stated(said: str) -> str | None:
    """Return what follows the last "answer is", "" if it is denied, None if nothing is stated."""
    matches = list(_SAID.finditer(said))
    if not matches:
        return None
    line = matches[-1]["answer"].strip()
    if _DENIED.match(line):
        return ""
    formula = _FORMULA.match(line)
    if formula:
        return next(part for part in formula.groups() if part)
    end = _SENTENCE_END.search(line)
    if end:
        line = line[: end.start()]
    return line.strip(" *`") or None
