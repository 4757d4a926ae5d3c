"""How messages of a plan show what others wrote: on one line, and short."""

from __future__ import annotations

_LONGEST = 80
_MOST_NAMES = 16


def quoted(token: str) -> str:
    """A token between backticks; unprintable characters escaped, since it comes from a stranger's environment."""
    text = token if token.isprintable() else ascii(token)[1:-1]
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 3] + "..."
    return f"`{text}`"


def listed(names: list[str]) -> str:
    """Names with commas; of very many the first ones, and where to see the rest."""
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more (see `nvct list`)"
    return ", ".join(names)
