"""What has been done to a container so far, and how to undo it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Ledger:
    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, what: str, undo: Callable[[], object]) -> None:
        """Record a step that has just been done. `what` names it where undoing it fails."""
        self._steps.append((what, undo))

    def roll_back(self, to: int = 0) -> tuple[str, ...]:
        """Undo, last step first, until `to` steps are left. Goes on past failures and returns them, a phrase each."""
        failures = []
        while len(self._steps) > to:
            what, undo = self._steps.pop()
            try:
                undo()
            except OSError as error:
                failures.append(f"{what}: {error.strerror}")
            except Exception as error:  # a mistake of ours, for which no other step shall stay
                failures.append(f"{what}: {type(error).__name__} {error}")
        return tuple(failures)
