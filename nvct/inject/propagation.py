"""Which mounts of a container send what is mounted on them on to the host (mount_namespaces(7), "shared").

A volume with propagation `rshared` (Kubernetes: Bidirectional) does. There is no way to mount on such a mount for the
container alone, and what reached the host would stay there when the container is gone.
"""

from __future__ import annotations

import os

from nvct.errors import InjectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.rootfs import ConfinedRoot


def shared_mounts(pid: int) -> frozenset[str]:
    """The ids of the shared mounts that the process sees; none under the usual propagation. Raises OSError."""
    descriptor = os.open(f"/proc/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b"".join(iter(lambda: os.read(descriptor, 1 << 16), b"")).decode(errors="replace")
    finally:
        os.close(descriptor)
    if " shared:" not in text:
        return frozenset()
    # The optional fields stand between the mount's options and a lone dash; paths have their blanks escaped.
    heads = (line.partition(" - ")[0] for line in text.split("\n"))
    return frozenset(head.split(" ", 1)[0] for head in heads if " shared:" in head)


def check_stays_inside(place: int, path: str, root: ConfinedRoot, shared: frozenset[str]) -> None:
    """Raise InjectionError when what is mounted on the descriptor `place` would appear on the host."""
    if shared and mount_id(place, root) in shared:
        raise InjectionError(
            f"{path} lies on a volume with shared propagation, so what is mounted there would appear on the host: "
            "give the volume the propagation rslave (Kubernetes: HostToContainer), or another place"
        )


def mount_id(descriptor: int, root: ConfinedRoot) -> str:
    """The id of the mount that the descriptor lies on, as mountinfo has it."""
    information = os.open(f"../fdinfo/{descriptor}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=root.own_descriptors)
    try:
        text = os.read(information, 1 << 12).decode()
    finally:
        os.close(information)
    return text.partition("mnt_id:")[2].split(None, 1)[0]
