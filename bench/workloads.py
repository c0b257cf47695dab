"""What is stepped: the shapes of the parameters of well-known models, and of some extremes.

Written down as the models are built, so that nothing has to be installed or downloaded. The test of this module holds
their parameter counts against the published ones.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence

Shape = tuple[int, ...]

SWEEP_TENSOR = 1 << 20  # elements of the largest tensor of a ``size-N`` workload


def _linear(rows: int, columns: int) -> list[Shape]:
    return [(rows, columns), (rows,)]


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def resnet50() -> list[Shape]:
    """ResNet-50 as in torchvision, 1,000 classes."""
    shapes: list[Shape] = [(64, 3, 7, 7), *_norm(64)]
    channels = 64
    for width, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(blocks):
            shapes += [(width, channels, 1, 1), *_norm(width), (width, width, 3, 3), *_norm(width)]
            shapes += [(4 * width, width, 1, 1), *_norm(4 * width)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), *_norm(4 * width)]
            channels = 4 * width
    return [*shapes, *_linear(1000, channels)]


def vit_b16() -> list[Shape]:
    """ViT-B/16 as in torchvision, for images of 224 x 224, 1,000 classes."""
    d = 768
    shapes: list[Shape] = [(1, 1, d), (d, 3, 16, 16), (d,), (1, 197, d)]
    for _ in range(12):
        shapes += [*_norm(d), *_linear(3 * d, d), *_linear(d, d), *_norm(d), *_linear(4 * d, d), *_linear(d, 4 * d)]
    return [*shapes, *_norm(d), *_linear(1000, d)]


def bert_large() -> list[Shape]:
    """BERT-large uncased with its pooler, without a head for pre-training."""
    d = 1024
    shapes: list[Shape] = [(30522, d), (512, d), (2, d), *_norm(d)]
    for _ in range(24):
        shapes += [*_linear(d, d) * 4, *_norm(d), *_linear(4 * d, d), *_linear(d, 4 * d), *_norm(d)]
    return [*shapes, *_linear(d, d)]


def gpt2(layers: int, d: int) -> list[Shape]:
    """GPT-2, whose output layer shares the token embedding, and whose weights are stored transposed."""
    shapes: list[Shape] = [(50257, d), (1024, d)]
    for _ in range(layers):
        shapes += [*_norm(d), (d, 3 * d), (3 * d,), (d, d), (d,), *_norm(d), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [*shapes, *_norm(d)]


def llama_layer(d: int, kv: int, hidden: int) -> list[Shape]:
    """One layer of Llama 3: attention with ``kv`` columns of keys and of values, gated MLP, two norms."""
    return [(d, d), (kv, d), (kv, d), (d, d), (hidden, d), (hidden, d), (d, hidden), (d,), (d,)]


def llama32_1b() -> list[Shape]:
    """Llama 3.2 1B, whose output layer shares the token embedding."""
    return [(128256, 2048), *(llama_layer(2048, 512, 8192) * 16), (2048,)]


WORKLOADS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    "vit-b16": vit_b16,
    "bert-large": bert_large,
    "gpt2": lambda: gpt2(12, 768),
    "gpt2-xl": lambda: gpt2(48, 1600),
    "llama3.2-1b": llama32_1b,
    "llama3.1-8b-layer": lambda: llama_layer(4096, 1024, 14336),
    "tiny-10000": lambda: [(64,)] * 10_000,
    "small-400": lambda: [(64, 64)] * 400,
    "one-1b": lambda: [(1_000_000_000,)],
}


def workload(name: str, scale: float = 1.0) -> list[Shape]:
    """The shapes of a workload.

    Args:
        name: one of :data:`WORKLOADS`; ``size-N``: N elements in tensors of at most ``SWEEP_TENSOR``; or
            ``module:callable``, where the callable returns a ``torch.nn.Module``.
        scale: every tensor's first dimension is made this much smaller, to no less than 1.

    Raises:
        ValueError: for an unknown name, or a scale outside (0, 1].
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale must be above 0 and at most 1, got {scale!r}")
    if ":" in name:
        shapes = _from_model(name)
    elif match := re.fullmatch(r"size-(\d+)", name):
        whole, rest = divmod(int(match[1]), SWEEP_TENSOR)
        shapes = [(SWEEP_TENSOR,)] * whole + [(rest,)] * (rest > 0)
    elif name in WORKLOADS:
        shapes = WORKLOADS[name]()
    else:
        raise ValueError(
            f"unknown workload {name!r}: must be size-N, module:callable, or one of {', '.join(WORKLOADS)}"
        )
    return [(math.ceil(shape[0] * scale), *shape[1:]) if shape else shape for shape in shapes]


def _from_model(name: str) -> list[Shape]:
    module, _, function = name.partition(":")
    model = getattr(importlib.import_module(module), function)()
    return [tuple(param.shape) for param in model.parameters()]


def numel(shapes: Sequence[Shape]) -> int:
    """How many elements there are in all."""
    return sum(map(math.prod, shapes))


def sweep(largest: int) -> list[str]:
    """Workloads of 1,000 elements and ten times more each, up to ``largest``."""
    return [f"size-{10**k}" for k in range(3, 12) if 10**k <= largest]
