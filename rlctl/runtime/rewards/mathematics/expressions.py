"""Parser of expressions in the spelling of `spelling.spell`.

It reads numbers, letters, arithmetic, powers, roots, functions, factorials, binomials, absolute
values, floors, degrees and ±. Everything else raises `UnreadableError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rlctl.runtime.rewards.mathematics import names

_MAX_LENGTH = 1500  # characters
_MAX_DEPTH = 40  # of brackets
_MAX_DIGITS = 2000

FUNCTIONS = names(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh ln log lg exp"
)
_PLAIN_NAMES = FUNCTIONS | {"sqrt", "pi", "infty", "theta", "alpha", "beta", "gamma", "lambda"}
_SYNONYMS = {"infinity": "infty", "inf": "infty", "oo": "infty", "asin": "arcsin", "atan": "arctan"}
SYMBOLS = names(
    "pi infty alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi "
    "rho sigma tau phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega "
    "ell hbar"
)
_ACCENTS = names("overline bar vec hat tilde overrightarrow widehat dot mathbb triangle angle")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|\\(?P<command>[A-Za-z]+)|(?P<letters>[A-Za-z]+)"
    r"|(?P<sign>\\[{}]|[-+*/^_!'(){}\[\]|<>=,:;]))"
)


class UnreadableError(Exception):
    """A text that is no expression, or one that is too large."""


@dataclass(frozen=True)
class Node:
    """Expression: an operation and its operands, a number (`value`) or a symbol (`name`)."""

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""

    def has(self, op: str) -> bool:
        """Return True if the operation occurs in the expression."""
        return self.op == op or any(arg.has(op) for arg in self.args)

    @property
    def symbols(self) -> frozenset[str]:
        """Names of all variables."""
        if self.op == "sym":
            return frozenset([self.name])
        return frozenset().union(*(arg.symbols for arg in self.args))


def parse(text: str) -> Node:
    """Return the expression. Raises UnreadableError."""
    if len(text) > _MAX_LENGTH:
        raise UnreadableError("too long")
    parser = _Parser(_tokens(text))
    node = parser.sum()
    if parser.kind != "end":
        raise UnreadableError(f"unexpected {parser.text!r}")
    return node


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(f"unknown sign {text[position : position + 1]!r}")
        position = match.end()
        kind = match.lastgroup or ""
        token = match[kind]
        if kind == "letters":
            found += _letters(token)
        else:
            found.append((kind, token))
    found.append(("end", ""))
    return found


def _letters(run: str) -> list[tuple[str, str]]:
    """Return one token for a known name, otherwise one for each letter."""
    name = _SYNONYMS.get(run, run)
    if name in _PLAIN_NAMES:
        return [("command", name)]
    for function in ("sqrt", "sin", "cos", "tan", "log", "ln", "pi"):
        if run.endswith(function) and len(run) <= len(function) + 2:
            before = run[: -len(function)]
            return [*(("letters", letter) for letter in before), ("command", function)]
        if run.startswith(function) and len(run) == len(function) + 1:
            return [("command", function), ("letters", run[-1])]
    return [("letters", letter) for letter in run]


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.index = 0
        self.depth = 0
        self.open_bars = 0

    @property
    def kind(self) -> str:
        return self.tokens[self.index][0]

    @property
    def text(self) -> str:
        return self.tokens[self.index][1]

    def take(self) -> str:
        text = self.text
        if self.kind == "end":
            raise UnreadableError("the end is missing")
        self.index += 1
        return text

    def is_sign(self, *signs: str) -> bool:
        return self.kind == "sign" and self.text in signs

    def is_command(self, *names: str) -> bool:
        return self.kind == "command" and self.text in names

    def expect(self, sign: str) -> None:
        if not self.is_sign(sign):
            raise UnreadableError(f"{sign!r} is missing")
        self.take()

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise UnreadableError("too many brackets")
        node = self.signed()
        while self.is_sign("+", "-") or self.is_command("pm", "mp"):
            sign = self.take()
            right = self.product()
            if sign == "-":
                right = Node("neg", (right,))
            elif sign != "+":
                right = Node(sign, (right,))
            node = Node("add", (node, right))
        self.depth -= 1
        return node

    def signed(self) -> Node:
        """Read a product with any signs before it: `-x`, `+-x`, `±x`."""
        signs: list[str] = []
        while self.is_sign("+", "-") or self.is_command("pm", "mp"):
            signs.append(self.take())
        node = self.product()
        for sign in reversed(signs):
            if sign == "-":
                node = Node("neg", (node,))
            elif sign != "+":
                node = Node(sign, (node,))
        return node

    def product(self) -> Node:
        if self.is_sign("+", "-"):
            return self.signed()
        node = self.power()
        while True:
            if self.is_sign("*", "/"):
                sign = self.take()
                right = self.signed() if self.is_sign("-", "+") else self.power()
                operation = "mul" if sign == "*" else "div"
                node = Node(operation, (node, right))
            elif self.starts_factor():
                if self.kind == "number" and self.tokens[self.index - 1][0] == "number":
                    raise UnreadableError("two numbers without a sign between them")
                node = Node("mul", (node, self.power()))
            else:
                return node

    def starts_factor(self) -> bool:
        if self.kind in ("number", "letters"):
            return True
        if self.kind == "command":
            return self.text not in ("pm", "mp", "rfloor", "rceil")
        return self.is_sign("(", "{", "[") or (self.is_sign("|") and not self.open_bars)

    def power(self) -> Node:
        node = self.atom()
        while True:
            if self.is_sign("!"):
                self.take()
                node = Node("factorial", (node,))
            elif self.is_sign("'") and node.op == "sym":
                node = Node("sym", name=node.name + self.take())
            elif self.is_sign("_"):
                self.take()
                if node.op != "sym":
                    raise UnreadableError("an index of something that is no letter")
                node = Node("sym", name=f"{node.name}_{self.raw_group()}")
            elif self.is_sign("^"):
                self.take()
                if self.is_command("circ"):
                    self.take()
                    node = Node("degrees", (node,))
                else:
                    node = Node("power", (node, self.exponent()))
            else:
                return node

    def exponent(self) -> Node:
        if self.is_sign("-", "+"):
            is_negative = self.take() == "-"
            node = self.exponent()
            if is_negative:
                return Node("neg", (node,))
            return node
        node = self.atom()
        if self.is_sign("^"):  # a^b^c is a^(b^c)
            self.take()
            return Node("power", (node, self.exponent()))
        return node

    def raw_group(self) -> str:
        """Read an index as text: `_1`, `_{n+1}`."""
        if not self.is_sign("{"):
            return self.take()
        self.take()
        parts: list[str] = []
        depth = 1
        while depth:
            if self.kind == "end":
                raise UnreadableError("an open brace")
            depth += self.is_sign("{") - self.is_sign("}")
            parts.append(self.take())
        return "".join(parts[:-1])

    def atom(self) -> Node:
        if self.kind == "number":
            digits = self.take()
            if len(digits) > _MAX_DIGITS:
                raise UnreadableError("too many digits")
            return Node("num", value=Fraction(digits.rstrip(".") if digits != "." else "x"))
        if self.kind == "letters":
            return Node("sym", name=self.take())
        if self.kind == "command":
            return self.command(self.take())
        for opening, end in (("(", ")"), ("{", "}"), ("[", "]")):
            if self.is_sign(opening):
                self.take()
                bars = self.open_bars
                self.open_bars = 0
                node = self.sum()
                self.open_bars = bars
                self.expect(end)
                return node
        if self.is_sign("|") and not self.open_bars:
            self.take()
            self.open_bars += 1
            node = self.sum()
            self.open_bars -= 1
            self.expect("|")
            return Node("magnitude", (node,))
        raise UnreadableError(f"unexpected {self.text or 'end'!r}")

    def command(self, name: str) -> Node:
        if name == "frac":
            return Node("div", (self.group(), self.group()))
        if name == "binom":
            return Node("binom", (self.group(), self.group()))
        if name == "sqrt":
            return self.root()
        if name in ("lfloor", "lceil"):
            node = self.sum()
            end = "r" + name[1:]
            if not self.is_command(end):
                raise UnreadableError(f"{end} is missing")
            self.take()
            return Node(name[1:], (node,))
        if name in FUNCTIONS:
            return self.function(name)
        if name in SYMBOLS:
            return Node("sym", name=f"\\{name}")
        if name in _ACCENTS:
            return Node("sym", name=f"\\{name}{{{self.raw_group()}}}")
        raise UnreadableError(f"unknown command {name}")

    def group(self) -> Node:
        if not self.is_sign("{", "("):
            raise UnreadableError("a brace is missing")
        return self.atom()

    def root(self) -> Node:
        degree = None
        if self.is_sign("["):
            degree = self.atom()
        node = self.group() if self.is_sign("{", "(") else self.atom()
        if degree is None:
            return Node("sqrt", (node,))
        return Node("root", (node, degree))

    def function(self, name: str) -> Node:
        power: Node | None = None
        base: Node | None = None
        while self.is_sign("^", "_"):
            if self.take() == "^":
                power = self.exponent()
            else:
                base = self.atom()
        if power is not None and power == Node("neg", (Node("num", value=Fraction(1)),)):
            name = f"arc{name}"
            power = None
            if name not in FUNCTIONS:
                raise UnreadableError(f"unknown function {name}")
        arguments = [self.argument()]
        if base is not None:
            arguments.append(base)
        node = Node(name, tuple(arguments))
        if self.is_sign("^") and power is None:
            self.take()
            power = self.exponent()
        if power is None:
            return node
        return Node("power", (node, power))

    def argument(self) -> Node:
        """Read the argument of a function: a group, or factors up to a sign or a function."""
        if self.is_sign("-"):
            self.take()
            return Node("neg", (self.argument(),))
        if self.is_sign("(", "|", "["):
            return self.atom()
        node = self.power()
        while self.kind in ("number", "letters") or (
            self.kind == "command" and self.text in SYMBOLS | {"frac", "sqrt"}
        ):
            if self.kind == "number" and self.tokens[self.index - 1][0] == "number":
                raise UnreadableError("two numbers without a sign between them")
            node = Node("mul", (node, self.power()))
        return node
