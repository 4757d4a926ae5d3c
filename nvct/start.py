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
import time
from _frozen_importlib_external import MAGIC_NUMBER  # importlib takes long

from nvct.trust import why_code_is_unsafe, why_compiled_code_is_unsafe, why_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import NoReturn

    # Path, size, mtime and ctime of a source, as `why_code_is_unsafe` gives them.
    Version = tuple[str, int, int, int]
    # Name, file, whether it is a package, and code.
    Module = tuple[str, str, bool, CodeType]


# Nobody takes so long to compile the code.
_LONGEST_S = 60

# By program, the modules that it needs with all that they import; the first has its `main`.
_PROGRAMS = {
    "hook": ("nvct.oci.hook", "nvct.oci.give"),
    "cdi-hook": ("nvct.oci.finish",),
    "runtime": ("nvct.oci.runtime", "nvct.oci.create"),
}


def start(tree: str, arguments: list[str], mask: int, program: str = "hook") -> NoReturn:
    """Be the program, out of the code in `tree`, the resolved path of the folder that holds `nvct`.

    `mask` is the umask that the program shall have once its code is loaded.
    """
    gc.disable()  # saves a millisecond: nothing of a process that lives for ten is worth collecting
    versions: list[Version] = []
    try:
        reason = why_code_is_unsafe(tree, versions)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}; it cannot be seen who can have written nvct's code there"
    if reason:
        sys.exit(f"nvct: not run: {reason}")
    names = _PROGRAMS[program]
    load(tree, program, versions, names)
    os.umask(mask)
    # Not sys.exit: tidying up a process whose work is done would only take time, and could fail on a closed descriptor.
    os._exit(sys.modules[names[0]].main(arguments))


def load(tree: str, program: str, versions: list[Version], names: tuple[str, ...]) -> None:
    """Have the modules of these names and all that they import loaded, out of the program's file where there is one."""
    path = f"{tree}/nvct/__pycache__/{program}.{sys.implementation.cache_tag}.code"
    modules = _read(path, versions)
    if modules is not None:
        _run(modules)
        return
    descriptor = _begin(path)
    if descriptor >= 0:
        # From the sources alone: Python's own compiled files are believed for their time and size, and nobody has
        # looked who wrote them.
        sys.dont_write_bytecode = True
        sys.pycache_prefix = "/nowhere"
    else:
        reason = why_compiled_code_is_unsafe(tree)
        if reason:
            sys.exit(f"nvct: not run: {reason}")
    for name in names:
        __import__(name)
    if descriptor >= 0:
        _write(descriptor, path, versions)


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


def _begin(path: str) -> int:
    """A descriptor of the new file, to be written beside the old one, or -1: another start is at it, or nobody can
    write there, so that every start takes longer, and that is all.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(f"{path}.new", flags, 0o600)
    except FileExistsError:
        _remove_abandoned(f"{path}.new")
    except OSError:
        pass
    return -1


def _remove_abandoned(path: str) -> None:
    """Have the next start write the file that one which was killed has left."""
    try:
        if time.time() - os.lstat(path).st_mtime > _LONGEST_S:
            os.unlink(path)
    except OSError:
        pass


def _write(descriptor: int, path: str, versions: list[Version]) -> None:
    # importlib moves each module to the end of sys.modules when it is complete.
    names = [name for name in sys.modules if name.startswith("nvct.") and name not in ("nvct.trust", __name__)]
    try:
        content = marshal.dumps((MAGIC_NUMBER, versions, list(map(_module, names))))
        os.write(descriptor, content)  # half of it, where the disk is full, cannot be read back
        os.fchmod(descriptor, 0o644)
        os.rename(f"{path}.new", path)
    except OSError:
        os.unlink(f"{path}.new")
    finally:
        os.close(descriptor)


def _module(name: str) -> Module:
    module = sys.modules[name]
    loader = module.__spec__.loader  # type: ignore[union-attr]
    return name, str(module.__file__), hasattr(module, "__path__"), loader.get_code(name)  # type: ignore[union-attr]
