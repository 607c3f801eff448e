"""Comparison of two answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from rlctl.runtime.rewards.mathematics import values
from rlctl.runtime.rewards.mathematics.answers import Answer, read
from rlctl.runtime.rewards.mathematics.expressions import Node, UnreadableError

_MAX_PARTS = 200
_FLIPPED = {"<": ">", "\\le": "\\ge", ">": "<", "\\ge": "\\le"}
_LABEL = re.compile(
    r"(?:m?\\(?:angle|triangle|overline)\s*)?\{?[A-Za-z]\w*'?(?:_\{?\w+\}?)?\s*(?:\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\))?\}?"
)
_HUNDREDTH = Node("num", value=Fraction(1, 100))
_HALF_TURN = Node("div", (Node("sym", name="\\pi"), Node("num", value=Fraction(180))))


def is_equal(truth: str, answer: str) -> bool:
    """Return True if two answers, in LaTeX or plain text, mean the same."""
    if not answer.strip():
        return False
    return same(read(truth), read(answer))


def same(truth: Answer, answer: Answer) -> bool:
    """Return True if two answers mean the same."""
    if _compact(truth.text) == _compact(answer.text) != "":
        return True
    truth, answer = _expanded(truth), _expanded(answer)
    is_choice = truth.kind == "text" or re.fullmatch("[A-Z]", truth.text)
    if is_choice and _choice(truth.text) and _choice(truth.text) == _choice(answer.text):
        return True
    if {truth.kind, answer.kind} & {"relation"}:
        return _same_relation(truth, answer)
    if "text" in (truth.kind, answer.kind):
        return _same_text(truth, answer)
    if truth.kind == answer.kind == "value":
        return _same_value(truth, answer)
    if truth.kind == answer.kind == "based":
        return truth.unit == answer.unit
    return _same_parts(truth, answer)


def plain(answer: Answer) -> str:
    """Return a text that is the same for equal answers of the usual kinds."""
    answer = _expanded(answer)
    if answer.kind == "relation" and len(_results(answer)) == 1:
        return plain(_results(answer)[0])
    if answer.kind == "value" and answer.node is not None:
        try:
            number = values.constant(answer.node)
        except RecursionError:
            number = None
        sign = "%" if answer.is_percent else ""
        if isinstance(number, Fraction) and number.numerator.bit_length() < 2000:
            return f"{number}{sign}"
        if isinstance(number, float):
            return f"{number:.12g}{sign}"
    if answer.parts:
        parts = [plain(part) for part in answer.parts]
        if answer.kind in ("list", "set", "union"):
            return ", ".join(sorted(parts))
        if answer.kind in ("tuple", "interval"):
            return f"{answer.brackets[0]}{', '.join(parts)}{answer.brackets[1]}"
    if answer.kind == "text":
        return answer.text
    return _compact(answer.text)


def _compact(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _expanded(answer: Answer) -> Answer:
    """Return a value with ± as a list of two, and a list of lists as one list."""
    if answer.kind == "value" and answer.node is not None:
        if answer.node.has("pm") or answer.node.has("mp"):
            both = [replace(answer, text="", node=_signed(answer.node, sign)) for sign in (1, -1)]
            return Answer("list", answer.text, tuple(both))
        return answer
    if answer.kind not in ("list", "set"):
        return answer
    parts: list[Answer] = []
    for part in map(_expanded, answer.parts):
        if part.kind == "list":
            parts += part.parts
        else:
            parts.append(part)
    if len(parts) == 1 and answer.kind == "list":
        return parts[0]
    return replace(answer, parts=tuple(parts))


def _signed(node: Node, sign: int) -> Node:
    args = tuple(_signed(arg, sign) for arg in node.args)
    if node.op in ("pm", "mp"):
        if (node.op == "pm") == (sign > 0):
            return args[0]
        return Node("neg", args)
    return replace(node, args=args)


def _same_value(truth: Answer, answer: Answer) -> bool:
    assert truth.node is not None
    assert answer.node is not None
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    left, right = truth.node, answer.node
    pairs = [(left, right)]
    if truth.is_percent != answer.is_percent:
        # 50% is 50, where the question asks for percent, and 0.5.
        if truth.is_percent:
            pairs.append((Node("mul", (left, _HUNDREDTH)), right))
        else:
            pairs.append((left, Node("mul", (right, _HUNDREDTH))))
    if left.op == "degrees" and "\\pi" in right.symbols:
        pairs.append((Node("mul", (left, _HALF_TURN)), right))
    if right.op == "degrees" and "\\pi" in left.symbols:
        pairs.append((left, Node("mul", (right, _HALF_TURN))))
    return any(_equal(*pair) for pair in pairs)


def _equal(left: Node, right: Node) -> bool:
    if left == right:
        return True
    try:
        return values.equal(left, right)
    except (UnreadableError, RecursionError):
        return False


def _same_text(truth: Answer, answer: Answer) -> bool:
    """Compare words without case, marks and articles; a variable keeps its case."""
    wanted, found = _words(truth.text), _words(answer.text)
    return bool(wanted) and wanted == found


def _words(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textbf)\s*", "", text).lower()
    text = re.sub(r"[{}$\"'`*~]|\\[ ,;!]", " ", text)
    text = re.sub(
        r"^\s*(?:the\s+answer\s+is|answer:?|option|choice|the|an|a(?=\s+[a-z]{2}))\s+", " ", text
    )
    text = re.sub(r"^\s*\(?([a-z])[).]?\s*$", r"\1", text)
    text = re.sub(r"(?<!\d)\.|\.(?!\d)|[!;:]\s*$", " ", text)
    if not re.search(r"\d", text):
        text = text.replace("-", "")
    return re.sub(r"\s+", "", text)


def _choice(text: str) -> str:
    """Return the letter of a choice with or without its content: `(A)`, `(A) 5`, otherwise ""."""
    plain_text = re.sub(r"\\text\s*|[{}]", "", text).strip()
    letters = re.findall(r"(?<![A-Za-z])([A-Z])\)", plain_text)
    if re.fullmatch(r"[A-Z]", plain_text):
        return plain_text
    if re.match(r"\(?[A-Z]\)", plain_text) and len(letters) == 1:
        return letters[0]
    return ""


def _is_word(part: Answer) -> bool:
    """Return True for a text or a letter: their order counts."""
    is_letter = part.node is not None and part.node.op == "sym" and part.node.name.isalpha()
    return part.kind == "text" or is_letter


def _same_parts(truth: Answer, answer: Answer) -> bool:
    kinds = {truth.kind, answer.kind}
    if max(len(truth.parts), len(answer.parts)) > _MAX_PARTS:
        return False
    if kinds == {"matrix", "tuple"}:
        matrix = truth if truth.kind == "matrix" else answer
        return 1 in (matrix.num_columns, len(matrix.parts) // matrix.num_columns) and _in_order(
            truth.parts, answer.parts
        )
    if kinds <= {"list", "set"}:
        parts, others = truth.parts, answer.parts
        if kinds == {"list"} and any(map(_is_word, parts)):
            return _in_order(parts, others)
        if "set" in kinds:
            parts, others = _distinct(parts), _distinct(others)
        return _in_any_order(parts, others)
    if kinds == {"union"}:
        return _in_any_order(truth.parts, answer.parts)
    if kinds == {"list", "union"}:
        intervals = [_interval(part) or part for part in (*truth.parts, *answer.parts)]
        count = len(truth.parts)
        return _in_any_order(intervals[:count], intervals[count:])
    if kinds == {"list", "tuple"}:
        labels = [part.parts[0].text for part in (*truth.parts, *answer.parts) if part.signs]
        if labels != sorted(labels):
            return False
        return _in_order(truth.parts, answer.parts)
    if kinds == {"tuple", "interval"}:
        brackets = {truth.brackets, answer.brackets}
        return brackets <= {"()"} and _in_order(truth.parts, answer.parts)
    if kinds == {"value", "set"}:
        if truth.kind == "value":
            truth, answer = answer, truth
        return len(truth.parts) == 1 and same(truth.parts[0], answer)
    if truth.kind != answer.kind or truth.num_columns != answer.num_columns:
        return False
    if {truth.brackets, answer.brackets} - {"<>", "()"} and truth.brackets != answer.brackets:
        return False
    return _in_order(truth.parts, answer.parts)


def _in_order(parts: Sequence[Answer], others: Sequence[Answer]) -> bool:
    return len(parts) == len(others) and all(map(same, parts, others))


def _in_any_order(parts: Sequence[Answer], others: Sequence[Answer]) -> bool:
    if len(parts) != len(others):
        return False
    rest = list(others)
    for part in parts:
        match = next((other for other in rest if same(part, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _distinct(parts: Sequence[Answer]) -> list[Answer]:
    found: list[Answer] = []
    for part in parts:
        if not any(same(part, other) for other in found):
            found.append(part)
    return found


def _same_relation(truth: Answer, answer: Answer) -> bool:
    if truth.kind == answer.kind == "relation":
        return _same_two_relations(truth, answer)
    if truth.kind == "relation":
        return any(same(value, answer) for value in _results(truth))
    return any(same(truth, value) for value in _results(answer))


def _results(relation: Answer) -> list[Answer]:
    """Return what a relation says without its name: 5 for x = 5, and (3, ∞) for x > 3."""
    signs = relation.signs
    parts = relation.parts
    if all(sign in ("=", "\\approx") for sign in signs):
        if all(part.kind == "value" and _is_constant(part) for part in parts):
            if all(_equal_nodes(parts[0], part) for part in parts[1:]):
                return [parts[-1]]
            return []
        if _is_label(parts[0]):
            if len(parts) == 2:
                return [parts[1]]
            return _results(replace(relation, parts=parts[1:], signs=signs[1:]))
        if len(parts) == 2 and _LABEL.fullmatch(parts[1].text) and _is_constant(parts[0]):
            return [parts[0]]
        return []
    interval = _interval(relation)
    if interval is None:
        return []
    return [interval]


def _is_label(part: Answer) -> bool:
    if part.kind == "tuple":
        return all(_LABEL.fullmatch(name.text) for name in part.parts)
    return part.kind == "text" or _LABEL.fullmatch(part.text) is not None


def _is_constant(part: Answer) -> bool:
    return part.node is not None and not values.variables(part.node)


def _equal_nodes(left: Answer, right: Answer) -> bool:
    return left.node is not None and right.node is not None and _equal(left.node, right.node)


def _interval(relation: Answer) -> Answer | None:
    """Return the interval that `x > 3` or `-2 < x <= 7` describes."""
    signs = list(relation.signs)
    parts = list(relation.parts)
    if not signs:
        return None
    if any(sign not in _FLIPPED for sign in signs):
        return None
    if signs[0] in (">", "\\ge"):
        signs = [_FLIPPED[sign] for sign in reversed(signs)]
        parts = parts[::-1]
    if any(sign not in ("<", "\\le") for sign in signs):
        return None
    infinity = Node("sym", name="\\infty")
    low = Answer("value", "-\\infty", node=Node("neg", (infinity,)))
    high = Answer("value", "\\infty", node=infinity)
    opening = "("
    closing = ")"
    at = [index for index, part in enumerate(parts) if re.fullmatch(r"\\?[A-Za-z]+", part.text)]
    if len(at) != 1 or len(parts) > 3:
        return None
    if at[0] > 0:
        low = parts[at[0] - 1]
        if signs[at[0] - 1] != "<":
            opening = "["
    if at[0] < len(signs):
        high = parts[at[0] + 1]
        if signs[at[0]] != "<":
            closing = "]"
    if len(parts) == 3 and at[0] != 1:
        return None
    kind = "tuple" if opening + closing == "()" else "interval"
    return Answer(kind, "", (low, high), brackets=opening + closing)


def _same_two_relations(truth: Answer, answer: Answer) -> bool:
    wanted, found = _interval(truth), _interval(answer)
    if wanted and found:
        same_name = _name(truth) == _name(answer)
        return same_name and same(wanted, found)
    if len(truth.parts) != 2 or len(answer.parts) != 2:
        same_signs = truth.signs == answer.signs
        if same_signs and _in_order(truth.parts, answer.parts):
            return True
        return all(sign == "=" for sign in (*truth.signs, *answer.signs)) and _same_ends(
            truth, answer
        )
    [sign], [other] = truth.signs, answer.signs
    if sign == other and _in_order(truth.parts, answer.parts):
        return True
    if any(part.node is None for part in (*truth.parts, *answer.parts)):
        return False
    left, right = _difference(truth), _difference(answer)
    try:
        if sign in _FLIPPED:
            if _FLIPPED[sign] == other:
                right = Node("neg", (right,))
            return other in (sign, _FLIPPED[sign]) and values.proportional(
                left, right, positive=True
            )
        return sign == other and values.proportional(left, right)
    except (UnreadableError, RecursionError):
        return False


def _same_ends(truth: Answer, answer: Answer) -> bool:
    """Compare x = 2 + 3 = 5 with x = 5."""
    return same(truth.parts[0], answer.parts[0]) and same(truth.parts[-1], answer.parts[-1])


def _name(relation: Answer) -> str:
    return next(part.text for part in relation.parts if re.fullmatch(r"\\?[A-Za-z]+", part.text))


def _difference(relation: Answer) -> Node:
    left, right = relation.parts[0].node, relation.parts[1].node
    assert left is not None
    assert right is not None
    return Node("add", (left, Node("neg", (right,))))
