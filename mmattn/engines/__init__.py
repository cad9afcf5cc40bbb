"""From what a serving engine schedules to plans. Knows no engine; `mmattn/vllm` and `mmattn/hf/paged.py` are thin adapters over it."""

from .cache import write_pages
from .step import SplitSpanError, Step, fill_row_spans, layer_mask

__all__ = ["SplitSpanError", "Step", "fill_row_spans", "layer_mask", "write_pages"]
