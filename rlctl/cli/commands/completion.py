"""`rlctl completion`: the completion script of a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rlctl.cli.shells import completion_script

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  eval "$(rlctl completion bash)"                    in ~/.bashrc

  rlctl completion zsh > ~/.zfunc/_rlctl

  rlctl completion fish > ~/.config/fish/completions/rlctl.fish

  rlctl completion powershell | Out-String | Invoke-Expression
"""


@app.command(epilog=_EXAMPLES)
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish", "powershell", "pwsh"], typer.Argument(help="Shell.")
    ],
) -> None:
    """Print the completion script of a shell; `rlctl --install-completion` installs it."""
    typer.echo(completion_script(shell))
