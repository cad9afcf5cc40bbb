"""Benchmarks of mmattn against its peers, on named real workloads. `python -m bench.run --help`."""

import sys
from importlib.util import find_spec

# `python -m bench.run` imports this first; as a library the modules raise their own ImportError.
if sys.argv[:1] == ["-m"] and (missing := [name for name in ("click", "rich") if find_spec(name) is None]):
    sys.exit(f"python -m bench.* needs {' and '.join(missing)}: pip install 'mmattn[bench]'")
