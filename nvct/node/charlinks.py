"""Links such as /dev/char/195:0, by which systemd finds the devices that it shall allow: udev makes none for nodes of
the driver, which it does not know.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvct.model import DeviceEdit


def link_by_number(devices: Iterable[DeviceEdit], folder: str) -> tuple[str, ...]:
    """Make the links that are missing in the folder. Returns warnings."""
    if not os.path.isdir(folder):
        return ()  # without udev there is no systemd either
    nearby = f"{os.path.dirname(folder)}/"
    for device in devices:
        text = device.source
        if text.startswith(nearby):
            text = f"../{text[len(nearby) :]}"
        try:
            os.symlink(text, f"{folder}/{device.major}:{device.minor}")
        except FileExistsError:
            continue
        except OSError as error:
            # An ordinary user's runtime cannot, and needs none: it cannot have devices allowed either.
            return (f"{folder}: {error.strerror}: systemd may not allow {device.path}",) if os.geteuid() == 0 else ()
    return ()
