"""The FlashAttention-4 (CuTe DSL) backend: every import of `flash_attn` and `cutlass` stays in this folder."""
