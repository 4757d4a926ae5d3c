"""Why a container gets what it gets: Request + Inventory + Settings → sentences.

A pure function around `plan`. Every reason is the one that the plan itself has written into its Edits, so that an
explanation cannot say anything else than what is done; what a capability would bring is found by planning with it.
What the carriers of edits cannot do is stated here, once, in CARRIERS.
"""

from __future__ import annotations

from os.path import normpath

from nvct.errors import NvctError
from nvct.model import (
    BINARY,
    CONFIG,
    FIRMWARE,
    LIBRARY,
    LIBRARY32,
    MODULE,
    SOCKET,
    Ask,
    Edits,
    Gpu,
    Inventory,
    LeftOut,
    MigDevice,
    Request,
)
from nvct.plan import plan
from nvct.plan.accept import Accepted, accept
from nvct.plan.capabilities import capabilities_of
from nvct.plan.devices import choose
from nvct.plan.hookfree import out_of_reach, without_hook
from nvct.plan.names import Shares, other_makers
from nvct.record import as_dict, record, replace
from nvct.settings import CAPABILITIES, CDI, HOOK, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PROC = "/proc/driver/nvidia"

# How devices were asked for cannot be seen in this container.
UNKNOWN = "unknown"

# Fields of Edits that say something about the plan; every other field holds changes to the container.
REMARKS = ("left_out", "warnings")

# Changes that have no reason of their own, since there is but one for all of their kind.
_COMMON_REASONS = {
    "env": "whoever looks at the container's variables later must not give it devices again",
    "stale": "what a start under another driver version left there would shadow this driver's files",
}

_NOUNS = {
    LIBRARY: ("library", "libraries"),
    LIBRARY32: ("32-bit library", "32-bit libraries"),
    BINARY: ("program", "programs"),
    FIRMWARE: ("firmware file", "firmware files"),
    SOCKET: ("socket", "sockets"),
    CONFIG: ("configuration file", "configuration files"),
    MODULE: ("X server module", "X server modules"),
}
_OTHER = ("other file", "other files")


@record
class Meaning:
    """One device that a token stands for. `device` is its index, `0` or `0:1`; `what` tells it to a person."""

    device: str
    uuid: str
    what: str


@record
class Asked:
    """A device token that counts: where it stands, and what it means here or why it is refused."""

    token: str
    source: str
    means: tuple[Meaning, ...]
    refused: str


@record
class Change:
    """One edit. `kind` is its field of Edits, `what` names it in the container, `edit` are its other fields."""

    kind: str
    what: str
    why: str
    edit: dict[str, Any]


@record
class Explanation:
    """Everything that there is to say about a request.

    `asks_for` is "nothing", "the driver" (without a GPU) or "devices", which `asked` resolves; of a running container
    also UNKNOWN. `capabilities` are those that the container gets; `others` are the request's parts besides devices and
    capabilities. `left_out` is what the edits say of that and more. `cannot` says what the carrier cannot do of the
    edits. `refusal` is the error that `plan` raises for the request; there are no edits then.
    """

    asks_for: str
    asked: tuple[Asked, ...]
    capabilities: tuple[str, ...]
    capabilities_source: str
    others: tuple[Ask, ...]
    privileged: bool
    edits: Edits
    left_out: tuple[LeftOut, ...]
    carrier: str
    cannot: tuple[str, ...]
    refusal: NvctError | None = None


