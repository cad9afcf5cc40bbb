"""A complete block-diffusion drafter (DFlash) in plain PyTorch on `mmattn.attention`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import attention
from ..plan import Plan
from .cache import ContiguousCache, DraftCache, Keys, PagedCache, TrainingKeys
from .config import ConfigLike, DrafterConfig
from .weights import MASK_EMBEDDING, check_tensors, load_mask_embedding, read_tensors


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first `2 * cos.shape[-1]` dims of `[B, S, heads, D]`, in halves; the rest passes."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class DraftAttention(nn.Module):
    """Projections of one layer; q and k are normalised per head and rotated, v is scaled."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = config
        self.heads, self.heads_kv, self.head_dim, self.value_scale = c.heads, c.heads_kv, c.head_dim, c.value_scale
        bias = c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, c.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, c.heads_kv * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, c.heads_kv * c.head_dim_v, bias=bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim_v, c.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(c.heads)) if c.sinks else None

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of rows `[B, S, hidden]`: `[B, S, Hkv, D]` and `[B, S, Hkv, Dv]`."""
        k = self.k_proj(x).unflatten(-1, (self.heads_kv, -1))
        v = self.v_proj(x).unflatten(-1, (self.heads_kv, -1))
        return _rotate(self.k_norm(k), cos, sin), v if self.value_scale == 1 else v * self.value_scale

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))), cos, sin)


class DraftMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Drafter(nn.Module):
    """A DFlash drafter: reads hidden states of the target, drafts N tokens in one pass.

    The context of the drafter is the target's: for every token that the target has processed, the hidden states of
    chosen layers are projected (`fc`, `hidden_norm`) and each draft layer makes K and V of them. A draft is one block
    of 1 + N rows, the embedding of the last token of the target (the bonus token) and N mask embeddings, which sees the
    context and itself through each layer's mask; rows 1..N give the tokens. Only context is kept between drafts.

    Tensors have the published names: `fc`, `hidden_norm`, `layers.{i}.(input_layernorm, post_attention_layernorm,
    self_attn.(q_proj, k_proj, v_proj, o_proj, q_norm, k_norm[, attention_sink_bias]), mlp.(gate_proj, up_proj,
    down_proj))`, `norm`, and, in checkpoints that bring their own, `embed_tokens` and `lm_head`; else the target's
    are used (`attach`).

    Args:
        config: what `DrafterConfig.read` takes.
        own_embedding, own_head: `[vocabulary, hidden]` tables of the drafter itself; needs `vocab_size`.
    """

    def __init__(self, config: ConfigLike, *, own_embedding: bool = False, own_head: bool = False) -> None:
        super().__init__()
        c = self.config = config if isinstance(config, DrafterConfig) else DrafterConfig.read(config)
        self.fc = nn.Linear(len(c.target_hidden_ids) * c.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.layers: Sequence[DraftLayer] = nn.ModuleList(DraftLayer(c) for _ in c.layers)  # type: ignore[assignment]
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        vocabulary = c.raw.get("vocab_size", 0)
        if (own_embedding or own_head) and not vocabulary:
            raise ValueError("the config lacks vocab_size, which embed_tokens and lm_head of the drafter need")
        self.embed_tokens = nn.Embedding(vocabulary, c.hidden_size) if own_embedding else None
        self.lm_head = nn.Linear(c.hidden_size, vocabulary, bias=False) if own_head else None
        self.mask_embedding: nn.Parameter | None = None
        """`[hidden]`, from a file or by training; None = the vocabulary row of the mask token."""
        # In tuples, so that the target's modules do not become the drafter's.
        self._embedding: tuple[Tensor, ...] = ()
        self._head: tuple[nn.Linear, ...] = ()
        # No buffer: `.to(bfloat16)` must not round the frequencies.
        self._inv_freq = c.inv_freq

    # Files

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Drafter:
        """Loads a checkpoint directory: `config.json`, safetensors files [and `mask_embedding.pt`].

        Strict: tensors that are missing, unknown or of a wrong shape raise one `ValueError` that lists them all.
        `dtype` is that of the parameters; by default that of the checkpoint.
        """
        path = Path(path)
        config = DrafterConfig.read(path)
        found = read_tensors(path)
        with torch.device("meta"):
            drafter = cls(config, own_embedding="embed_tokens.weight" in found, own_head="lm_head.weight" in found)
        check_tensors(path, found, drafter.state_dict())
        drafter.load_state_dict(found, assign=True)
        mask = load_mask_embedding(path, mask_token_id=config.mask_token_id, hidden_size=config.hidden_size)
        if mask is not None:
            drafter.mask_embedding = nn.Parameter(mask)
        if dtype is None:
            dtype = next(iter(found.values())).dtype
        return drafter.to(device=device, dtype=dtype)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes what `from_pretrained` reads."""
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.contiguous() for name, x in self.state_dict().items() if name != "mask_embedding"}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(self.config.raw, indent=2, sort_keys=True) + "\n")
        if self.mask_embedding is not None:
            held = {"mask_token_id": self.config.mask_token_id, "embedding": self.mask_embedding.detach().cpu()}
            torch.save(held, path / MASK_EMBEDDING[0])

    # The target

    def attach(self, target: Any) -> Drafter:
        """Checks the drafter against a transformers causal LM and takes its embedding and head where it has none.

        Raises `ValueError` for a target without the layers that the drafter reads, or of another hidden size.
        """
        c, text = self.config, target.config.get_text_config()
        if max(c.target_hidden_ids) > text.num_hidden_layers:
            raise ValueError(
                f"the drafter reads the target's hidden state {max(c.target_hidden_ids)} (after that many layers), "
                f"but the target has {text.num_hidden_layers} layers"
            )
        known = c.raw.get("num_target_layers")
        if known is not None and known != text.num_hidden_layers:
            raise ValueError(f"num_target_layers is {known}, but the target has {text.num_hidden_layers} layers")
        if text.hidden_size != c.target_hidden_size:
            raise ValueError(
                f"the drafter was made for targets of hidden size {c.target_hidden_size}, "
                f"but the target's is {text.hidden_size}"
            )
        if self.embed_tokens is None:
            table = target.get_input_embeddings().weight
            if table.shape[1] != c.hidden_size:
                raise ValueError(
                    f"the drafter has hidden size {c.hidden_size} and no embedding of its own, "
                    f"but the target's embedding has {table.shape[1]}"
                )
            if self.mask_embedding is None and c.mask_token_id >= table.shape[0]:
                raise ValueError(
                    f"mask_token_id {c.mask_token_id} is outside the target's vocabulary of {table.shape[0]}, "
                    "and there is no mask embedding"
                )
            self._embedding = (table,)
        if self.lm_head is None:
            self._head = (target.get_output_embeddings(),)
        return self

    def _table(self) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens.weight
        if not self._embedding:
            raise ValueError("the drafter has no embedding yet; call attach(target)")
        return self._embedding[0]

    def embed(self, bonus: Tensor, draft_tokens: int | None = None) -> Tensor:
        """The block of each sequence: `bonus` `[B]` and N mask tokens, `[B, 1 + N, hidden]`."""
        c, table = self.config, self._table()
        mask: Tensor = table[c.mask_token_id] if self.mask_embedding is None else self.mask_embedding
        n = c.draft_tokens if draft_tokens is None else draft_tokens
        # The target may emit the mask token itself; its row of the vocabulary is as untrained there.
        first = torch.where((bonus == c.mask_token_id)[:, None], mask, F.embedding(bonus, table))
        block = torch.cat([first[:, None], mask.expand(bonus.shape[0], n, -1)], dim=1)
        return (block * c.input_embedding_scale).to(self.fc.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary of draft hidden states `[..., hidden]`."""
        if self.lm_head is None and not self._head:
            raise ValueError("the drafter has no head yet; call attach(target)")
        c, head = self.config, self.lm_head if self.lm_head is not None else self._head[0]
        logits = head(hidden.to(head.weight.dtype)) * c.output_multiplier
        if c.final_logit_softcapping is not None:
            logits = c.final_logit_softcapping * torch.tanh(logits / c.final_logit_softcapping)
        return logits

    # Context and drafts

    def new_cache(
        self, batch_size: int, capacity: int, *, kind: str = "paged", page_size: int = 16, lookahead: int | None = None
    ) -> DraftCache:
        """An empty cache for `capacity` context rows per sequence, `kind` "paged" or "contiguous"."""
        c, weight = self.config, self.fc.weight
        if kind not in ("paged", "contiguous"):
            raise ValueError(f"cache kind must be 'paged' or 'contiguous', got {kind!r}")
        sizes: dict[str, Any] = dict(
            batch_size=batch_size, capacity=capacity, lookahead=lookahead or c.block_size, heads_kv=c.heads_kv,
            head_dim=c.head_dim, head_dim_v=c.head_dim_v, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        return (
            PagedCache(c.layers, page_size=page_size, **sizes)
            if kind == "paged"
            else ContiguousCache(c.layers, **sizes)
        )

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[B, S, 1, rotary_dim / 2]` for absolute positions; those past the longest trained one stay at it."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        compute = torch.promote_types(dtype, torch.float32)
        angle = positions.clamp(max=self.config.max_position_embeddings - 1).to(compute)[
            ..., None, None
        ] * self._inv_freq.to(compute)
        factor = self.config.rotary_factor
        return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)

    def context(self, hidden: Tensor) -> Tensor:
        """Context rows `[B, S, hidden]` of the target's hidden states, `[B, S, layers x target hidden]`."""
        if hidden.shape[-1] != self.fc.in_features:
            c = self.config
            raise ValueError(
                f"the target's hidden states must have {len(c.target_hidden_ids)} x {c.target_hidden_size} "
                f"= {self.fc.in_features} features, got {hidden.shape[-1]}"
            )
        return self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))

    @torch.no_grad()
    def extend(self, hidden: Tensor, counts: Sequence[int], cache: DraftCache) -> None:
        """Adds what the target has processed to the context.

        Args:
            hidden: `[B, S, layers x target hidden]`, from position `cache.counts[b]` on.
            counts: how many of the S rows of each sequence are valid; the rest (rejected drafts, padding) is dropped.
        """
        rows = hidden.shape[1]
        if max(counts) > rows:
            raise ValueError(f"counts go up to {max(counts)}, but hidden holds {rows} rows per sequence")
        x = self.context(hidden)
        cache.advance(counts)
        cos, sin = self._cos_sin(cache.start[:, None] + torch.arange(rows, device=x.device), x.dtype)
        slots = cache.context_slots(rows)
        for i, layer in enumerate(self.layers):
            cache.write(i, slots[self.config.layers[i]], *layer.self_attn.keys(x, cos, sin))

    def forward(self, block: Tensor, keys: Keys, *, causal: Tensor | None = None, backend: str = "auto") -> Tensor:
        """Hidden states of a block: `[B, rows, hidden]` embeddings in, normalised hidden states out.

        Args:
            block: see `embed`.
            keys: a cache from `new_cache`, or `TrainingKeys`.
            causal: int32 `[B]`, overrides every layer's causality per sequence (non-zero = causal).
        """
        rows = block.shape[1]
        plans: dict[Any, Plan] = {kind: keys.plan(kind, rows, causal) for kind in dict.fromkeys(self.config.layers)}
        cos, sin = self._cos_sin(keys.positions(rows), block.dtype)
        x = block
        for i, (layer, kind) in enumerate(zip(self.layers, self.config.layers)):
            h, heads = layer.input_layernorm(x), layer.self_attn
            k, v = keys.update(i, *heads.keys(h, cos, sin))
            o = attention(
                heads.queries(h, cos, sin), k, v, plans[kind], sinks=heads.attention_sink_bias, backend=backend
            )
            x = x + heads.o_proj(o.flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    @torch.no_grad()
    def draft(
        self, bonus: Tensor, cache: DraftCache, *, draft_tokens: int | None = None, causal: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:  # fmt: skip
        """The N most likely tokens after `bonus` `[B]`, `[B, N]`. Leaves the context as it is; reads nothing back."""
        hidden = self(self.embed(bonus, draft_tokens), cache, causal=causal, backend=backend)
        return self.logits(hidden[:, 1:]).argmax(-1)

    def training_keys(self, hidden: Tensor, sequences: Sequence[int], anchors: Sequence[int]) -> TrainingKeys:
        """Differentiable keys for blocks at `anchors` of whole `sequences`; `hidden` as in `extend`, from row 0."""
        x = self.context(hidden)
        cos, sin = self._cos_sin(torch.arange(x.shape[1], device=x.device)[None], x.dtype)
        context = [layer.self_attn.keys(x, cos, sin) for layer in self.layers]
        return TrainingKeys(context, sequences, anchors, self.config.block_size)


class GraphedDraft:
    """`Drafter.draft` as a CUDA graph: the `draft` argument of `generate`, for a batch of any lengths.

    Captured at the first call with a cache, and anew for another cache. The graph plans, drafts and writes with the
    lengths and page tables that the cache holds when it is replayed.
    """

    def __init__(self, drafter: Drafter, *, draft_tokens: int | None = None, backend: str = "auto") -> None:
        self.drafter = drafter
        self._draft = partial(drafter.draft, draft_tokens=draft_tokens, backend=backend)
        self._cache: DraftCache | None = None

    @torch.no_grad()
    def __call__(self, bonus: Tensor, cache: DraftCache) -> Tensor:
        """Tokens `[B, N]` after `bonus` `[B]`."""
        if cache is not self._cache:
            self._capture(bonus, cache)
        self._bonus.copy_(bonus)
        self._graph.replay()
        return self._tokens.clone()

    def _capture(self, bonus: Tensor, cache: DraftCache) -> None:
        if not bonus.is_cuda:
            raise ValueError(f"a CUDA graph needs tensors on a GPU, got bonus on {bonus.device}")
        self._bonus, self._graph = bonus.clone(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(bonus.device)
        side.wait_stream(torch.cuda.current_stream(bonus.device))
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles the kernels
                self._draft(self._bonus, cache)
        torch.cuda.current_stream(bonus.device).wait_stream(side)
        with torch.cuda.graph(self._graph):
            self._tokens = self._draft(self._bonus, cache)
        self._cache = cache
