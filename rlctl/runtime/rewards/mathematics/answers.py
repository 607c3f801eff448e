"""Structure of an answer: numbers with units, lists, tuples, sets, intervals, matrices, relations.

`read` never fails: what has no such structure is a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from rlctl.runtime.rewards.mathematics import units
from rlctl.runtime.rewards.mathematics.expressions import Node, UnreadableError, parse
from rlctl.runtime.rewards.mathematics.spelling import spell

_MAX_DEPTH = 8
_MAX_LENGTH = 3000  # characters; longer answers are compared as texts
_OPENING = "([{"
_CLOSING = ")]}"
_WRAPPED = re.compile(r"\\(?:text|boxed|fbox)\s*\{")
_MATRIX = re.compile(
    r"\\begin\s*\{([pbBvV]?matrix|smallmatrix|array)\}(?:\s*\{[lcr|\s]*\})?(.*)\\end\s*\{\1\}",
    re.DOTALL,
)
_RELATION = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\approx|\\equiv|[<>=]")
_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_AND = re.compile(r"\\text\s*\{\s*,?\s*(and|or)\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])")
_TEXT = re.compile(r"(?<=\{)[^{}]*[A-Za-z][^{}]*(?=\})|/")
_BASED = re.compile(
    r"([0-9A-Fa-f]+)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+)|\{\s*\\text\s*\{\s*(\w+)\s*\}\s*\})"
)
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_CURRENCY = re.compile(r"\\\$|\\(?:euro|pounds|yen|rupee|cent)(?![A-Za-z])")
# Lower-case letters that are factors rather than a word.
_FAMILIES = ("abcd", "xyzwt", "mnkl", "pqrst", "uvw", "rst", "ijk", "hmg")
_WORDS = ("bad", "dab", "cab", "cad", "add", "dad")


@dataclass(frozen=True)
class Answer:
    """An answer and its parts.

    `kind` is text, value, list, tuple, set, interval, union, matrix, relation or ratio. `text` is
    its spelling. `brackets` are those of an interval; `signs` those of a relation.
    """

    kind: str
    text: str
    parts: tuple[Answer, ...] = ()
    node: Node | None = None
    unit: str = ""
    is_percent: bool = False
    brackets: str = ""
    signs: tuple[str, ...] = ()
    num_columns: int = 0


def read(text: str, depth: int = 0) -> Answer:
    """Return the structure of an answer in LaTeX or plain text."""
    if depth > _MAX_DEPTH or len(text) > _MAX_LENGTH:
        return Answer("text", text)
    if depth == 0:
        text = spell(text)
    spelled = _stripped(text)
    for reader in _READERS:
        found = reader(spelled, depth)
        if found is not None:
            return replace(found, text=spelled)
    return Answer("text", spelled)


def _stripped(text: str) -> str:
    """Return the text without outer braces, boxes, `\\text{}` and trailing marks."""
    while True:
        before = text
        text = text.strip().strip('`*"').strip()
        if not text.endswith("!"):
            text = re.sub(r"(?<!\\)[.,;:!]+$|\\\\$|^(?:[=,;:]|\\approx|\\sim)\s*", "", text)
        match = _WRAPPED.match(text)
        opening = match.end() - 1 if match else 0
        if (match or text.startswith("{")) and _closing(text, opening) == len(text) - 1:
            text = text[opening + 1 : -1]
        if text == before:
            return text


def _closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`, whatever its kind, or -1."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] in _OPENING:
            depth += 1
        elif text[index] in _CLOSING:
            depth -= 1
            if depth == 0:
                return index
    return -1


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at matches outside of brackets."""
    parts: list[str] = []
    depth = 0
    start = 0
    index = 0
    while index < len(text):
        match = separator.match(text, index) if depth == 0 else None
        if match and match.end() > index:
            parts.append(text[start:index])
            start = index = match.end()
            continue
        depth += (text[index] in _OPENING) - (text[index] in _CLOSING)
        index += 1
    parts.append(text[start:])
    return parts


def _read_parts(texts: list[str], depth: int) -> tuple[Answer, ...]:
    return tuple(read(text, depth + 1) for text in texts)


