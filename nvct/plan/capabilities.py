"""NVIDIA_DRIVER_CAPABILITIES: which capabilities a container has, and which classes of driver files each brings."""

from __future__ import annotations

from nvct.errors import RequestError
from nvct.model import Request
from nvct.plan.words import quoted
from nvct.settings import CAPABILITIES, Settings

_DEFAULT = ("compute", "utility")

# Classes of files that a capability brings. The codecs of `video` run on CUDA, so it brings the compute libraries too;
# `display` is graphics with leave to set modes, and what an X server needs; `compat32` brings nothing itself but admits
# 32-bit copies.
_LIBRARY_CLASSES = {
    "compute": ("compute",),
    "utility": ("utility",),
    "video": ("video", "compute"),
    "compat32": (),
    "ngx": ("ngx",),
    "graphics": ("graphics",),
    "display": ("graphics", "display"),
}


def capabilities_of(request: Request, settings: Settings) -> tuple[str, ...]:
    """The capabilities that the container gets, in the order of settings.CAPABILITIES.

    Raises RequestError for a name that does not exist or that the settings do not support.
    """
    supported = settings.supported_capabilities
    asked = request.capabilities
    if ("all" in asked.tokens) if asked else request.legacy_cuda:
        # An image from before the variable was made for a driver that came whole.
        return tuple(name for name in CAPABILITIES if name in supported)
    if asked is None or not asked.tokens:
        return tuple(name for name in _DEFAULT if name in supported)
    for token in asked.tokens:
        if token not in supported:
            raise RequestError(f"{quoted(token)} in {asked.source}: {_why_not(token, supported)}")
    return tuple(name for name in CAPABILITIES if name in asked.tokens)


def _why_not(token: str, supported: tuple[str, ...]) -> str:
    allowed = f"allowed are {', '.join((*supported, 'all'))}"
    if token in CAPABILITIES:
        return f"this node's settings (supported_capabilities) do not allow this driver capability; {allowed}"
    if token.lower() in (*CAPABILITIES, "all"):
        return f"driver capabilities are written in lower case; {allowed}"
    return f"no such driver capability; {allowed}"


def library_classes(capabilities: tuple[str, ...]) -> dict[str, str]:
    """The library classes that these capabilities bring, each with the capability that is the reason."""
    classes: dict[str, str] = {}
    for capability in capabilities:
        for name in _LIBRARY_CLASSES[capability]:
            classes.setdefault(name, capability)
    return classes
