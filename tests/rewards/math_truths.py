"""Generators of ground truths like those of MATH-500, other spellings of them, and wrong ones.

A truth is a tree, so that spellings and changes know its parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

WORDS = ("Evelyn", "even", "ellipse", "June 20", "Navin", "yes", "no solution", "west", "parabola")
UNITS = ("cm", "inches", "square units", "dollars", "miles per hour", "degrees Fahrenheit")


@dataclass(frozen=True)
class Truth:
    """A truth: its kind, its parts, and numbers or words."""

    kind: str
    parts: tuple[Truth, ...] = ()
    numbers: tuple[int, ...] = ()
    word: str = ""
    brackets: str = "()"
    style: Style = field(default_factory=lambda: Style())


@dataclass(frozen=True)
class Style:
    """Spelling of LaTeX."""

    fraction: str = "frac"  # frac, dfrac, tfrac, slash, short
    minus: str = "-"
    comma: str = ","
    left: str = ""  # \\left or nothing
    root: str = "braces"  # braces, bare, sign
    times: str = "\\times "
    thousands: str = ""
    degree: str = "^\\circ"
    percent: str = "\\%"
    matrix: str = "pmatrix"
    text: str = "text"
    plus: str = "+"
    reverse: bool = False  # unordered parts and terms
    pi: str = "\\pi"
    infinity: str = "\\infty"
    cup: str = "\\cup"


def number(value: int, style: Style) -> str:
    digits = str(abs(value))
    if style.thousands and len(digits) > 3:
        digits = f"{digits[:-3]}{style.thousands}{digits[-3:]}"
    return (style.minus if value < 0 else "") + digits


def fraction(top: int, below: int, style: Style) -> str:
    sign = style.minus if top < 0 else ""
    top = abs(top)
    if style.fraction == "slash":
        return f"{sign}{top}/{below}"
    if style.fraction == "short" and top < 10 and below < 10:
        return f"{sign}\\frac{top}{below}"
    if style.fraction == "inside" and sign:
        return f"\\frac{{-{top}}}{{{below}}}"
    name = style.fraction if style.fraction in ("dfrac", "tfrac") else "frac"
    return f"{sign}\\{name}{{{top}}}{{{below}}}"


def root(of: int, style: Style) -> str:
    if style.root == "sign":
        return f"√{of}" if of < 10 else f"√{{{of}}}"
    if style.root == "bare" and of < 10:
        return f"\\sqrt{of}"
    return f"\\sqrt{{{of}}}"


def _surd(truth: Truth, style: Style) -> str:
    whole, factor, of = truth.numbers
    surd = f"{factor if factor != 1 else ''}{root(of, style)}"
    if whole == 0:
        return surd
    if style.reverse:
        return f"{surd}{style.plus if whole > 0 else ''}{number(whole, style)}"
    return f"{number(whole, style)}{style.plus}{surd}"


def _polynomial(truth: Truth, style: Style) -> str:
    powers = list(range(len(truth.numbers) - 1, -1, -1))
    terms = [(c, p) for c, p in zip(truth.numbers, powers, strict=True) if c]
    text = ""
    for coefficient, power in reversed(terms) if style.reverse else terms:
        sign = style.minus if coefficient < 0 else style.plus if text else ""
        size = abs(coefficient)
        letter = "" if power == 0 else truth.word if power == 1 else f"{truth.word}^{power}"
        if power > 9:
            letter = f"{truth.word}^{{{power}}}"
        text += f"{sign}{size if size != 1 or not letter else ''}{letter}"
    return text or "0"


def _group(truth: Truth, style: Style) -> str:
    if style.thousands == ",":  # inside brackets a comma separates
        style = replace(style, thousands="")
    inner = f"{style.comma}".join(write(part, style) for part in truth.parts)
    opening, closing = truth.brackets
    right = "\\right" if style.left else ""
    return f"{style.left}{opening}{inner}{right}{closing}"


def _list(truth: Truth, style: Style) -> str:
    parts = truth.parts[::-1] if style.reverse else truth.parts
    return style.comma.join(write(part, style) for part in parts)


def _set(truth: Truth, style: Style) -> str:
    right = style.left.replace("left", "right")
    return f"{style.left}\\{{{_list(truth, style)}{right}\\}}"


def _union(truth: Truth, style: Style) -> str:
    parts = truth.parts[::-1] if style.reverse else truth.parts
    return f" {style.cup} ".join(write(part, style) for part in parts)


def _matrix(truth: Truth, style: Style) -> str:
    cells = [write(part, style) for part in truth.parts]
    width = truth.numbers[0]
    rows = [" & ".join(cells[i : i + width]) for i in range(0, len(cells), width)]
    body = " \\\\ ".join(rows)
    return f"\\begin{{{style.matrix}}} {body} \\end{{{style.matrix}}}"


def _complex(truth: Truth, style: Style) -> str:
    real, imaginary = truth.numbers
    sign = style.minus if imaginary < 0 else style.plus
    size = "" if abs(imaginary) == 1 else abs(imaginary)
    if style.reverse:
        first = f"{style.minus if imaginary < 0 else ''}{size}i"
        return f"{first}{style.plus if real >= 0 else ''}{number(real, style)}"
    return f"{number(real, style)}{sign}{size}i"


def _pi(truth: Truth, style: Style) -> str:
    top, below = truth.numbers
    size = "" if top == 1 else top
    if below == 1:
        return f"{size}{style.pi}"
    if style.fraction == "slash":
        return f"{size}{style.pi}/{below}"
    name = style.fraction if style.fraction in ("dfrac", "tfrac") else "frac"
    return f"\\{name}{{{size}{style.pi}}}{{{below}}}"


def _ends(truth: Truth, style: Style) -> str:
    return f"{style.minus if truth.word == '-' else ''}{style.infinity}"


WRITERS: dict[str, Callable[[Truth, Style], str]] = {
    "integer": lambda t, s: number(t.numbers[0], s),
    "decimal": lambda t, s: f"{number(t.numbers[0], replace(s, thousands=''))}.{t.numbers[1]}",
    "fraction": lambda t, s: fraction(t.numbers[0], t.numbers[1], s),
    "surd": _surd,
    "pi": _pi,
    "complex": _complex,
    "polynomial": _polynomial,
    "tuple": _group,
    "interval": _group,
    "list": _list,
    "set": _set,
    "union": _union,
    "matrix": _matrix,
    "infinity": _ends,
    "text": lambda t, s: f"\\{s.text}{{{t.word}}}",
    "choice": lambda t, s: f"\\{s.text}{{({t.word})}}",
    "unit": lambda t, s: f"{write(t.parts[0], s)} \\{s.text}{{ {t.word}}}",
    "degrees": lambda t, s: f"{number(t.numbers[0], s)}{s.degree}",
    "percent": lambda t, s: f"{number(t.numbers[0], s)}{s.percent}",
    "money": lambda t, s: f"\\${number(t.numbers[0], s)}",
    "scientific": lambda t, s: f"{t.numbers[0]}.{t.numbers[1]}{s.times}10^{{{t.numbers[2]}}}",
    "based": lambda t, _: f"{t.numbers[0]}_{{{t.numbers[1]}}}",
    "equation": lambda t, s: f"{t.word} = {write(t.parts[0], s)}",
    "power": lambda t, _: f"{t.word}^{{{t.numbers[0]}}}",
    "function": lambda t, _: f"\\{t.word} x",
}


def write(truth: Truth, style: Style | None = None) -> str:
    """Return the LaTeX of a truth."""
    return WRITERS[truth.kind](truth, style or Style())


# Writes a response with the truth.
Spelling = Callable[[Truth], str]


def styled(**changes: object) -> Spelling:
    return lambda truth: f"\\boxed{{{write(truth, replace(Style(), **changes))}}}"


def changed(change: Callable[[str], str]) -> Spelling:
    return lambda truth: f"\\boxed{{{change(write(truth))}}}"


SPELLINGS: dict[str, Spelling] = {
    "plain": styled(),
    "dfrac": styled(fraction="dfrac"),
    "tfrac": styled(fraction="tfrac"),
    "slash": styled(fraction="slash"),
    "short": styled(fraction="short"),
    "minus inside": styled(fraction="inside"),
    "unicode minus": styled(minus="−"),
    "en dash": styled(minus="–"),
    "comma and space": styled(comma=", "),
    "comma and thin space": styled(comma=",\\,"),
    "left right": styled(left="\\left"),
    "bare root": styled(root="bare"),
    "sign of a root": styled(root="sign"),
    "cdot": styled(times=" \\cdot "),
    "asterisk": styled(times="*"),
    "thousands": styled(thousands=","),
    "LaTeX thousands": styled(thousands="{,}"),
    "thin thousands": styled(thousands="\\,"),
    "AMS thousands": styled(thousands=",\\!"),
    "degree sign": styled(degree="°"),
    "braced degree": styled(degree="^{\\circ}"),
    "degree command": styled(degree="\\degree"),
    "no degree": styled(degree=""),
    "words for degree": styled(degree="\\text{ degrees}"),
    "bare percent": styled(percent="%"),
    "no percent": styled(percent=""),
    "words for percent": styled(percent="\\text{ percent}"),
    "bmatrix": styled(matrix="bmatrix"),
    "mathrm": styled(text="mathrm"),
    "textbf": styled(text="textbf"),
    "spaced": styled(plus=" + ", minus=" - "),
    "other order": styled(reverse=True),
    "unicode": styled(pi="π", infinity="∞", cup="∪"),
    "dollars": lambda truth: f"\\boxed{{${write(truth)}$}}",
    "in a formula": lambda truth: f"The answer is $\\boxed{{{write(truth)}}}$.",
    "display": lambda truth: f"\\[ \\boxed{{ {write(truth)} }} \\]",
    "fbox": lambda truth: f"\\fbox{{{write(truth)}}}",
    "dot": changed(lambda text: f"{text}."),
    "displaystyle": changed(lambda text: f"\\displaystyle {text}"),
    "thin spaces": changed(lambda text: f"\\,{text}\\;"),
    "line break": changed(lambda text: f"\n{text}\n"),
    "after a thought": lambda truth: f"<think>\\boxed{{7777}}</think>\\boxed{{{write(truth)}}}",
    "after another": lambda truth: f"Not \\boxed{{7777}} but \\boxed{{{write(truth)}}}",
    "stated": lambda truth: f"So the final answer is ${write(truth)}$.",
    "tag": lambda truth: f"<answer>{write(truth)}</answer>",
}


def draw(rng: random.Random, kind: str | None = None) -> Truth:
    """Draw a truth of a kind, of all kinds by default."""
    return DRAWN[kind or rng.choice(list(DRAWN))](rng)


def _whole(rng: random.Random) -> int:
    return rng.choice([rng.randint(-20, 20), rng.randint(0, 999), rng.randint(1000, 99_999)])


def _scalar(rng: random.Random) -> Truth:
    return draw(rng, rng.choice(["integer", "integer", "fraction", "decimal", "surd", "pi"]))


def _fraction(rng: random.Random) -> Truth:
    below = rng.choice([2, 3, 5, 7, 9, 11, 16, 25])
    top = rng.choice([n for n in range(-40, 60) if n % below and n])
    return Truth("fraction", numbers=(top, below))


def _distinct(rng: random.Random, count: int) -> tuple[Truth, ...]:
    numbers = rng.sample(range(-30, 40), count)
    return tuple(Truth("integer", numbers=(value,)) for value in numbers)


def _interval(rng: random.Random, low: int = -30) -> Truth:
    first = rng.randint(low, low + 25)
    ends = [first, first + rng.randint(1, 9)]
    brackets = rng.choice(["()", "[]", "(]", "[)"])
    parts = [Truth("integer", numbers=(end,)) for end in ends]
    if brackets[1] == ")" and rng.random() < 0.2:
        parts[1] = Truth("infinity")
    return Truth("interval", tuple(parts), brackets=brackets)


def _polynomial_truth(rng: random.Random) -> Truth:
    size = rng.randint(2, 5)
    numbers = [rng.randint(-9, 9) for _ in range(size)]
    numbers[0] = rng.choice([1, 2, 3, -1, 5])
    return Truth("polynomial", numbers=tuple(numbers), word=rng.choice(["x", "y", "t", "k", "n"]))


DRAWN: dict[str, Callable[[random.Random], Truth]] = {
    "integer": lambda r: Truth("integer", numbers=(_whole(r),)),
    "decimal": lambda r: Truth("decimal", numbers=(r.randint(0, 300), r.randint(1, 999))),
    "fraction": _fraction,
    "surd": lambda r: Truth(
        "surd", numbers=(r.randint(-9, 9), r.randint(1, 12), r.choice([2, 3, 5, 6, 7, 13, 51]))
    ),
    "pi": lambda r: Truth("pi", numbers=(r.choice([1, 2, 3, 5, 16]), r.choice([1, 4, 6, 7]))),
    "complex": lambda r: Truth("complex", numbers=(r.randint(-9, 9), r.choice([-7, -1, 1, 2, 9]))),
    "polynomial": _polynomial_truth,
    "tuple": lambda r: Truth("tuple", tuple(_scalar(r) for _ in range(r.randint(2, 4)))),
    "list": lambda r: Truth("list", _distinct(r, r.randint(2, 4))),
    "set": lambda r: Truth("set", _distinct(r, r.randint(1, 4))),
    "interval": _interval,
    "union": lambda r: Truth("union", (_interval(r, -60), _interval(r, 10))),
    "matrix": lambda r: Truth("matrix", tuple(_scalar(r) for _ in range(4)), (r.choice([1, 2]),)),
    "text": lambda r: Truth("text", word=r.choice(WORDS)),
    "choice": lambda r: Truth("choice", word=r.choice("ABCDEF")),
    "unit": lambda r: Truth("unit", (_scalar(r),), word=r.choice(UNITS)),
    "degrees": lambda r: Truth("degrees", numbers=(r.randint(1, 360),)),
    "percent": lambda r: Truth("percent", numbers=(r.randint(1, 300),)),
    "money": lambda r: Truth("money", numbers=(r.randint(1, 99_999),)),
    "scientific": lambda r: Truth(
        "scientific", numbers=(r.randint(1, 9), r.randint(1, 99), r.randint(-30, 30))
    ),
    "based": lambda r: Truth(
        "based", numbers=(r.choice([101, 1010, 2516, 52]), r.choice([7, 8, 9]))
    ),
    "equation": lambda r: Truth("equation", (_polynomial_truth(r),), word="z"),
    "power": lambda r: Truth("power", numbers=(r.randint(2, 40),), word=r.choice(["x", "2", "7"])),
    "function": lambda r: Truth("function", word=r.choice(["sin", "cos", "cot", "ln", "sec"])),
}


def change(truth: Truth, rng: random.Random) -> Truth:
    """Return a truth of the same kind that is another answer."""
    if truth.kind in ("text", "choice", "function"):
        others = [other for other in _words_of(truth.kind) if other != truth.word]
        return replace(truth, word=rng.choice(others))
    if truth.kind in ("interval", "union"):
        return _changed_interval(truth, rng)
    if truth.parts:
        index = rng.randrange(len(truth.parts))
        parts = list(truth.parts)
        parts[index] = change(parts[index], rng)
        wrong = replace(truth, parts=tuple(parts))
        is_same = truth.kind in ("list", "set") and set(wrong.parts) == set(truth.parts)
        return change(truth, rng) if is_same else wrong
    if truth.kind == "infinity":
        return Truth("integer", numbers=(17,))
    return _changed_number(truth, rng)


def _words_of(kind: str) -> Sequence[str]:
    if kind == "text":
        return WORDS
    return "ABCDEF" if kind == "choice" else ("sin", "cos", "cot", "ln", "sec")


def _changed_interval(truth: Truth, rng: random.Random) -> Truth:
    if truth.kind == "union":
        first = _changed_interval(truth.parts[0], rng)
        return replace(truth, parts=(first, *truth.parts[1:]))
    others = [b for b in ("()", "[]", "(]", "[)") if b != truth.brackets]
    return replace(truth, brackets=rng.choice(others))


def _changed_number(truth: Truth, rng: random.Random) -> Truth:
    numbers = list(truth.numbers)
    index = rng.randrange(len(numbers))
    numbers[index] += rng.choice([1, 2, 3])
    if truth.kind == "decimal" and index == 1:  # 0.1 and 0.10 are equal
        numbers[1] = truth.numbers[1] * 10 + rng.randint(1, 9)
    if truth.kind == "scientific" and index == 1:
        numbers[1] = truth.numbers[1] * 10 + rng.randint(1, 9)
    if truth.kind == "fraction":
        numbers = [truth.numbers[0] + truth.numbers[1], truth.numbers[1]]
    if truth.kind == "polynomial" and index == 0 and not numbers[0]:
        numbers[0] = 7
    if truth.kind == "complex" and not numbers[1]:
        numbers[1] = 4
    return replace(truth, numbers=tuple(numbers))
