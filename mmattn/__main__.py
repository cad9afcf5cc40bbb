"""`python -m mmattn {demo, niah, info, dflash-demo}`; `python -m mmattn COMMAND --help` lists the options of each."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f"python -m mmattn needs {' and '.join(missing)}: pip install 'mmattn[demo]'")
    from .cli.commands import cli

    cli(prog_name="python -m mmattn")


if __name__ == "__main__":
    main()
