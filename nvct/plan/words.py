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


def ranges(numbers: list[int], prefix: str = "") -> str:
    """Numbers, each with a prefix, in ascending order: three and more that follow one another as `0 to 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return listed([name for run in runs for name in _run_names([f"{prefix}{number}" for number in run])])


def _run_names(names: list[str]) -> list[str]:
    return [f"{names[0]} to {names[-1]}"] if len(names) > 2 else names
