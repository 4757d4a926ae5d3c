"""What of a request counts: of several places that name devices the first, and of each what the node's settings let in.

Annotations come first, since they are the engine's; then mount lists, since only an orchestrator can write them; then
docker swarm's variables; then NVIDIA_VISIBLE_DEVICES; and an image from before that variable asks for everything.
"""

from __future__ import annotations

from nvct.errors import RequestError
from nvct.model import Ask, Request
from nvct.plan.words import listed, quoted
from nvct.record import record
from nvct.request import DEVICES, MOUNT_LIST, meant
from nvct.settings import ACCEPT, REFUSE, Settings

# A channel is a minor number of the kernel, which has 20 bits. How many channels there are is a module parameter.
_CHANNELS = 1 << 20
_OFF = ("disabled", "false", "0", "no", "off", "none", "void")


@record
class Accepted:
    """What of a request counts, checked as far as that goes without an inventory.

    `devices`: None when the container gets nothing of ours, no tokens when it gets the driver without a GPU.
    `mig_config` and `mig_monitor` can only say `all`. The tokens of `imex_channels` are decimal numbers, each once.
    `extras`: by their names in Inventory.extra_nodes, those that are enabled. `warnings`: what was set aside, and why.
    """

    devices: Ask | None = None
    mig_config: Ask | None = None
    mig_monitor: Ask | None = None
    imex_channels: Ask | None = None
    extras: dict[str, Ask] = {}
    warnings: tuple[str, ...] = ()


def accept(request: Request, settings: Settings) -> Accepted:
    """Choose what counts. Raises RequestError for what is malformed, or forbidden to this container."""
    devices, warnings = _devices(request, settings)
    if devices is None:
        return Accepted(warnings=warnings)
    channels, about_channels = _imex_channels(request, settings)
    extras, about_extras = _extras(request, settings)
    return Accepted(
        devices=devices,
        mig_config=_mig_control(request, request.mig_config),
        mig_monitor=_mig_control(request, request.mig_monitor),
        imex_channels=channels,
        extras=extras,
        warnings=warnings + about_channels + about_extras,
    )


def _devices(request: Request, settings: Settings) -> tuple[Ask | None, tuple[str, ...]]:
    annotated = _annotated(request, settings)
    if annotated:
        return annotated, _outweighed(request, annotated)
    _check_marker(request, settings)
    if request.mount_list and settings.accept_mount_lists:
        return request.mount_list, ()
    warnings = _passed_over(request, settings)
    asked = _env_devices(request, settings)
    tokens = meant(asked.tokens) if asked else None
    if asked is None or tokens is None:
        return None, warnings
    refusal = _not_counted(request, settings, asked)
    if refusal:
        return None, (*warnings, refusal)
    return Ask(asked.source, tokens), warnings


def _annotated(request: Request, settings: Settings) -> Ask | None:
    """All annotations that count, which are one list in the order of their keys."""
    prefixes = settings.cdi_annotation_prefixes
    asks = [ask for key, ask in request.annotations.items() if key.startswith(prefixes)]
    if not asks:
        return None
    return Ask(" and ".join(ask.source for ask in asks), tuple(token for ask in asks for token in ask.tokens))


def _outweighed(request: Request, by: Ask) -> tuple[str, ...]:
    other = request.devices
    if other is None or meant(other.tokens) is None:
        return ()
    return (f"{other.source} asks for {_shown(other)}, and was passed over: {by.source} names devices",)


def _check_marker(request: Request, settings: Settings) -> None:
    """A variable that holds the list's folder says that the devices are listed there; it names no device."""
    tokens = meant(request.devices.tokens) if request.devices else None
    if request.devices is None or not any(token.startswith(MOUNT_LIST) for token in tokens or ()):
        return
    says = f"{request.devices.source} says that the devices are listed as mounts below {MOUNT_LIST}"
    if not settings.accept_mount_lists:
        raise RequestError(
            f"{says}, but the settings (accept_mount_lists) do not let mounts name devices; set accept_mount_lists: "
            "true, or have the devices passed in the variable"
        )
    if request.mount_list is None:
        raise RequestError(
            f"{says}, but no mount of /dev/null is there; expected one for each device, which whoever allocates "
            "devices (the device plugin) adds"
        )


