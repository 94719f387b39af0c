"""A GPT without dropout: a step depends on weights and batch alone.

Shapes: B sequences, T tokens of a sequence, D width, H heads, V vocabulary.
"""

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override


class _Block(nn.Module):
    """Attention and feed-forward layer, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, self._heads, -1))
        q_BHTd, k_BHTd, v_BHTd = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        updated: Tensor = x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))
        return updated


class GPT(nn.Module):
    """Predicts the next token.

    Args:
        vocabulary: number of tokens.
        width: of the hidden states.
        heads: of the attention.
        layers: number of blocks.
        context: longest sequence.
    """

    def __init__(self, *, vocabulary: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores [B, T, V] of the next token after each of integers [B, T]."""
        x_BTD = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits_BTV

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in 32 bits, of each token after the first.

        Args:
            tokens: integers, [B, T + 1].
        """
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
