"""Words of a shell script with its variables expanded, without running it.

A subset of bash: assignments, arrays, `$NAME`, `${NAME:-default}`, `"${ARRAY[@]}"`, whole-number
arithmetic, quotes, comments and continued lines. Conditions and loops are read from top to bottom,
loops with their first value.
An unset variable becomes OmegaConf's `${oc.env:NAME}`; what cannot be expanded is listed.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field

from rlctl.errors import ConfigError

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*|[@*#?0-9]", re.ASCII)
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?::?([-=])(.*))?\Z", re.DOTALL)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ENDS = ";|&\n"
_LONGEST_VALUE = 100_000  # characters of a variable that is expanded
_LONGEST_SCRIPT = 2_000_000  # characters of all expansions together
_KEYWORDS = ("then", "do", "else", "{")  # a command follows


@dataclass
class Shell:
    """Reader of one script. `commands` are the words of each command, `unread` what was not."""

    text: str
    commands: list[list[str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    _values: dict[str, list[str]] = field(default_factory=dict)
    _at: int = 0
    _num_expanded: int = 0

    def read(self) -> list[list[str]]:
        """Return the words of every command, in order."""
        self.text = self.text.replace("\r\n", "\n").replace("\\\n", " ")
        words: list[str] = []
        while self._at < len(self.text):
            char = self.text[self._at]
            if char in " \t":
                self._at += 1
            elif char == "#":
                self._at = (self.text + "\n").index("\n", self._at)
            elif char in _ENDS:
                self._at += 1
                self._finish(words)
                words = []
            elif not words and (match := _ASSIGNMENT.match(self.text, self._at)):
                self._at = match.end()
                self._assign(match[1], append=bool(match[2]))
            elif char in "()":
                self._at += 1
                self._finish(words)  # a subshell, or the pattern of a case
                words = []
            else:
                words += self._word()
                words = [] if len(words) == 1 and words[0] in _KEYWORDS else words
        self._finish(words)
        return self.commands

    def _finish(self, words: list[str]) -> None:
        if len(words) > 3 and words[0] == "for" and words[2] == "in":
            self._values[words[1]] = words[3:4]
            self.unread.append(" ".join(words))
        elif words:
            self.commands.append(words)

    def _assign(self, name: str, *, append: bool) -> None:
        """Read the value of an assignment, an array or a word."""
        values: list[str] = []
        if self.text[self._at : self._at + 1] == "(":
            self._at += 1
            while self._at < len(self.text) and self.text[self._at] != ")":
                if self.text[self._at] == "#":
                    self._at = (self.text + "\n").index("\n", self._at)
                elif self.text[self._at].isspace():
                    self._at += 1
                else:
                    values += self._word()
            self._at += 1
        elif self.text[self._at : self._at + 1] not in (*_ENDS, " ", "\t", ""):
            values = ["".join(self._word())]
        self._values[name] = [*(self._values.get(name, []) if append else []), *values]

    def _word(self) -> list[str]:
        """Read one word; an array alone in its word becomes one word per value."""
        word, array, is_array = "", list[str](), False
        while self._at < len(self.text):
            char = self.text[self._at]
            if char.isspace() or char in f"{_ENDS}()":
                break
            if char == "'":
                end = (self.text + "'").index("'", self._at + 1)
                word += self.text[self._at + 1 : end]
                self._at = end + 1
            elif char == '"':
                self._at += 1
                while self._at < len(self.text) and self.text[self._at] != '"':
                    values, several = self._character()
                    is_array |= several
                    array += values if several else []
                    word += "" if several else values[0]
                self._at += 1
            else:
                values, several = self._character()
                is_array |= several
                array += values if several else []
                word += "" if several else values[0]
        return [*array, *([word] if word else [])] if is_array else [word]

    def _character(self) -> tuple[list[str], bool]:
        """Read one character or expansion; the second value is True for an array."""
        char = self.text[self._at]
        self._at += 1
        if char == "\\" and self._at < len(self.text):
            self._at += 1
            return [self.text[self._at - 1]], False
        if char == "`":
            end = (self.text + "`").index("`", self._at)
            return self._give_up(end + 1, self._at - 1)
        return self._expansion() if char == "$" else ([char], False)

    def _expansion(self) -> tuple[list[str], bool]:
        """Read what follows a dollar sign."""
        begin = self._at - 1
        if self.text.startswith("((", self._at):
            end = self._closing("(", ")")
            result = self._arithmetic(self.text[self._at + 2 : end - 2])
            if result is None:
                return self._give_up(end, begin)
            self._at = end
            return [result], False
        if self.text.startswith("(", self._at):
            return self._give_up(self._closing("(", ")"), begin)
        if self.text.startswith("{", self._at):
            end = self._closing("{", "}")
            match = _BRACED.match(self.text[self._at + 1 : end - 1])
            if match is None:
                return self._give_up(end, begin)
            self._at = end
            default = f'"{match[4]}"' if '"' not in (match[4] or "") else match[4]
            values, several = self._variable(
                match[1], bool(match[2]), default if match[3] else None
            )
            if match[3] == "=":
                self._values[match[1]] = values
            return values, several
        match = _NAME.match(self.text, self._at)
        if match is None:
            return ["$"], False
        self._at = match.end()
        return self._variable(match[0], False, None)

    def _variable(self, name: str, several: bool, default: str | None) -> tuple[list[str], bool]:
        """Return the values of a variable; the script's own arguments are empty."""
        self._check_length(name)
        if name in ("@", "*"):
            return [], True
        if name in self._values and (self._values[name] != [""] or default is None):
            values = self._values[name]
            return (values, True) if several else ([values[0] if values else ""], False)
        if default is not None:
            return [self._inner(default)], False
        if name.isdigit() or name in "#?":
            return self._give_up(self._at, self._at - len(name) - 1)
        return [f"${{oc.env:{name}}}"], False

    def _check_length(self, name: str) -> None:
        """Raise ConfigError if the script would grow beyond all measure."""
        size, hint = sum(map(len, self._values.get(name, []))), "write repeated values out"
        self._num_expanded += size
        if size > _LONGEST_VALUE:
            raise ConfigError(
                f"the variable {name} has more than {_LONGEST_VALUE} characters", hint=hint
            )
        if self._num_expanded > _LONGEST_SCRIPT:
            raise ConfigError(
                f"the script has more than {_LONGEST_SCRIPT} characters once its variables are "
                "expanded",
                hint=hint,
            )

    def _inner(self, text: str) -> str:
        """Return the word of a default or an expression, with the variables of the script."""
        inner = Shell(text, _values=self._values, _num_expanded=self._num_expanded)
        word = "".join(inner._word())
        self._num_expanded = inner._num_expanded
        return word

    def _closing(self, opening: str, closing: str) -> int:
        """Return the position after the bracket that closes the one at the current position."""
        depth = 0
        for position in range(self._at, len(self.text)):
            depth += {opening: 1, closing: -1}.get(self.text[position], 0)
            if not depth:
                return position + 1
        return len(self.text)

    def _give_up(self, end: int, begin: int) -> tuple[list[str], bool]:
        """List the text from `begin` to `end` as unread and keep it as it is."""
        text = self.text[begin:end]
        self.unread.append(text)
        self._at = end
        return [text], False

    def _arithmetic(self, text: str) -> str | None:
        """Return the value of a whole-number expression, or None."""

        def value(node: ast.AST) -> int:
            match node:
                case ast.Expression(body=body):
                    return value(body)
                case ast.BinOp(left=left, op=op, right=right):
                    return _OPERATORS[type(op)](value(left), value(right))
                case ast.Constant(value=int(number)):
                    return number
                case ast.Name(id=name):
                    return int(self._values[name][0])
                case _:
                    raise ValueError(text)

        expanded = self._inner(f'"{text}"').replace("$", "")
        try:
            return str(value(ast.parse(expanded.strip(), mode="eval")))
        except (KeyError, ValueError, SyntaxError, IndexError, ZeroDivisionError):
            return None