def _passed_over(request: Request, settings: Settings) -> tuple[str, ...]:
    """Warnings about places that name devices and are not looked at."""
    warnings = []
    if request.mount_list:
        warnings.append(
            f"{request.mount_list.source} name {_shown(request.mount_list)}, and were passed over: the settings "
            "(accept_mount_lists) do not let mounts name devices"
        )
    for name, ask in request.swarm.items():
        if "GPU" in name and name not in settings.swarm_resource and meant(ask.tokens) is not None:
            warnings.append(
                f"{ask.source} reserves {_shown(ask)}, and was passed over: the settings (swarm_resource) do not name "
                f"it; set swarm_resource: [{ask.source.removeprefix('env ')}]"
            )
    return tuple(warnings)


def _env_devices(request: Request, settings: Settings) -> Ask | None:
    reserved = [request.swarm[name] for name in settings.swarm_resource if name in request.swarm]
    if reserved:
        tokens = tuple(token for ask in reserved for token in ask.tokens)
        return Ask(" and ".join(ask.source for ask in reserved), tokens)
    if request.devices is None and request.legacy_cuda:
        return Ask(f"env CUDA_VERSION without {DEVICES}, by which an old image asks for every GPU", ("all",))
    return request.devices


def _not_counted(request: Request, settings: Settings, ask: Ask) -> str:
    """The warning about an environment that does not count, or "" where it does. Raises RequestError by policy."""
    if request.privileged or settings.unprivileged_env == ACCEPT:
        return ""
    why = (
        f"{ask.source} asks for {_shown(ask)}, but the settings (unprivileged_env) do not let the environment of a "
        "container without CAP_SYS_ADMIN ask for devices; the variable may be an ENV of the image"
    )
    if settings.unprivileged_env == REFUSE:
        raise RequestError(f"{why}: set {DEVICES}=void, have devices allocated, or change unprivileged_env")
    return f"{why}: it gets none of them"


def _mig_control(request: Request, ask: Ask | None) -> Ask | None:
    """Leave to change, or to watch, the MIG devices of the GPUs that the container sees."""
    if ask is None or not ask.tokens:
        return None
    if not request.privileged:
        raise RequestError(
            f"{ask.source} asks for {_shown(ask)}, which only a container with CAP_SYS_ADMIN may; unset it, or give "
            "the container CAP_SYS_ADMIN"
        )
    if ask.tokens != ("all",):
        raise RequestError(
            f"{_shown(ask)} in {ask.source}: expected `all`, which means every GPU that is visible there"
        )
    return ask


def _imex_channels(request: Request, settings: Settings) -> tuple[Ask | None, tuple[str, ...]]:
    from_mounts = request.imex_mounts if settings.accept_mount_lists else None
    ask = from_mounts or request.imex_channels
    tokens = meant(ask.tokens) if ask else None
    if ask is None or not tokens:
        return None, ()
    if not settings.imex_channels:
        return None, (f"{ask.source} asks for IMEX channels, which the settings (imex_channels) give to no container",)
    if ask is request.imex_channels:
        warning = _not_counted(request, settings, ask)
        if warning:
            return None, (warning,)
        if tokens == ("all",):
            return None, (f"`all` in {ask.source} gives no IMEX channel: name the channels by their numbers",)
    numbers = dict.fromkeys(_channel(token, ask.source) for token in tokens)
    return Ask(ask.source, tuple(numbers)), ()


def _channel(token: str, source: str) -> str:
    """The number of a channel, as the field writes it: `7` or `channel7`."""
    digits = token.removeprefix("channel")
    number = digits.lstrip("0") or "0"
    # The length comes first, since Python refuses to make a number of thousands of digits.
    if not digits.isdecimal() or not digits.isascii() or len(number) > 7 or int(number) >= _CHANNELS:
        raise RequestError(f"{quoted(token)} in {source}: expected the number of an IMEX channel, 0 to {_CHANNELS - 1}")
    return number


def _extras(request: Request, settings: Settings) -> tuple[dict[str, Ask], tuple[str, ...]]:
    extras: dict[str, Ask] = {}
    warnings = []
    for name, ask in request.extras.items():
        if ask.tokens != ("enabled",):
            if ask.tokens and ask.tokens[0].lower() not in _OFF:
                warnings.append(f"{_shown(ask)} in {ask.source} asks for nothing: only `enabled` does")
            continue
        warning = _not_counted(request, settings, ask)
        if warning:
            warnings.append(warning)
        else:
            extras[name] = ask
    return extras, tuple(warnings)


def _shown(ask: Ask) -> str:
    return listed([quoted(token) for token in ask.tokens])
