"""Syntax of a chat template, which Jinja checks without the tokenizer."""

from __future__ import annotations

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlctl.errors import ConfigError


class _Generation(Extension):
    """The block `generation`, with which transformers marks an assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the block and return its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_syntax(text: str, file: str | None) -> None:
    """Raise ConfigError with the line if `text`, of `file`, is no valid template."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        environment.parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is no valid Jinja: {error.message}",
            where=f"{file or 'actor_rollout_ref.model.custom_chat_template'}:{error.lineno}",
            hint="check the braces, and that each block has its end",
        ) from error
