"""Which of the devices that a container asks for are for CDI specs to say, and which for nvct's own plan.

For a runtime, which can do either. Names of the kind nvidia.com/gpu are planned, since a plan is never older than the
node, and checks what images require of the driver; specs of this node say what other makers' devices need.
"""

from __future__ import annotations

from nvct.model import Ask, Request
from nvct.plan.accept import accept
from nvct.plan.devices import CDI_KIND
from nvct.record import record, replace
from nvct.settings import AUTO, CDI, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


@record
class Shares:
    """`names`: qualified names of CDI devices. `request`: what is left for a plan, None for nothing."""

    names: tuple[str, ...] = ()
    request: Request | None = None
    warnings: tuple[str, ...] = ()


def share_out(request: Request, settings: Settings) -> Shares:
    """By the setting runtime_mode: all to specs in the mode CDI, other makers' names in AUTO, none in others.

    Annotations name CDI devices and count in these two modes only. Raises RequestError as `accept`.
    """
    if settings.runtime_mode not in (AUTO, CDI):
        return Shares(request=replace(request, annotations={}))
    accepted = accept(request, settings)
    if accepted.devices is None:
        return Shares(request=request)
    tokens = accepted.devices.tokens
    if settings.runtime_mode == CDI:
        names = (_qualified(token, settings.cdi_default_kind) for token in tokens or ("none",))
        return Shares(tuple(dict.fromkeys(names)), warnings=accepted.warnings)
    foreign = tuple(dict.fromkeys(token for token in tokens if is_foreign(token)))
    if foreign and set(tokens) == set(foreign):
        return Shares(foreign, warnings=accepted.warnings)
    return Shares(foreign, _without(request, set(foreign)) if foreign else request)


def other_makers(request: Request, settings: Settings) -> Shares:
    """What of a runtime's request is for the CDI specs of other makers, and what is about this driver, be it looked up
    or planned. Raises RequestError as `accept`.
    """
    mode = AUTO if settings.runtime_mode == CDI else settings.runtime_mode
    return share_out(request, replace(settings, runtime_mode=mode))


def is_foreign(token: str) -> bool:
    """Whether it is the qualified name of another maker's device."""
    kind, equals, _ = token.partition("=")
    return bool(equals) and "/" in kind and kind != CDI_KIND


def names_foreign(request: Request) -> bool:
    """Whether the request names such a device anywhere, so that it may be one that needs nothing of this driver."""
    asks = (request.devices, request.mount_list, *request.annotations.values(), *request.swarm.values())
    return any(is_foreign(token) for ask in asks if ask for token in ask.tokens)


def _qualified(token: str, kind: str) -> str:
    before, equals, _ = token.partition("=")
    return token if equals and "/" in before else f"{kind}={token}"


def _without(request: Request, names: set[str]) -> Request:
    """The request as if nobody had named these devices."""

    def kept(ask: Ask | None) -> Ask | None:
        return replace(ask, tokens=tuple(token for token in ask.tokens if token not in names)) if ask else None

    def all_kept(asks: Iterable[tuple[str, Ask]]) -> dict[str, Ask]:
        return {name: ask for name, old in asks if (ask := kept(old)) and ask.tokens}

    return replace(
        request,
        devices=kept(request.devices),
        mount_list=kept(request.mount_list),
        annotations=all_kept(request.annotations.items()),
        swarm=all_kept(request.swarm.items()),
    )
