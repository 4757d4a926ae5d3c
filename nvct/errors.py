"""Errors, by what the person who reads them must do. A message says what was found, what was expected, where, and
the next step.
"""

from __future__ import annotations


class NvctError(Exception):
    """Any failure that nvct explains in one line."""


class DriverError(NvctError):
    """The driver of this node is absent, incomplete or inconsistent: mend the node."""


class RequestError(NvctError):
    """The container asks for something that does not exist or is not allowed: change the request."""


class ChoiceError(NvctError):
    """What a command was told to make cannot be, on any node: change the command line."""


class ConfigError(NvctError):
    """A settings file is wrong: change the file."""


class InjectionError(NvctError):
    """A step in the container failed; everything done before it has been undone."""


class ContainerChanged(NvctError):
    """The container's files were changed while nvct worked on them, by something that shares them: stop that."""


class StaleInventory(NvctError):
    """The node is no longer what the inventory says: discover it again."""