def explain(inventory: Inventory, request: Request, settings: Settings, carrier: str = "hook") -> Explanation:
    """Explain a request. `carrier` is a name in CARRIERS. Raises nothing: a refusal is part of the explanation."""
    edits, refusal, shares = Edits(), None, Shares(request=request)
    try:
        if carrier in RUNTIMES:
            shares = other_makers(request, settings)
        if shares.request:
            edits = plan(inventory, shares.request, settings)
    except NvctError as error:
        refusal = error
    devices = _counted(request, settings)
    capabilities: tuple[str, ...] = ()
    left_out = edits.left_out
    if devices is not None and refusal is None and shares.request:
        capabilities = capabilities_of(request, settings)
        left_out += _not_asked(inventory, shares.request, settings, edits, capabilities)
        left_out += _of_the_node(inventory, settings, edits)
    return Explanation(
        asks_for="nothing" if devices is None else "devices" if devices.tokens else "the driver",
        asked=tuple(_asked(inventory, token, devices.source, shares) for token in devices.tokens) if devices else (),
        capabilities=capabilities,
        capabilities_source=request.capabilities.source if request.capabilities else "",
        others=tuple(_others(request, devices)),
        privileged=request.privileged,
        edits=edits,
        left_out=left_out,
        carrier=carrier,
        cannot=CARRIERS[carrier](edits, settings) + tuple(map(_by_another_spec, shares.names)),
        refusal=refusal,
    )


def as_carried(explanation: Explanation, inventory: Inventory, request: Request) -> Edits:
    """The edits as they are carried out: where no hook runs, with what stands in for it."""
    if not explanation.carrier.startswith(HOOK_FREE):
        return explanation.edits
    look = request.container if explanation.carrier in RUNTIMES else None
    return without_hook(explanation.edits, inventory.architecture, look)


