"""Models with the shapes of well-known ones and random weights: batch latency doesn't depend on the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 30522


class Layer(nn.Module):
    """One layer of BERT's encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same shape: batch, sequence, width."""
        _, sequence, width = x.shape
        qkv = self.qkv(x).view(-1, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = self.first(x + self.out(seen.transpose(1, 2).reshape(-1, sequence, width)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


class Bert(nn.Module):
    """BERT's encoder and a classifier of two classes: 12 layers of 768 are BERT-base, 24 of 1024 BERT-large."""

    def __init__(self, tokens: int, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, batch x 2, of token ids, batch x tokens; any integer is an id."""
        x = self.words(ids.remainder(VOCABULARY)) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0]).float()


class Block(nn.Module):
    """A bottleneck of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.one, self.a = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.two, self.b = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.three, self.c = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.side: nn.Module = nn.Identity()
        if stride != 1 or inside != 4 * width:
            self.side = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = torch.relu(self.a(self.one(x)))
        y = self.c(self.three(torch.relu(self.b(self.two(y)))))
        return torch.relu(y + self.side(x))


class ResNet50(nn.Module):
    """ResNet-50: uint8 images, batch x 3 x 224 x 224, to 1,000 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, inside = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Block(inside, width, stride if index == 0 else 1))
                inside = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inside, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = (images.to(self.head.weight.dtype) - 127.5) / 64
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3))).float()


MODELS = {
    "bert-base-128": lambda: Bert(128),
    "bert-large-128": lambda: Bert(128, 24, 1024, 16),
    "bert-large-512": lambda: Bert(512, 24, 1024, 16),
    "resnet50": ResNet50,
}


LLAMAS: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 32_000,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
    },
    "llama-3.2-3b": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    },
}  # fmt: skip
"""Configurations of language models for transformers; but for `tiny` the shapes of well-known ones."""


def build(name: str, device: str) -> nn.Module:
    """Return the model in half precision on a GPU, in single precision on a CPU; the same weights each time."""
    torch.manual_seed(0)
    model = MODELS[name]().eval().to(device)
    return model.half() if device == "cuda" else model


def example(name: str, rows: int, device: str) -> torch.Tensor:
    """Return random input."""
    if name == "resnet50":
        return torch.randint(0, 256, (rows, 3, 224, 224), dtype=torch.uint8, device=device)
    tokens = int(name.rsplit("-", 1)[1])
    return torch.randint(0, VOCABULARY, (rows, tokens), device=device)


def export(name: str, path: Path, device: str) -> None:
    """Write an ONNX file with an open batch axis."""
    model, rows = build(name, device), example(name, 2, device)
    torch.onnx.export(
        model, (rows,), path, input_names=["input"], output_names=["logits"], opset_version=17, dynamo=False,
        dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
    )  # fmt: skip
