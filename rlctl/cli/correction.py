"""The user's command line with the changes that its problems propose, to paste."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from rlctl.errors import Problem, Words
from rlctl.redaction import redact_word

# Commands that take overrides, which may be added at their end.
_TAKES_OVERRIDES = {"train", "resume", "sweep", "fit"}
_MAX_CHECKS = 4  # of a corrected line, each followed by corrections of what it still lacks


def correct(
    words: Sequence[str],
    problems: Sequence[Problem],
    check: Callable[[Sequence[str]], Sequence[Problem]] | None,
) -> tuple[str | None, list[Problem]]:
    """Return the corrected line, None if no fix can be applied, and the problems that remain.

    `check` returns the problems of a command line. With it, the fixes of problems that only the
    corrected line has are applied, too.
    """
    line = corrected(words, problems)
    remaining = [each for each in problems if corrected(words, [each]) is None]
    for _ in range(_MAX_CHECKS):
        if check is None or line is None:
            break
        words = shlex.split(line)[1:]
        remaining = list(check(words))
        if not remaining or (longer := corrected(words, remaining)) in (None, line):
            break
        line = longer
    return line, remaining


def corrected(words: Sequence[str], problems: Sequence[Problem]) -> str | None:
    """Return `rlctl WORDS` with the fixes of the problems, None if no fix can be applied.

    The line is quoted for a shell. Secrets in it are replaced; so are those in the fixes.
    """
    line, changed = [redact_word(word) for word in words], set[str]()
    for before, after in (each.fix for each in problems if each.fix is not None):
        if isinstance(before, tuple) or isinstance(after, tuple):
            if _replace(line, _words(before), _words(after)):
                changed.update(_words(before))
            continue
        given, instead = before, after
        key = _key(given)
        if key in changed:  # by another problem of the same key
            continue
        changed.add(key)
        place = _find(line, given)
        if place is not None:
            name, equals, value = line[place].partition("=")
            is_value = equals and value == given
            line[place] = f"{name}={instead}" if is_value else instead
        elif "=" not in given and instead.startswith(f"{given}=") and _TAKES_OVERRIDES & {*line}:
            line.append(instead)
        else:
            changed.discard(key)
    return f"rlctl {shlex.join(line)}" if changed else None


def _words(words: Words) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _replace(line: list[str], given: list[str], instead: list[str]) -> bool:
    """Replace the first occurrence of words in a row; return whether there is one."""
    for start in range(len(line) - len(given) + 1):
        if line[start : start + len(given)] == given:
            line[start : start + len(given)] = instead
            return True
    return False


def _find(line: Sequence[str], given: str) -> int | None:
    """Return the index of the last word that is `given`, or has this key or value."""
    found = [
        index
        for index, word in enumerate(line)
        if given in (word, _key(word)) or ("=" in word and word.partition("=")[2] == given)
    ]
    return found[-1] if found else None


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
