"""The releases of transformers that this integration is for; importing it refuses older ones."""

from __future__ import annotations

import inspect
import logging
import re

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("mmattn.hf needs transformers: pip install 'mmattn[hf]'", name="transformers") from None

log = logging.getLogger("mmattn.hf")

TESTED = (5, 10), (5, 23)
"""The oldest and the newest release of transformers that the tests were run with."""

_OLDEST, _NEWEST = (".".join(map(str, version)) for version in TESTED)


def _found() -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])


def refuse_older() -> None:
    """Raises `ImportError` with a transformers before `TESTED`, or a development version without its last changes."""
    older = _found() < TESTED[0]
    if not older:
        from transformers import masking_utils  # the oldest ones have none

        older = "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters
    if older:
        raise ImportError(
            f"mmattn.hf needs transformers >= {_OLDEST}, found {transformers.__version__} (tested: {_OLDEST} to {_NEWEST}): "
            f"pip install 'transformers>={_OLDEST},<6'",
            name="transformers",
        )


def warn_of_newer() -> None:
    """Logs that this transformers came out after `TESTED`."""
    if _found() > TESTED[1]:
        log.warning(
            "transformers %s is newer than what mmattn.hf was tested with (%s to %s). MMATTN_DEBUG=1 compares its masks",
            transformers.__version__, _OLDEST, _NEWEST,
        )  # fmt: skip


refuse_older()
