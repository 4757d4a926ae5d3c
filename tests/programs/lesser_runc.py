#!/usr/bin/python3 -I
"""runc for --privileged containers on a machine whose root lacks CAP_SYS_RESOURCE: the spec is rid of it first.

docker gives such containers every capability that the kernel knows, and runc fails on one that root has not. runc also
throws away what a hook says when it succeeds; what the GPU hook says goes to the file NAME.hook beside this program (a
link to it), NAME being the container's id.
"""

import json
import os
import sys

# Runs the hook with the file $1 as its standard error, and repeats that for runc to quote when the hook fails.
KEEP_STDERR = 'log=$1; shift; "$@" 2>"$log"; status=$?; cat "$log" >&2; exit $status'


def main(arguments: list[str]) -> None:
    if "create" in arguments:
        log = f"{os.path.dirname(sys.argv[0])}/{arguments[-1]}.hook"
        change(os.path.join(value_of("--bundle", arguments), "config.json"), log)
    elif "exec" in arguments:
        change(value_of("--process", arguments), "")
    os.execvp("runc", ["runc", *arguments])


def value_of(option: str, arguments: list[str]) -> str:
    return arguments[arguments.index(option) + 1]


def change(path: str, log: str) -> None:
    """Change the spec of a container, or of a process that is to join one."""
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    for names in spec.get("process", spec)["capabilities"].values():
        if "CAP_SYS_RESOURCE" in names:
            names.remove("CAP_SYS_RESOURCE")
    for hook in spec.get("hooks", {}).get("prestart", []):
        if hook["path"].endswith("/nvidia-container-runtime-hook"):
            hook["args"] = ["sh", "-c", KEEP_STDERR, "sh", log, hook["path"], *hook["args"][1:]]
            hook["path"] = "/bin/sh"
    with open(path, "w", encoding="utf-8") as file:
        json.dump(spec, file)


main(sys.argv[1:])
