"""BERT (Devlin et al., 2018) as a sequence classifier: real embeddings, pooled first token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from joulelab.zoo.norms.layers import Encoder, draw_weights
from joulelab.zoo.norms.shapes import EncoderShape

SEGMENTS = 2


class Bert(Encoder):
    """Of sequences as long as their row: a padded batch would need a mask, and would be another measurement."""

    def __init__(self, shape: EncoderShape, width: int | None = None) -> None:
        super().__init__(shape, width)
        self.words = nn.Embedding(shape.vocabulary, self.width)
        self.positions = nn.Embedding(shape.positions, self.width)
        self.segments = nn.Embedding(SEGMENTS, self.width)
        # the published model normalises its embeddings; with norms before each branch the first one does it
        self.embedding_norm = nn.LayerNorm(self.width, eps=shape.eps) if shape.norm == "post-ln" else nn.Identity()
        self.pooler = nn.Linear(self.width, shape.inner)
        self.head = nn.Linear(shape.inner, shape.classes)
        draw_weights(self)

    def forward(self, ids_BT: Tensor) -> Tensor:
        first = self.first_token(self.embed(ids_BT))
        return self.head(torch.tanh(self.pooler(first)))  # type: ignore[no-any-return]

    def embed(self, ids_BT: Tensor) -> Tensor:
        tokens = ids_BT.shape[1]
        places = self.positions.weight[:tokens] + self.segments.weight[0]
        return self.embedding_norm(self.words(ids_BT) + places)  # type: ignore[no-any-return]
