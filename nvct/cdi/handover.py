"""A program of its own: gives a container CDI devices, for the runtime, which may import neither YAML nor this room.

    python3 -I handover.py

On standard input, as JSON, {"spec": an OCI runtime spec, "names": qualified names of devices, "folders": of CDI specs};
on standard output the spec with the devices in it.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":  # run by its path, so nothing has put the package's parent folder on the search path
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from nvct.cdi import registry
from nvct.cdi.apply import apply, edits_of
from nvct.errors import NvctError


def main(text: str) -> str:
    """The JSON text of the edited spec. Raises NvctError."""
    told = json.loads(text)
    devices = registry.resolve(registry.load(told["folders"]), told["names"])
    return json.dumps(apply(told["spec"], edits_of(devices)))


if __name__ == "__main__":
    try:
        sys.stdout.write(main(sys.stdin.read()))
    except NvctError as error:
        sys.exit(f"nvct: {error}")