def to_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation for JSON: the fields of its record, with `changes` and `warnings` in place of the edits.

    A change is one dict: `kind`, `what`, `why` and the edit's other fields. `refusal` is a text, or null.
    """
    values: dict[str, Any] = as_dict(replace(explanation, edits=Edits(), refusal=None))
    del values["edits"]
    values["changes"] = [
        {"kind": change.kind, "what": change.what, "why": change.why, **change.edit}
        for change in changes_of(explanation.edits)
    ]
    values["warnings"] = list(explanation.edits.warnings)
    values["refusal"] = str(explanation.refusal) if explanation.refusal else None
    return values


def changes_of(edits: Edits) -> Iterator[Change]:
    """Every change, in the order of the fields of Edits: whatever field is added there is found here."""
    for kind, values in ((name, getattr(edits, name)) for name in as_dict(edits) if name not in REMARKS):
        if values is None:
            continue
        if isinstance(values, dict):
            for name, value in values.items():
                yield Change(kind, name, _COMMON_REASONS[kind], {"value": value})
            continue
        for edit in values if isinstance(values, tuple) else (values,):
            fields = as_dict(edit)
            why = fields.pop("why", None) or _COMMON_REASONS[kind]
            yield Change(kind, name_of(kind, fields), why, fields)


def name_of(kind: str, fields: dict[str, Any]) -> str:
    """What a change is called: mostly the path in the container. No two changes of a kind have one name."""
    if kind == "mounts":
        return str(fields["target"])
    if kind == "loader_cache":
        return f"{fields['name']} ({fields['bits']}-bit)"
    if kind == "proc":
        return PROC
    if kind == "stale":
        return f"{fields['folder']}/{fields['prefix']}*"
    return str(fields["path"])


def summary(inventory: Inventory, edits: Edits) -> str:
    """What the edits bring, counted: `13 libraries, 2 programs`; "" when nothing."""
    kinds = kinds_of_files(inventory)
    parts = [_count(len(edits.devices), ("device node", "device nodes"))]
    for kind, noun in (*_NOUNS.items(), ("", _OTHER)):
        parts.append(_count(sum(kinds.get(mount.source, "") == kind for mount in edits.mounts), noun))
    parts.append(_count(len(edits.files), ("written file", "written files")))
    return ", ".join(part for part in parts if part)


def kinds_of_files(inventory: Inventory) -> dict[str, str]:
    """The kind of each driver file by its path on this host."""
    root = inventory.roots.root.rstrip("/")
    return {root + file.path: file.kind for file in inventory.files}


def groups(edits: Edits) -> dict[str, Edits]:
    """The files of the edits by the reason that brought them: mounts with the links and cache names that lead there."""
    found: dict[str, Edits] = {}
    reasons = {mount.target: mount.why for mount in edits.mounts}
    for mount in edits.mounts:
        group = found.setdefault(mount.why, Edits())
        found[mount.why] = replace(group, mounts=(*group.mounts, mount))
    texts = {link.path: link.target for link in edits.links}
    for link in edits.links:
        why = reasons.get(_end(link.path, texts), link.why)
        group = found.setdefault(why, Edits())
        found[why] = replace(group, links=(*group.links, link))
    for line in edits.loader_cache:
        why = reasons.get(_end(line.path, texts), line.why)
        group = found.setdefault(why, Edits())
        found[why] = replace(group, loader_cache=(*group.loader_cache, line))
    return found


def _end(path: str, texts: dict[str, str]) -> str:
    """Where links of the plan lead to from `path`; a circle of them ends where it began."""
    seen = {path}
    while path in texts:
        text = texts[path]
        path = normpath(f"{path.rpartition('/')[0]}/{text}") if text[:1] != "/" else text
        if path in seen:
            return path
        seen.add(path)
    return path


def _count(number: int, noun: tuple[str, str]) -> str:
    return f"{number} {noun[number != 1]}" if number else ""


def _counted(request: Request, settings: Settings) -> Ask | None:
    """The place whose devices count; of a request that is malformed, the variable that everybody looks at."""
    try:
        return accept(request, settings).devices
    except NvctError:
        return request.devices


def _by_another_spec(name: str) -> str:
    return f"what {name} brings stands in the CDI spec of its maker, and is not planned here"


def _asked(inventory: Inventory, token: str, source: str, shares: Shares) -> Asked:
    if token in shares.names:
        return Asked(token, source, (), "")
    try:
        choice = choose(inventory, Accepted(devices=Ask(source, (token,))))
    except NvctError as error:
        return Asked(token, source, (), str(error))
    divided = {chosen.gpu.uuid for chosen in choice.mig_devices}
    gpus = [_gpu(chosen.gpu) for chosen in choice.gpus if chosen.gpu.uuid not in divided]
    parts = [_mig_device(chosen.gpu, chosen.device) for chosen in choice.mig_devices]
    # `all` takes a GPU's MIG devices where it has any; they are told in the GPUs' order.
    return Asked(token, source, tuple(sorted((*gpus, *parts), key=_order)), "")


def _order(meaning: Meaning) -> list[int]:
    return [int(number) for number in meaning.device.split(":")]


def _gpu(gpu: Gpu) -> Meaning:
    what = f"GPU {gpu.index}: {gpu.model} at {gpu.bus_id}, /dev/nvidia{gpu.minor}"
    return Meaning(str(gpu.index), gpu.uuid, what)


def _mig_device(gpu: Gpu, device: MigDevice) -> Meaning:
    what = (
        f"MIG device {device.index} of GPU {gpu.index}: {device.profile}, {device.memory_mib} MiB, GPU instance "
        f"{device.gi}, compute instance {device.ci}, on {gpu.model} at {gpu.bus_id}, /dev/nvidia{gpu.minor}"
    )
    return Meaning(f"{gpu.index}:{device.index}", device.uuid, what)


def _others(request: Request, devices: Ask | None) -> Iterator[Ask]:
    """Every other part of a request, in whichever field: a newly added one is told without a line here."""
    for name in as_dict(request):
        value = getattr(request, name)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        for part in parts:
            if isinstance(part, Ask) and part not in (devices, request.capabilities):
                yield part


def _not_asked(
    inventory: Inventory, request: Request, settings: Settings, edits: Edits, capabilities: tuple[str, ...]
) -> tuple[LeftOut, ...]:
    """The capabilities that the container has not, with what each would bring."""
    left_out = []
    for name in CAPABILITIES:
        if name in capabilities:
            continue
        if name not in settings.supported_capabilities:
            why = "the settings (supported_capabilities) do not allow it on this node"
        else:
            why = f"not asked for; {_would_bring(inventory, request, settings, edits, (*capabilities, name))}"
        left_out.append(LeftOut(f"capability {name}", why))
    return tuple(left_out)


def _would_bring(
    inventory: Inventory, request: Request, settings: Settings, edits: Edits, capabilities: tuple[str, ...]
) -> str:
    try:
        more = plan(inventory, replace(request, capabilities=Ask("", capabilities)), settings)
    except NvctError as error:
        return f"it would be refused: {error}"
    gain = Edits(
        devices=tuple(edit for edit in more.devices if edit.path not in {had.path for had in edits.devices}),
        mounts=tuple(edit for edit in more.mounts if edit.target not in {had.target for had in edits.mounts}),
        files=tuple(edit for edit in more.files if edit.path not in {had.path for had in edits.files}),
    )
    return f"it would bring {summary(inventory, gain) or 'nothing on this node'}"


def _of_the_node(inventory: Inventory, settings: Settings, edits: Edits) -> tuple[LeftOut, ...]:
    """What this node has not, and what its settings switch off outside of the plan."""
    left_out = [LeftOut(sentence, "this node's driver is without it") for sentence in inventory.missing]
    if edits.devices and not settings.cgroups:
        why = "cgroups is off in the settings: whether the nodes can be opened, the engine and their modes decide"
        left_out.append(LeftOut("device rules", why))
    return tuple(left_out)


def _hook_cannot(edits: Edits, settings: Settings) -> tuple[str, ...]:
    sentences = []
    if edits.env:
        sentences.append(
            f"a hook cannot change the container's environment: {', '.join(edits.env)} stays as image and user set it"
        )
    if edits.devices and settings.cgroups:
        sentences.append(
            "the engine knows nothing of device rules that a hook adds: `docker update` and, with systemd's cgroup "
            "driver, `systemctl daemon-reload` take them away from a running container"
        )
    return tuple(sentences)


def _cdi_cannot(edits: Edits, settings: Settings) -> tuple[str, ...]:
    if not edits.env:
        return ()
    return (
        "an engine gives the CDI devices that it is asked for, and looks at no variable: a container gets every driver "
        "capability that the settings allow, and NVIDIA_REQUIRE_* is not checked",
        "a spec is written before there is a container, and says what the node had then; only `nvct cdi refresh` "
        "keeps it true",
    )


def _hook_free_cdi_cannot(edits: Edits, settings: Settings) -> tuple[str, ...]:
    return (*_cdi_cannot(edits, settings), *(f"{left.what}: {left.why}" for left in out_of_reach(edits)))


def _runtime_cannot(edits: Edits, settings: Settings) -> tuple[str, ...]:
    if not edits.env:
        return ()
    if settings.runtime_mode == HOOK:
        return _hook_cannot(edits, settings)
    sentences = [
        "the runtime sees the image's root file system without the volumes that are mounted later: an image with its "
        "/usr/local/cuda/compat or /etc/debian_version on a volume is taken for one without"
    ]
    if settings.runtime_mode == CDI:
        sentences.append(
            "the settings (runtime_mode) have devices looked up in the CDI specs of this machine: a container gets "
            "what those say, with every driver capability in them"
        )
    return tuple(sentences)


def _hook_free_runtime_cannot(edits: Edits, settings: Settings) -> tuple[str, ...]:
    return (*_runtime_cannot(edits, settings), *(f"{left.what}: {left.why}" for left in out_of_reach(edits)))


HOOK_FREE = "hook-free-"
RUNTIMES = ("runtime", f"{HOOK_FREE}runtime")

# Whoever carries edits out, and what it cannot do of them, in sentences. That nothing can be denied to a privileged
# container is true of all carriers, and a warning of the plan.
CARRIERS: dict[str, Callable[[Edits, Settings], tuple[str, ...]]] = {
    "hook": _hook_cannot,
    "cdi-spec": _cdi_cannot,
    f"{HOOK_FREE}cdi-spec": _hook_free_cdi_cannot,
    "runtime": _runtime_cannot,
    f"{HOOK_FREE}runtime": _hook_free_runtime_cannot,
}
