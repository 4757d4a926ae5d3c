"""Commands that are imported when they are needed: half of a short command's time went into all the others."""

from __future__ import annotations

import importlib
from collections import UserDict
from typing import Any


class LazyCommands(UserDict[str, Any]):
    """A group's commands by name, made from where each is: `module:attribute`."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self.data[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
