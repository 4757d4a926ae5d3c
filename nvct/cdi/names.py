"""CDI's names: `vendor/class=device`, of which `vendor/class` is a kind (CDI specification, "Kind" and "Name")."""

from __future__ import annotations

import re

# The vendors of the kinds that nvct writes; the second one's device is not for everybody.
VENDOR = "nvidia.com"
MANAGEMENT_VENDOR = f"management.{VENDOR}"
OWN_VENDORS = (VENDOR, MANAGEMENT_VENDOR)

# Each begins with a letter, a device since 0.5.0 also with a digit, and ends with a letter or digit.
_VENDOR = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?", re.ASCII)
_CLASS = _VENDOR
_DEVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)


def is_vendor(text: str) -> bool:
    return bool(_VENDOR.fullmatch(text))


def is_class(text: str) -> bool:
    return bool(_CLASS.fullmatch(text))


def is_kind(text: str) -> bool:
    vendor, slash, name = text.partition("/")
    return bool(slash) and is_vendor(vendor) and is_class(name)


def is_device(text: str) -> bool:
    return bool(_DEVICE.fullmatch(text))


def split(name: str) -> tuple[str, str] | None:
    """The kind and the device of a qualified name; None for anything else."""
    kind, equals, device = name.partition("=")
    return (kind, device) if equals and is_kind(kind) and is_device(device) else None
