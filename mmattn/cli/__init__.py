"""The command line. Needs the extra `demo` (click, rich, Pillow, scikit-learn); the model of `demo` needs `hf` too."""
