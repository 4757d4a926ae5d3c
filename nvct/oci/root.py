"""The root folder of a container that a runtime has told of."""

from __future__ import annotations

import os

from nvct.errors import RequestError
from nvct.inject.rootfs import ConfinedRoot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.oci.state import Container


def open_root(container: Container) -> ConfinedRoot:
    """The container's root, as its process sees it. Raises RequestError."""
    pid, rootfs = container.pid, container.rootfs
    try:
        if os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino:
            raise RequestError(
                f"process {pid} has no mount namespace of its own, so all mounts would be made on the host: "
                "give the container one (`namespaces` in config.json)"
            )
        return ConfinedRoot.of_process(pid, rootfs)
    except FileNotFoundError as error:
        gone = not os.path.exists(f"/proc/{pid}")
        what = f"process {pid} is gone" if gone else f"process {pid} sees no folder {error.filename!r}"
        raise RequestError(f"{what}; expected the container's, which has not started its program yet") from None
    except OSError as error:
        raise RequestError(f"the container's root {rootfs!r} as process {pid} sees it: {error.strerror}") from None
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise RequestError(f"the container's root {rootfs!r} is no path: {error}") from None
