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
from .config import DrafterConfig
from .fields import ConfigLike
from .sampling import Sampling
from .target import SharedModules
from .weights import (
    MASK_EMBEDDING,
    check_tensors,
    draft_ids,
    load_mask_embedding,
    mask_embedding_file,
    read_tensors,
    tensor_names,
)


class DraftAttention(nn.Module):
    """Projections of one layer; q and k are normalised per head and rotated, v is scaled."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = config
        self.heads, self.heads_kv, self.value_scale, self.rope = c.heads, c.heads_kv, c.value_scale, c.rope
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
        return self.rope.rotate(self.k_norm(k), cos, sin), v if self.value_scale == 1 else v * self.value_scale

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rope.rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))), cos, sin)


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
    are used (`attach`). A drafter for part of the vocabulary (`draft_vocab_size`) has `d2t` too: token `j` of its head is
    token `j + d2t[j]` of the target.

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
        vocabulary = c.vocab_size or 0
        if (own_embedding or own_head) and not vocabulary:
            raise ValueError("the config lacks vocab_size, which embed_tokens and lm_head of the drafter need")
        if c.draft_vocab_size is not None and not own_head:
            raise ValueError(
                f"draft_vocab_size {c.draft_vocab_size} is not vocab_size {vocabulary}, "
                "so the drafter needs an lm_head of its own"
            )
        self.embed_tokens = nn.Embedding(vocabulary, c.hidden_size) if own_embedding else None
        head = c.draft_vocab_size or vocabulary
        self.lm_head = nn.Linear(c.hidden_size, head, bias=False) if own_head else None
        self.d2t: Tensor | None
        self.register_buffer("d2t", None if c.draft_vocab_size is None else torch.zeros(head, dtype=torch.int64))
        self.mask_embedding: nn.Parameter | None = None
        """`[hidden]`, from a file or by training; None = the vocabulary row of the mask token."""
        # In a tuple, so that the target's modules do not become the drafter's.
        self._target: tuple[SharedModules, ...] = ()
        # No buffer: `.to(bfloat16)` must not round the frequencies.
        self._inv_freq = c.rope.inv_freq

    # Files

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, target: Any = None, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, sliding_causal: bool | None = None,
        target_final_norm: bool | None = None,
    ) -> Drafter:  # fmt: skip
        """Loads a checkpoint directory: `config.json`, safetensors files [and `mask_embedding.pt`].

        Strict: tensors that are missing, unknown or of a wrong shape raise one `ValueError` that lists them all.

        Args:
            path: the directory.
            target: the transformers model to attach to, or its config. A drafter for another target is refused before
                any tensor is read.
            dtype: of the parameters; by default that of the checkpoint.
            device: of the parameters.
            sliding_causal, target_final_norm: see `DrafterConfig.read`.
        """
        path = Path(path)
        config = DrafterConfig.read(path, sliding_causal=sliding_causal, target_final_norm=target_final_norm)
        is_model = isinstance(target, nn.Module)
        if target is not None:
            own_mask = mask_embedding_file(path) is not None
            described: Any = target.config if is_model else target
            own_tables = bool({"embed_tokens.weight", "lm_head.weight"} & tensor_names(path))
            name = type(target).__name__ if is_model else None
            config.check_target(described, name=name, own_mask=own_mask, own_tables=own_tables)
        found = read_tensors(path)
        t2d = found.pop("t2d", None) if config.draft_vocab_size is not None else None
        with torch.device("meta"):
            drafter = cls(config, own_embedding="embed_tokens.weight" in found, own_head="lm_head.weight" in found)
        check_tensors(path, found, drafter.state_dict())
        if drafter.d2t is not None:
            draft_ids(found["d2t"], config.vocab_size or 0, t2d)
        drafter.load_state_dict(found, assign=True)
        mask = load_mask_embedding(path, mask_token_id=config.mask_token_id, hidden_size=config.hidden_size)
        if mask is not None:
            drafter.mask_embedding = nn.Parameter(mask)
        if dtype is None:
            dtype = drafter.fc.weight.dtype
        drafter = drafter.to(device=device, dtype=dtype)
        return drafter.attach(target) if is_model else drafter

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

        The embedding is used as the target uses it, with the scale that Gemma's modules put on their rows, the head with
        the target's `final_logit_softcapping` unless the drafter's config says its own.

        Raises `ValueError` for a drafter that was made for another target, naming both values.
        """
        c = self.config
        c.check_target(
            target.config, name=type(target).__name__, own_mask=self.mask_embedding is not None,
            own_tables=self.embed_tokens is not None or self.lm_head is not None,
        )  # fmt: skip
        shared = SharedModules.of(target)
        if self.embed_tokens is None:
            if shared.hidden_size != c.hidden_size:
                raise ValueError(
                    f"the drafter has hidden size {c.hidden_size} and no embedding of its own, "
                    f"but the target's embedding has {shared.hidden_size}"
                )
            shared.check_scale(c.input_embedding_scale)
        elif c.input_embedding_scale is None and shared.embedding_scale != 1:
            raise ValueError(
                f"the drafter brings its own embedding, but {type(target).__name__} scales its rows by "
                f"{shared.embedding_scale:g}; say input_embedding_scale in the drafter's config (1 = not scaled)"
            )
        if self.lm_head is None and not self._head_is_embedding:
            shared.check_head(c.hidden_size)
        self._target = (shared,)
        return self

    @property
    def _head_is_embedding(self) -> bool:
        return self.embed_tokens is not None and self.lm_head is None and self.config.tied_head

    def _shared(self, what: str) -> SharedModules:
        if not self._target:
            raise ValueError(f"the drafter has no {what} yet; call attach(target)")
        return self._target[0]

    def embed(self, bonus: Tensor, draft_tokens: int | None = None) -> Tensor:
        """The block of each sequence: `bonus` `[B]` and N mask tokens, `[B, 1 + N, hidden]`."""
        c = self.config
        n = c.draft_tokens if draft_tokens is None else draft_tokens
        ids = torch.nn.functional.pad(bonus[:, None], (0, n), value=c.mask_token_id)
        rows = self.embed_tokens if self.embed_tokens is not None else self._shared("embedding").embed
        if self.mask_embedding is None:
            block = rows(ids)
        else:
            # The target may emit the mask token itself; its row of the vocabulary is as untrained there, or missing.
            masked = ids == c.mask_token_id
            block = torch.where(masked[..., None], self.mask_embedding, rows(ids.masked_fill(masked, 0)))
        scale = c.input_embedding_scale
        return (block if scale is None else block * scale).to(self.fc.weight.dtype)

    def _scores(self, hidden: Tensor) -> Tensor:
        """Scores over the drafter's vocabulary, which is the target's or a part of it."""
        c, softcap = self.config, self.config.final_logit_softcapping
        if self.lm_head is not None:
            logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        elif self._head_is_embedding:
            assert self.embed_tokens is not None
            logits = F.linear(hidden.to(self.embed_tokens.weight.dtype), self.embed_tokens.weight)
        else:
            shared = self._shared("head")
            logits = shared.scores(hidden)
            softcap = shared.softcap if softcap is None else softcap
        logits = logits * c.output_multiplier
        return softcap * torch.tanh(logits / softcap) if softcap else logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the target's vocabulary of draft hidden states `[..., hidden]`; -inf at tokens never drafted."""
        logits = self._scores(hidden)
        if self.d2t is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size or 0), -torch.inf)
        return whole.index_copy_(-1, self._draft_ids(), logits)

    def _draft_ids(self) -> Tensor:
        assert self.d2t is not None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # Context and drafts

    def new_cache(
        self, batch_size: int, capacity: int, *, kind: str = "paged", page_size: int = 16, lookahead: int | None = None
    ) -> DraftCache:
        """An empty cache for `capacity` context rows per sequence, `kind` "paged" or "contiguous".

        Raises `ValueError` for a capacity past the positions that the drafter's RoPE is made for. (The rows of a block
        behind the last of them take the positions that follow; the tokens they draft have no room in the cache.)
        """
        c, weight = self.config, self.fc.weight
        self._check_positions(capacity)
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

    def _check_positions(self, rows: int) -> None:
        most = self.config.rope.max_positions
        if rows > most:
            raise ValueError(
                f"{rows} context rows were asked for, but the drafter's positions end at {most} "
                "(max_position_embeddings, and what rope_scaling makes of it)"
            )

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[B, S, 1, rotary_dim / 2]` for absolute positions `[B, S]`."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        return self.config.rope.cos_sin(positions, self._inv_freq, dtype)

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
        tokens = self._scores(hidden[:, 1:]).argmax(-1)
        return tokens if self.d2t is None else self._draft_ids()[tokens]

    @torch.no_grad()
    def sample(
        self, bonus: Tensor, cache: DraftCache, sampling: Sampling, *, draft_tokens: int | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """N tokens after `bonus`, drawn, `[B, N]`, and the probabilities they were drawn by, `[B, N, vocabulary]`."""
        hidden = self(self.embed(bonus, draft_tokens), cache, backend=backend)
        probabilities = sampling.probabilities(self.logits(hidden[:, 1:]))
        return sampling.draw(probabilities), probabilities

    def training_keys(self, hidden: Tensor, sequences: Sequence[int], anchors: Sequence[int]) -> TrainingKeys:
        """Differentiable keys for blocks at `anchors` of whole `sequences`; `hidden` as in `extend`, from row 0."""
        self._check_positions(hidden.shape[1])
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
