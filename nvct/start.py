"""How nvct's programs for engines start: look who can have written the code, then load it, and out of one file where
there is one.

To find and open fifty modules one by one takes as long as to start Python. The file beside Python's own compiled ones,
`nvct/__pycache__/<program>.<tag>.code`, holds the same as those, with the version of every source looked at. Where
it is absent, damaged, of another version or somebody else's, the modules are imported as usual, and it is written for
the next start.
"""

from __future__ import annotations

import gc
import marshal
import os
import sys
from _frozen_importlib_external import MAGIC_NUMBER  # importlib takes long

from nvct.trust import why_code_is_unsafe, why_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import NoReturn

    # Path, size, mtime and ctime of a source, as `why_code_is_unsafe` gives them.
    Version = tuple[str, int, int, int]
    # Name, file, whether it is a package, and code.
    Module = tuple[str, str, bool, CodeType]


# By program, the modules that it needs with all that they import; the first has its `main`.
_PROGRAMS = {
    "hook": ("nvct.oci.hook", "nvct.oci.give"),
    "cdi-hook": ("nvct.oci.finish",),
    "runtime": ("nvct.oci.runtime", "nvct.oci.create"),
}


def start(tree: str, arguments: list[str], program: str = "hook") -> NoReturn:
    """Be the program, out of the code in `tree`, the resolved path of the folder that holds `nvct`."""
    gc.disable()  # saves a millisecond: nothing of a process that lives for ten is worth collecting
    versions: list[Version] = []
    try:
        reason = why_code_is_unsafe(tree, versions)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}; it cannot be seen who can have written nvct's code there"
    if reason:
        sys.exit(f"nvct: not run: {reason}")
    names = _PROGRAMS[program]
    load(f"{tree}/nvct/__pycache__/{program}.{sys.implementation.cache_tag}.code", versions, names)
    # Not sys.exit: tidying up a process whose work is done would only take time, and could fail on a closed descriptor.
    os._exit(sys.modules[names[0]].main(arguments))


def load(path: str, versions: list[Version], names: tuple[str, ...]) -> None:
    """Have the modules of these names and all that they import loaded; `path` is the file."""
    modules = _read(path, versions)
    if modules is not None:
        _run(modules)
        return
    for name in names:
        __import__(name)
    try:  # noqa: SIM105  # contextlib is slow to import
        _write(path, versions)
    except OSError:
        pass  # where nobody can write to the tree every start takes longer, and that is all


def _read(path: str, versions: list[Version]) -> list[Module] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if why_unsafe(path, status):
            return None
        content = os.read(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    try:
        magic, found, modules = marshal.loads(content)
    except (ValueError, EOFError, TypeError):
        return None
    return modules if (magic, found) == (MAGIC_NUMBER, versions) else None


def _run(modules: list[Module]) -> None:
    """Run the modules in the order in which they were complete, so that each finds what it imports."""
    kind = type(sys)
    for name, file, is_package, _ in modules:
        module = sys.modules[name] = kind(name)
        module.__file__ = file
        if is_package:
            module.__path__ = [os.path.dirname(file)]
    for name, _, _, code in modules:
        module = sys.modules[name]
        exec(code, module.__dict__)
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)


def _write(path: str, versions: list[Version]) -> None:
    beside = f"{path}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(beside, flags, 0o600)  # first of all: where it is refused, nothing need be gathered
    try:
        # importlib moves each module to the end of sys.modules when it is complete.
        names = [name for name in sys.modules if name.startswith("nvct.") and name not in ("nvct.trust", __name__)]
        content = marshal.dumps((MAGIC_NUMBER, versions, list(map(_module, names))))
        os.write(descriptor, content)  # half of it, where the disk is full, cannot be read back
        os.fchmod(descriptor, 0o644)
        os.rename(beside, path)
    except OSError:
        os.unlink(beside)
        raise
    finally:
        os.close(descriptor)


def _module(name: str) -> Module:
    module = sys.modules[name]
    loader = module.__spec__.loader  # type: ignore[union-attr]
    return name, str(module.__file__), hasattr(module, "__path__"), loader.get_code(name)  # type: ignore[union-attr]
