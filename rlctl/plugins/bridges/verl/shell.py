"""Words of a shell script with its variables expanded, without running it.

A subset of bash: assignments, arrays, `$NAME`, `${NAME:-default}`, `"${ARRAY[@]}"`, whole-number
arithmetic, quotes, comments and continued lines. Conditions and loops are read from top to bottom,
loops with their first value.
An unset variable becomes OmegaConf's `${oc.env:NAME}`; what cannot be expanded is listed.
"""

from __future__ import annotations

import ast
import re
import string
from operator import add, floordiv, mod, mul, sub

from rlctl.errors import ConfigError

_COMMENT = re.compile("#.*")
_NAME = r"([A-Za-z_]\w*|[@*#?0-9])"
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=", re.ASCII)
_SHORT = re.compile(rf"`[^`]*`?|\$(?:{_NAME})?", re.ASCII)
_VARIABLE = re.compile(rf"{_NAME}(\[[@*]\])?(?::?([-=])(.*))?", re.ASCII | re.DOTALL)
_TEXT = re.compile(r"'([^']*)'?|\\(.?)|(.)", re.DOTALL)
_QUOTED_TEXT = re.compile(r"\\(.?)|(.)", re.DOTALL)
_OPERATIONS = {"Add": add, "Sub": sub, "Mult": mul, "Mod": mod, "Div": floordiv}
_ENDS = ";|&\n()"  # of a command
_BREAKS = _ENDS + string.whitespace  # of a word
_KEYWORDS = (["then"], ["do"], ["else"], ["{"])  # a command follows
_BETWEEN = "\0"  # separates the values of an array in a word
_LONGEST_VALUE = 100_000  # characters of a variable that is expanded
_DEEPEST = 50  # brackets in brackets
_LONGEST_SCRIPT = 2_000_000  # characters of all expansions together


class Shell:
    """Reader of one script. `unread` are the parts that were not expanded."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n").replace("\\\n", " ").replace(_BETWEEN, "")
        self.unread: list[str] = []
        self._values: dict[str, list[str]] = {}
        self._num_expanded = 0

    def read(self) -> list[list[str]]:
        """Return the words of every command, in order."""
        commands: list[list[str]] = []
        at = 0
        while at < len(self.text):
            words, at = self._words(at, _ENDS)
            if words[:1] == ["for"] and words[2:3] == ["in"] and len(words) > 3:
                self._values[words[1]] = words[3:4]
                self.unread.append(" ".join(words))
            elif words:
                commands.append(words)
        return commands

    def _words(self, at: int, ends: str) -> tuple[list[str], int]:
        """Return the words from `at` up to a character of `ends`, and the position after it."""
        words: list[str] = []
        while at < len(self.text) and self.text[at] not in ends:
            if match := _COMMENT.match(self.text, at):
                at = match.end()
            elif self.text[at] in _BREAKS:
                at += 1
            elif ends == _ENDS and not words and (match := _ASSIGNMENT.match(self.text, at)):
                at = self._assign(match[1], match.end(), append=bool(match[2]))
            else:
                word, at = self._word(self.text, at, _BREAKS)
                words += _split(word)
                if words in _KEYWORDS and ends == _ENDS:
                    words.clear()
        return words, at + 1

    def _assign(self, name: str, at: int, *, append: bool) -> int:
        """Read the value of an assignment, an array or a word; return the position after it."""
        if self.text.startswith("(", at):
            values, at = self._words(at + 1, ")")
        else:
            word, at = self._word(self.text, at, _BREAKS)
            values = ["".join(_split(word))]
        if append:
            values = [*self._values.get(name, []), *values]
        self._values[name] = values
        return at

    def _word(self, text: str, at: int, ends: str, quoted: bool = False) -> tuple[str, int]:
        """Return the expansion of `text` from `at` up to one of `ends`, and that position."""
        parts: list[str] = []
        while at < len(text) and (quoted or text[at] not in ends):
            if text[at] == '"':
                quoted = not quoted
                at += 1
            elif text[at] in "`$":
                part, at = self._expansion(text, at)
                parts.append(part)
            elif match := (_QUOTED_TEXT if quoted else _TEXT).match(text, at):
                parts.append(match[match.lastindex or 0])
                at = match.end()
        return "".join(parts), at

    def _expansion(self, text: str, at: int) -> tuple[str, int]:
        """Return the expansion of the dollar sign or backtick at `at`, and its end."""
        short = _SHORT.match(text, at)
        is_bracket = text.startswith(("$(", "${"), at)
        end = _closing(text, at + 1) if is_bracket or short is None else short.end()
        given = text[at:end]
        inner = given[2:-1] if given[1:2] == "{" else given[1:]
        result = None
        if given.startswith("$(("):
            result = self._arithmetic(given[3:-2])
        elif given == "$":
            result = given
        elif match := _VARIABLE.fullmatch(inner):
            result = self._variable(match[1], match[4], is_array=bool(match[2]))
            if match[3] == "=":
                self._values[match[1]] = [result or ""]
        if result is None:
            self.unread.append(given)
            return given, end
        return result, end

    def _variable(
        self, name: str, default: str | None = None, *, is_array: bool = False
    ) -> str | None:
        """Return the value of a variable, or None; the arguments of the script are empty."""
        if name in ("@", "*"):
            return _BETWEEN
        values = self._values.get(name, [])
        size = sum(map(len, values))
        self._num_expanded += size
        if size > _LONGEST_VALUE:
            raise _too_long(f"the variable {name} has more than {_LONGEST_VALUE} characters")
        if self._num_expanded > _LONGEST_SCRIPT:
            message = f"the script has more than {_LONGEST_SCRIPT} characters once its variables"
            raise _too_long(f"{message} are expanded")
        if default is not None and not any(values):
            return self._word(default, 0, "", quoted='"' not in default)[0]
        if name not in self._values and (name.isdigit() or name in "#?"):
            return None
        if name not in self._values:
            return f"${{oc.env:{name}}}"
        if is_array:
            return _BETWEEN + _BETWEEN.join([*values, ""])
        return next(iter(values), "")

    def _arithmetic(self, text: str) -> str | None:
        """Return the value of a whole-number expression, or None."""

        def value(node: ast.AST) -> int:
            match node:
                case ast.BinOp(left=left, op=op, right=right):
                    return _OPERATIONS[type(op).__name__](value(left), value(right))
                case ast.Constant(value=int(number)):
                    return number
                case ast.Name(id=name):
                    return int(self._values[name][0])
                case _:
                    raise ValueError(text)

        expanded = self._word(text, 0, "", quoted=True)[0].replace("$", "")
        try:
            return str(value(ast.parse(expanded.strip(), mode="eval").body))
        except (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, ValueError):
            return None


def _too_long(message: str) -> ConfigError:
    return ConfigError(message, hint="write repeated values out")


def _split(word: str) -> list[str]:
    """Return the words of an expansion: an array has one per value, or none."""
    if _BETWEEN not in word:
        return [word]
    return [part for part in word.split(_BETWEEN) if part]


def _closing(text: str, at: int) -> int:
    """Return the position after the bracket that closes the one at `at`."""
    depth = 0
    closing = {"(": ")", "{": "}"}[text[at]]
    for position in range(at, len(text)):
        depth += (text[position] == text[at]) - (text[position] == closing)
        if not depth:
            return position + 1
        if depth > _DEEPEST:
            raise ConfigError(f"the script has more than {_DEEPEST} nested brackets")
    return len(text)
