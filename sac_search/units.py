"""Units of bytes, seconds and fractions, and how they are printed and read. Nothing else."""

import math
import re

KIB = 2**10
MIB = 2**20
GIB = 2**30

_FRACTION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%)?\s*")
# Below this, peaks of small models differ in the fourth digit.
_SMALL_GIB = 0.1
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B\s*", re.IGNORECASE)


def format_gib(size_bytes: float) -> str:
    """Returns `size_bytes` in GiB, with enough digits to tell two small peaks apart."""
    size_gib = size_bytes / GIB
    if abs(size_gib) >= 10:
        return f"{size_gib:z.2f} GiB"
    return f"{size_gib:z.3f} GiB"


def format_gib_up(size_bytes: float) -> str:
    """Returns `size_bytes` in GiB, rounded up: typed in again as a limit, it holds."""
    size_gib = size_bytes / GIB
    digits = 2 if size_gib >= 10 else 3 if size_gib >= _SMALL_GIB else 5
    return f"{math.ceil(size_gib * 10**digits) / 10**digits:.{digits}f} GiB"


def format_mib(size_bytes: float) -> str:
    """Returns `size_bytes` in MiB."""
    return f"{size_bytes / MIB:z.1f} MiB"


def format_seconds(seconds: float) -> str:
    """Returns a step time: milliseconds under ten seconds, seconds above."""
    if seconds < 10:
        return f"{seconds * 1e3:z.1f} ms"
    return f"{seconds:.2f} s"


def format_duration(seconds: float) -> str:
    """Returns an elapsed time as people read it: `42s`, `3m 05s`, `2h 07m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_percent(fraction: float) -> str:
    """Returns a fraction as a signed percentage: `+4.1%`."""
    return f"{fraction * 100:+z.1f}%"


def parse_bytes(text: str) -> int | None:
    """Returns the bytes of `8GB` (10^9 each) or `22 GiB` (2^30 each); None if it is no size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    power = " KMGT".index(match[2].upper()) if match[2] else 0
    is_binary = match[3] is not None
    unit_bytes = (1024 if is_binary else 1000) ** power
    return round(float(match[1]) * float(unit_bytes))


def parse_memory(text: str) -> int | None:
    """Returns the bytes of `18` (GiB, as budgets are) or of a size; None if it is neither."""
    if _NUMBER.fullmatch(text):
        return gib_to_bytes(float(text))
    return parse_bytes(text)


def parse_fraction(text: str) -> float | None:
    """Returns the fraction that `5%` or `0.05` is; None if it is neither, or below zero."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    return float(match[1]) / 100 if match[2] else float(match[1])


def gib_to_bytes(size_gib: float) -> int:
    """Returns bytes for a size in GiB (2**30 bytes, as torch and nvidia-smi count)."""
    return round(size_gib * GIB)
