"""Memory for large tensors of a CPU: kept by the process, instead of given back and asked for at every step."""

import ctypes
import os

MALLOC = "SCALESTEER_MALLOC"  # "system" leaves the allocator as it is
# Options of mallopt in malloc.h of glibc. (Its blocks of memory of their own are zeroed page by page at every use.)
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_memory() -> bool:
    """Let this process keep the memory that tensors give back, for the next ones; returns whether it is so.

    Where a step takes large tensors, the system otherwise hands out each anew, in pages that it clears first: on a CPU
    that can take as long as the step itself. Nothing is done where the C library is not glibc, or where the environment
    has SCALESTEER_MALLOC=system or glibc's own variables for it.

    Raises:
        ValueError: If SCALESTEER_MALLOC is another word than "system" or "keep".
    """
    wanted = os.environ.get(MALLOC, "") or "keep"
    if wanted not in ("keep", "system"):
        raise ValueError(f"{MALLOC} must be keep or system (got {wanted!r}).")
    own = any(name.startswith("MALLOC_") or "glibc.malloc" in value for name, value in os.environ.items())
    if wanted == "system" or own:
        return False
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, ValueError, AttributeError):  # another system or C library
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
