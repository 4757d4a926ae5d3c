"""The error of the simulation."""

from __future__ import annotations

from nvct.errors import NvctError


class SimError(NvctError):
    """This simulated node cannot be made here: change what was asked for, or the machine it is made on."""
