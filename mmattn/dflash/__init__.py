"""DFlash block-diffusion drafters: a checkpoint's configuration as `mmattn` masks, and a complete drafter."""

from .config import DrafterConfig, mask_token_id, target_hidden_ids
from .drafter import Drafter, GraphedDraft
from .generate import Generation, generate
from .layers import resolve_layers
from .sampling import Sampling
from .target import HiddenTaps
from .weights import load_mask_embedding, shard_sinks

__all__ = [
    "Drafter",
    "DrafterConfig",
    "Generation",
    "GraphedDraft",
    "HiddenTaps",
    "Sampling",
    "generate",
    "load_mask_embedding",
    "mask_token_id",
    "resolve_layers",
    "shard_sinks",
    "target_hidden_ids",
]
