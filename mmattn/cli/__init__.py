"""The command line: `demo`, `niah` and `info`. Needs the extra `demo` (click, rich, Pillow, scikit-learn)."""
