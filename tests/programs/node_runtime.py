#!/usr/bin/python3 -I
"""nvct's runtime for an engine on a simulated node: a first prestart hook plays the kernel, as the node's own does.

Started through a link that stands beside `node-runtime.json`, which says {"hook": the hook, "command": nvct's runtime
and its options}.
"""

import json
import os
import sys


def main(arguments: list[str]) -> None:
    with open(f"{os.path.dirname(sys.argv[0])}/node-runtime.json", encoding="utf-8") as file:
        told = json.load(file)
    if "create" in arguments:
        path = os.path.join(arguments[arguments.index("--bundle") + 1], "config.json")
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
        hooks = spec.setdefault("hooks", {})
        hooks["prestart"] = [told["hook"], *hooks.get("prestart", [])]
        with open(path, "w", encoding="utf-8") as file:
            json.dump(spec, file)
    os.execv(told["command"][0], [*told["command"], *arguments])


main(sys.argv[1:])