def _empty(text: str, depth: int) -> Answer | None:
    del depth
    compact = text.replace(" ", "")
    if compact in ("\\emptyset", "\\{\\}"):
        return Answer("set", text)
    if compact in ("\\mathbb{R}", "\\text{allrealnumbers}", "allrealnumbers"):
        ends = (Node("neg", (Node("sym", name="\\infty"),)), Node("sym", name="\\infty"))
        parts = tuple(Answer("value", "", node=end) for end in ends)
        return Answer("interval", text, parts, brackets="()")
    return None


def _matrix(text: str, depth: int) -> Answer | None:
    match = _MATRIX.search(text)
    if match is None or "\\begin" in match[2]:
        return None
    around = (text[: match.start()] + text[match.end() :]).replace(" ", "")
    if around not in ("", "()", "[]") or match[1] in ("vmatrix", "Vmatrix"):
        return None
    rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
    cells = [re.split(r"(?<!\\)&", row) for row in rows]
    width = len(cells[0]) if cells else 0
    if not cells or any(len(row) != width for row in cells):
        return None
    parts = _read_parts([cell for row in cells for cell in row], depth)
    return Answer("matrix", text, parts, num_columns=width)


def _union(text: str, depth: int) -> Answer | None:
    parts = _split(text, re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]])\s*U\s*(?=[(\[])"))
    if len(parts) < 2:
        return None
    return Answer("union", text, _read_parts(parts, depth))


def _member(text: str, depth: int) -> Answer | None:
    match = re.match(r"[A-Za-z]\s*\\in(?![A-Za-z])", text)
    if match is None:
        return None
    return read(text[match.end() :], depth + 1)


def _bracketed(text: str, depth: int) -> Answer | None:
    """Read `(…)`, `[…)`, `\\{…\\}` and `\\langle…\\rangle` around the whole answer."""
    angle = re.fullmatch(r"\\langle(?![A-Za-z])(.*)\\rangle", text, re.DOTALL)
    if angle:
        return _tuple(angle[1], "<>", depth)
    opens_set = text.startswith("\\{") and text.endswith("\\}")
    if opens_set and _closing(text, 1) == len(text) - 1:
        parts = _split(text[2:-2], re.compile(r"[,;]"))
        condition = re.fullmatch(r"\s*[a-z]\s*(?:\\in[^|:]*)?[|:](.*)", parts[0])
        if len(parts) == 1 and condition:
            return read(condition[1], depth + 1)
        return Answer("set", text, _read_parts(parts, depth))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closing(text, 0) == len(text) - 1:
        return _tuple(text[1:-1], text[0] + text[-1], depth)
    return None


def _tuple(inner: str, brackets: str, depth: int) -> Answer | None:
    texts = _split(inner, re.compile(r"[,;]"))
    if len(texts) == 1:
        if re.fullmatch(r"\s*(?:\\text\s*\{)?\s*[A-Za-z]\s*\}?\s*", inner):
            return Answer("text", inner)  # a choice: (C)
        if brackets in ("()", "[]") and _RELATION.search(inner):
            return read(inner, depth + 1)
        return None
    kind = "tuple" if brackets in ("()", "<>") else "interval"
    return Answer(kind, inner, _read_parts(texts, depth), brackets=brackets)


def _listed(text: str, depth: int) -> Answer | None:
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    texts = _split(text, re.compile(rf",\s*(?:{_AND.pattern})|[,;]|{_AND.pattern}"))
    texts = [part for part in texts if part.strip()]
    if len(texts) < 2:
        return None
    parts = _read_parts(texts, depth)
    if any(
        part.kind == "text" and re.search(r"[A-Za-z]{2}\s+[A-Za-z]", part.text) for part in parts
    ):
        return None  # a sentence
    return Answer("list", text, parts)


def _related(text: str, depth: int) -> Answer | None:
    texts = _split(text, _RELATION)
    if len(texts) < 2 or not all(part.strip() for part in texts):
        return None
    signs = tuple(match[0] for match in _RELATION.finditer(text))
    if len(signs) != len(texts) - 1:
        return None
    parts = _read_parts(texts, depth)
    return Answer("relation", text, parts, signs=signs)


def _ratio(text: str, depth: int) -> Answer | None:
    texts = _split(text, re.compile(r":"))
    if len(texts) < 2:
        return None
    parts = _read_parts(texts, depth)
    if any(part.kind != "value" for part in parts):
        return None
    return Answer("ratio", text, parts)


def _based(text: str, depth: int) -> Answer | None:
    del depth
    match = _BASED.fullmatch(text)
    if match is None or not any(map(str.isdigit, match[1])):
        return None
    base = match[2] or match[3] or match[4]
    if base.lower() in _BASES:
        base = str(_BASES.index(base.lower()) + 2)
    return Answer("based", text, unit=f"{match[1].upper().lstrip('0')}_{base.lower()}")


def _valued(text: str, depth: int) -> Answer | None:
    del depth
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    return _quantity(text)


_READERS: tuple[Callable[[str, int], Answer | None], ...] = (
    *(_empty, _matrix, _union, _member, _bracketed, _listed, _related, _ratio, _based, _valued),
)


def _quantity(text: str) -> Answer | None:
    """Read an expression with an optional unit, percent sign, currency and words around it."""
    lead = re.match(r"(?:\\text\s*\{([^{}]*)\}|((?:[A-Za-z]{2,}[\s:,]+)+))\s*(?=\S)", text)
    if lead and units.is_lead_in(lead[1] or lead[2]):
        return _part_of(read(text[lead.end() :], 1))
    unit = ""
    percent = False
    factor = 1
    currency = _CURRENCY.search(text)
    if currency:
        unit = units.unit(currency[0])
        text = text[: currency.start()] + " " + text[currency.end() :]
    match = re.search(r"\\?%\s*$", text)
    if match:
        text = text[: match.start()]
        percent = True
    else:
        text, found = _split_unit(text)
        if found is None:
            return None
        factor = found[0]
        percent = found[2]
        unit = found[1] or unit
    text = text.strip()
    if not text or not _is_expression(text):
        return None
    try:
        node = parse(text)
    except (UnreadableError, RecursionError, ValueError):
        return None
    if factor != 1:
        node = Node("mul", (node, Node("num", value=Fraction(factor))))
    return Answer("value", text, node=node, unit=unit, is_percent=percent)


def _part_of(answer: Answer) -> Answer | None:
    if answer.kind == "text":
        return None
    return answer


def _split_unit(text: str) -> tuple[str, tuple[int, str, bool] | None]:
    """Split a text into an expression and (factor, unit, is_percent); None: no unit is there."""
    plain = re.search(
        r"(?<=[\d)}\s])\s*((?:(?:[A-Za-z]{2,}\.?|[A-Za-z]+/[A-Za-z]+)(?:\s+|$))+)$", text
    )
    match = re.search(
        r"(?:\s*/?\s*\\text\s*\{[^{}]*\}(?:\^\{?-?\d\}?(?=\s*\\text))?)+\s*(?:(?:\^|\*\*)\s*\{?\s*(-?\d)\s*\}?)?\s*$",
        text,
    )
    if match and match.start() > 0:
        words = " ".join(_TEXT.findall(match[0]))
        power = match[1]
    elif plain and plain.start() > 0 and _is_unit_run(plain[1]):
        match = plain
        words = plain[1]
        power = None
    else:
        return text, (1, "", False)
    if words.strip(" .~").lower() in units.PERCENT:
        return text[: match.start()], (1, "", True)
    found = units.scale(words)
    if found is None:
        return text, None
    name = found[1]
    if power and name:
        name = f"{name}^{power}"
    return text[: match.start()], (found[0], name, False)


def _is_unit_run(words: str) -> bool:
    """Return True for words after a number that are no product of variables."""
    first = words.split()[0].strip(".")
    is_ratio = "/" in words and units.unit(words) != ""
    return is_ratio or first.lower() in units.BARE_UNITS | units.PERCENT or len(words.strip()) > 3


def _is_expression(text: str) -> bool:
    """Return True unless the letters of the text are words."""
    compact = re.sub(r"\s+", " ", text.strip())
    if re.fullmatch(r"[A-Za-z ]+", compact) and re.search(r"[A-Za-z]{2}", compact):
        return all(map(_is_product, compact.split(" ")))
    runs = re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", re.sub(r"\\[A-Za-z]+", " ", text))
    return all(
        len(run) <= 4 or run in ("theta", "alpha", "infinity", "arctan", "arcsin") for run in runs
    )


def _is_product(run: str) -> bool:
    """Return True for letters that are factors: one letter, `ab`, `xyz`, `mgh`."""
    if len(run) == 1 or run in ("pi", "infinity", "infty"):
        return True
    if not run.islower() or len(run) > 4 or run in _WORDS:
        return False
    is_family = any(set(run) <= set(family) for family in _FAMILIES)
    return is_family or (len(run) <= 3 and not set(run) & set("aeiouy"))
