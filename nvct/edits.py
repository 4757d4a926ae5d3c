"""What of Edits a spec cannot express, as JSON, and the small hook of OCI and CDI specs whose argument that is.

On the hook's hot path, where it turns plain dicts into values; reading and writing text is the caller's. Of the reasons
in the edits only those are kept that the hook can have to tell.
"""

from __future__ import annotations

from nvct import fastjson
from nvct.errors import ConfigError, RequestError
from nvct.model import CacheEdit, Case, Edits, FileEdit, LinkEdit, Pending, ProcEdit, Remainder, StaleName
from nvct.record import as_dict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


HOOK = "nvct-cdi-hook"

# Before the program starts, outside of the container, and without the image's environment.
HOOK_STAGE = "createRuntime"

# Without an env of its own a hook gets that of the runtime, or in some stages that of the image, LD_PRELOAD included;
# and an empty one counts as none.
HOOK_ENV = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin",)

# Linux hands no program a longer argument (execve(2), MAX_ARG_STRLEN, its NUL included).
_LONGEST = (128 << 10) - 1


def hook_arguments(remainder: Remainder) -> tuple[str, ...]:
    """The arguments of the hook that is to carry the remainder out, its name first. Raises RequestError when they are
    more than a program can be given.
    """
    text = fastjson.dumps(to_json(remainder))
    if len(text) > _LONGEST:
        raise RequestError(
            f"what {HOOK} has to do takes {len(text)} bytes, and no program can be told more than {_LONGEST} in one "
            "argument: ask for fewer devices or driver capabilities, or do without this hook"
        )
    return (HOOK, HOOK_STAGE, text)


def to_json(remainder: Remainder) -> dict[str, Any]:
    """The remainder as dicts, lists and scalars; of its edits only what a spec cannot express. Empty parts are left
    out.
    """
    value: dict[str, Any] = {"architecture": remainder.architecture, "edits": edits_to_json(remainder.edits)}
    if remainder.pending:
        value["pending"] = {
            **as_dict(remainder.pending),
            "cases": [
                {**as_dict(case), "nodes": list(case.nodes), "edits": edits_to_json(case.edits)}
                for case in remainder.pending.cases
            ],
        }
    return value


def edits_to_json(edits: Edits) -> dict[str, Any]:
    """`links`: path to text. `loader_cache`: [name, path, bits]. `files`: [path, content, mode, why]. `proc`: the
    fields of ProcEdit but its reason. `stale`: folder to prefixes. Empty when a spec can express all of the edits.
    """
    parts = {
        "links": {link.path: link.target for link in edits.links},
        "loader_cache": [[entry.name, entry.path, entry.bits] for entry in edits.loader_cache],
        "files": [[file.path, file.content, file.mode, file.why] for file in edits.files],
        "proc": _proc_to_json(edits.proc) if edits.proc else {},
        "stale": _stale_to_json(edits.stale),
    }
    return {name: part for name, part in parts.items() if part}


def _proc_to_json(proc: ProcEdit) -> dict[str, Any]:
    return {
        "source": proc.source,
        "files": list(proc.files),
        "gpus": list(proc.gpus),
        "capabilities": list(proc.capabilities),
    }


def _stale_to_json(stale: tuple[StaleName, ...]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for name in stale:
        folders.setdefault(name.folder, []).append(name.prefix)
    return folders


def from_json(value: Any) -> Remainder:
    """What `to_json` was given, as far as it wrote it. Raises ConfigError for anything else."""
    try:
        pending = value.get("pending")
        return Remainder(_edits(value["edits"]), value["architecture"], _pending(pending) if pending else None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the hook's JSON is not what this version of nvct writes ({type(error).__name__}: {error}): write the "
            "spec again (`nvct cdi refresh`)"
        ) from None


def _pending(fields: dict[str, Any]) -> Pending:
    cases = tuple(
        Case(**{**row, "nodes": tuple(row["nodes"]), "edits": _edits(row["edits"])}) for row in fields["cases"]
    )
    return Pending(**{**fields, "cases": cases})


def _edits(parts: dict[str, Any]) -> Edits:
    links = tuple(LinkEdit(path, text, "") for path, text in parts.get("links", {}).items())
    stale = tuple(
        StaleName(folder, prefix) for folder, prefixes in parts.get("stale", {}).items() for prefix in prefixes
    )
    return Edits(
        links=links,
        loader_cache=tuple(CacheEdit(name, path, bits, "") for name, path, bits in parts.get("loader_cache", ())),
        files=tuple(FileEdit(*row) for row in parts.get("files", ())),
        proc=_proc(parts["proc"]) if "proc" in parts else None,
        stale=stale,
    )


def _proc(fields: dict[str, Any]) -> ProcEdit:
    lists = {name: tuple(fields[name]) for name in ("files", "gpus", "capabilities")}
    return ProcEdit(source=fields["source"], **lists, why="")
