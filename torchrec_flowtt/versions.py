"""Import-time checks of the versions of torch, TorchRec and FBGEMM.

Each check reads installed package metadata, so it costs no import of the package it looks at, and
raises an :class:`ImportError` that names what was found and what works. The parts that need only
torch call :func:`require_torch`; ``distributed`` and ``planner`` call :func:`require_torchrec`.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from importlib import metadata

MIN_TORCH = (2, 11)
MIN_TORCHREC = (1, 6)
MAX_TESTED_TORCHREC = (1, 9)

#: TorchRec release -> (FBGEMM release, torch release) that were published together.
RELEASES: dict[str, tuple[str, str]] = {
    "1.6": ("1.6", "2.11"),
    "1.7": ("1.7", "2.12"),
    "1.8": ("1.8", "2.13"),
    "1.9": ("1.9", "2.14"),
}

#: Set to 1, TorchRec and FBGEMM may be of unlike releases; `make compat` runs tests so.
UNLIKE_RELEASES_VARIABLE = "FLOWTT_ALLOW_UNLIKE_RELEASES"

_FBGEMM_NAMES = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
_TORCHREC_NAMES = ("torchrec", "torchrec-nightly", "torchrec-nightly-cpu")


def _installed(names: tuple[str, ...]) -> tuple[str, str] | None:
    """Return (name, version) of the first installed distribution among `names`."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version string such as ``2.11.0+cu130`` or ``1.6.1``.

    Raises:
        ValueError: if the string does not start with ``<int>.<int>``.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"version {version!r} does not start with '<major>.<minor>'")
    return int(match[1]), int(match[2])


def _release_or_explain(package: str, version: str) -> tuple[int, int]:
    try:
        return release(version)
    except ValueError as error:
        raise ImportError(f"{package}: {error}. Combinations that work: {_table()}.") from None


def _table() -> str:
    rows = [f"TorchRec {t} + FBGEMM {f} + torch {c}" for t, (f, c) in RELEASES.items()]
    return "; ".join(rows)


def require_torch() -> None:
    """Check that an installed torch is recent enough for the stable-ABI library.

    Raises:
        ImportError: if torch is missing or older than 2.11.
    """
    found = _installed(("torch",))
    needed = ".".join(map(str, MIN_TORCH))
    if found is None:
        raise ImportError(
            f"torchrec-flowtt needs torch >= {needed}, and no torch is installed. "
            f"Install one, for example: pip install 'torch>={needed}'"
        )
    if _release_or_explain("torch", found[1]) < MIN_TORCH:
        raise ImportError(
            f"torchrec-flowtt needs torch >= {needed} and found torch {found[1]}. "
            f"Combinations that work: {_table()}."
        )


def require_torchrec() -> None:
    """Check TorchRec and FBGEMM, and that FBGEMM's library loads with the installed torch.

    Raises:
        ImportError: if one is missing, too old, of unlike releases, or does not load.
    """
    require_torch()
    torchrec, fbgemm = _installed(_TORCHREC_NAMES), _installed(_FBGEMM_NAMES)
    torch_version = metadata.version("torch")
    found = (
        f"found torch {torch_version}, "
        f"TorchRec {torchrec[1] if torchrec else 'not installed'}, "
        f"FBGEMM {f'{fbgemm[1]} ({fbgemm[0]})' if fbgemm else 'not installed'}"
    )
    works = f"Combinations that work: {_table()}."
    if torchrec is None or fbgemm is None:
        raise ImportError(
            f"torchrec_flowtt.distributed needs TorchRec and FBGEMM; {found}. {works}"
        )
    torchrec_release = _release_or_explain("TorchRec", torchrec[1])
    fbgemm_release = _release_or_explain("FBGEMM", fbgemm[1])
    if min(torchrec_release, fbgemm_release) < MIN_TORCHREC:
        needed = ".".join(map(str, MIN_TORCHREC))
        raise ImportError(f"TorchRec and FBGEMM must be >= {needed}; {found}. {works}")
    nightly = "nightly" in torchrec[0] or "nightly" in fbgemm[0]
    allowed = nightly or os.environ.get(UNLIKE_RELEASES_VARIABLE) == "1"
    if not allowed and torchrec_release != fbgemm_release:
        raise ImportError(f"TorchRec and FBGEMM must be of the same release; {found}. {works}")
    if torchrec_release > MAX_TESTED_TORCHREC:
        warnings.warn(
            f"torchrec-flowtt is not tested with TorchRec {torchrec[1]}; {found}. {works}",
            stacklevel=2,
        )
    try:
        importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImportError(
            f"FBGEMM does not load with the installed torch ({reason}); {found}. {works} "
            "On a machine without CUDA install fbgemm-gpu-cpu instead of fbgemm-gpu."
        ) from error
