"""From scores to tokens: greedy or by temperature and top-p, and the rule by which a target takes drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: divides the scores; 0 = the most likely token.
        top_p: keep the fewest most likely tokens whose probabilities reach it together; 1 = all.
        generator: of the device of the scores; None = torch's own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, scores: Tensor) -> Tensor:
        """float32 `[..., vocabulary]` of scores of that shape; needs a temperature."""
        p = torch.softmax(scores.float() / self.temperature, dim=-1)
        if self.top_p < 1:
            ordered, index = p.sort(dim=-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            p = torch.zeros_like(p).scatter_(-1, index, ordered.masked_fill(before >= self.top_p, 0.0))
            p = p / p.sum(-1, keepdim=True)
        return p

    def draw(self, probabilities: Tensor) -> Tensor:
        """One token per row, `[...]`; rows need not sum to 1."""
        flat = probabilities.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])

    def next(self, scores: Tensor) -> Tensor:
        """Tokens `[...]` of scores `[..., vocabulary]`."""
        return scores.argmax(-1) if self.greedy else self.draw(self.probabilities(scores))

    def accept(self, scores: Tensor, drafts: Tensor, proposal: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """How many drafts the target takes, and its own token after them.

        Greedy: the longest run of drafts that are the target's own most likely tokens. Else the rule of speculative
        sampling (Leviathan et al. 2023, arXiv 2211.17192): draft x, drawn by q, is taken with probability
        min(1, p(x) / q(x)); at the first that is not, the token is drawn by max(p - q, 0), normalised, and by p behind
        the last draft. The tokens are then distributed as p, whatever q is.

        Args:
            scores: of the target, `[B, N + 1, vocabulary]`; row i follows draft i - 1.
            drafts: `[B, N]`.
            proposal: q, `[B, N, vocabulary]`; None = the drafts were not drawn (q is 1 at each).

        Returns:
            `[B]` drafts taken, 0..N, and `[B]` tokens.
        """
        n = drafts.shape[1]
        if self.greedy:
            picks = scores.argmax(-1)
            taken = (picks[:, :-1] == drafts).cumprod(1).sum(1)
            return taken, picks.gather(1, taken[:, None])[:, 0]
        p = self.probabilities(scores)
        if proposal is None:
            proposal = torch.zeros_like(p[:, :n]).scatter_(-1, drafts[..., None], 1.0)
        elif proposal.shape != p[:, :n].shape:
            raise ValueError(
                f"the proposal's probabilities must be {list(p[:, :n].shape)}, as the target's, "
                f"got {list(proposal.shape)}"
            )
        chance = torch.rand(drafts.shape, generator=self.generator, device=p.device)
        p_x, q_x = (x.gather(-1, drafts[..., None])[..., 0] for x in (p[:, :n], proposal))
        taken = (chance * q_x < p_x).cumprod(1).sum(1)
        at = taken[:, None, None].expand(-1, 1, p.shape[-1])
        p_at = p.gather(1, at)[:, 0]
        q_at = torch.nn.functional.pad(proposal, (0, 0, 0, 1)).gather(1, at)[:, 0]
        rest = (p_at - q_at).clamp(min=0)
        # Where p and q are equal but for rounding, nothing may be left of a draft that was refused by rounding alone.
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_at)
        return taken, self.draw(rest)
