#!/usr/bin/python3 -I
"""runc for podman on a simulated node, on a machine whose root lacks CAP_SYS_RESOURCE.

    simulating_runc.py HOOK ARGUMENT...

HOOK is the JSON of the hook that plays the kernel, which goes before all others. podman sets limits for every container
that such a root may not set, so they are left out.
"""

import json
import os
import sys


def main(hook: str, arguments: list[str]) -> None:
    if "create" in arguments:
        path = f"{arguments[arguments.index('--bundle') + 1]}/config.json"
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
        spec["process"].pop("rlimits", None)
        for names in spec["process"]["capabilities"].values():
            if "CAP_SYS_RESOURCE" in names:
                names.remove("CAP_SYS_RESOURCE")
        spec.setdefault("hooks", {}).setdefault("prestart", []).insert(0, json.loads(hook))
        with open(path, "w", encoding="utf-8") as file:
            json.dump(spec, file)
    os.execvp("runc", ["runc", *arguments])


main(sys.argv[1], sys.argv[2:])
