"""`python -m nvct`, and this file run by its path, as the hook does when the inventory is stale."""

from __future__ import annotations

import os
import sys

if not __package__:  # run by its path, so nothing has put the package's parent folder on the search path
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

try:
    from nvct.cli.main import main
except ModuleNotFoundError as error:
    if (error.name or "").startswith("nvct"):
        raise
    sys.exit(f"nvct: {sys.executable} has no module {error.name!r}: install nvct's dependencies there, or use another")

main()
