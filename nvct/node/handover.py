"""A program of its own: discovers the node and hands settings and inventory over on standard output, as JSON.

    python3 -I handover.py SETTINGS-FILE any|new|settings

Hooks run it when the kept inventory is stale. `any`: one that somebody else has kept meanwhile will do. `settings`:
only these, for a container that may need nothing of this node's driver. What hooks may
not import, and the threads of NVML, are in this process; and a node whose /run is full still starts containers.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":  # run by its path, so nothing has put the package's parent folder on the search path
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nvct import settings
from nvct.errors import NvctError
from nvct.node.current import current, refresh
from nvct.node.saved import inventory_to_json


def main(config: str, which: str) -> str:
    """The JSON text: {"settings", "inventory", "warnings"}, or the first alone. Raises NvctError."""
    if which == "settings":
        return json.dumps({"settings": settings.to_json(settings.load(config))})
    found = current(config) if which == "any" else refresh(config)
    answer = {
        "settings": settings.to_json(found.settings),
        "inventory": inventory_to_json(found.inventory),
        "warnings": list(found.warnings),
    }
    return json.dumps(answer)


if __name__ == "__main__":
    try:
        sys.stdout.write(main(*sys.argv[1:]))
    except NvctError as error:
        sys.exit(f"nvct: {error}")
