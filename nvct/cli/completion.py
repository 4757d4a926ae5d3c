"""`nvct completion`: the script that teaches a shell to complete nvct's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from nvct.cli.output import echo

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    Examples:
      source <(nvct completion bash)                   for this shell, bash or zsh
      nvct completion bash > /etc/bash_completion.d/nvct
      nvct completion fish > ~/.config/fish/completions/nvct.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click brings these three
    echo(kind(context.find_root().command, {}, "nvct", "_NVCT_COMPLETE").source())
