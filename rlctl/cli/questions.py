"""Answers to the questions of a command: options, suggestions, or what is typed on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import typer

from rlctl.errors import RlctlError, UsageError

T = TypeVar("T")


class Questions:
    """Questions that are asked on a terminal only; elsewhere the missing options are collected.

    `accept` takes every suggestion without a question.
    """

    def __init__(self, accept: bool) -> None:
        self.on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
        self.accepts = accept
        self._missing: dict[str, str | None] = {}  # option → suggestion

    @property
    def any_missing(self) -> bool:
        """True if an option is missing, and nobody can be asked."""
        return bool(self._missing)

    def answer(
        self,
        option: str,
        given: str | None,
        question: str,
        suggestion: str | None,
        parse: Callable[[str], T],
    ) -> T | None:
        """Return the parsed value of an option.

        If nobody can be asked, it is noted as missing: the result is the suggestion, or None
        without one, so that later suggestions can follow from it. An answer that `parse` refuses
        with an RlctlError is asked for again.
        """
        if given is None and self.accepts:
            given = suggestion
        if given is not None:
            return parse(given)
        if not self.on_terminal:
            self._missing[option] = suggestion
            return None if suggestion is None else parse(suggestion)
        from rlctl.cli.console import print_problems

        while True:
            typed = typer.prompt(question, default=suggestion, err=True)
            try:
                return parse(typed.strip())
            except RlctlError as error:
                print_problems(error.problems)

    def confirm(self, question: str) -> None:
        """Ask for consent on a terminal, unless suggestions are accepted. Exits with 1 on a no."""
        if self.on_terminal and not self.accepts and not typer.confirm(question, True, err=True):
            raise typer.Exit(1)

    def missing(self, columns: str) -> UsageError:
        """Return the error that names all missing options, their suggestions, and `columns`."""
        known = [
            f"{option.partition(' ')[0]} {suggestion}"
            for option, suggestion in self._missing.items()
            if suggestion is not None
        ]
        accepts = f"; --yes accepts the suggestions: {' '.join(known)}" if known else ""
        return UsageError(
            f"missing options: {', '.join(self._missing)}",
            hint=f"nothing is asked without a terminal{accepts}{columns}",
        )
