"""Small deep networks that end in a linear layer: a residual network and a vision transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exhume.errors import ModelError
from exhume.victims.nets import ACTIVATIONS

MAP = 7  # side of the feature map of a residual network
BLOCKS = 4  # of a residual network
LAYERS, HEADS = 2, 4  # of a transformer


class Block(nn.Module):
    """h -> phi(h + conv(phi(conv(h)))), 3x3 without normalisation.

    Args:
        width: channels.
        activation: phi.
    """

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.phi = ACTIVATIONS[activation]()

    def forward(self, h: Tensor) -> Tensor:
        """Return the map [m, width, 7, 7] after the block."""
        out: Tensor = self.phi(h + self.second(self.phi(self.first(h))))
        return out


class Attention(nn.Module):
    """One layer of a transformer: attention over tokens and a hidden layer, each normalised before and added.

    Args:
        width: of a token.
        activation: of the hidden layer, as wide as twice a token.
    """

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.hidden = nn.Sequential(
            nn.Linear(width, 2 * width), ACTIVATIONS[activation](), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens [m, t, width] after the layer."""
        normal = self.before(tokens)
        tokens = tokens + self.mix(normal, normal, normal, need_weights=False)[0]
        out: Tensor = tokens + self.hidden(self.between(tokens))
        return out


class Patches(nn.Module):
    """Tokens of an image: a linear map of each of its 2x2 equal parts, and a learnt vector for each place.

    Args:
        shape: of an image [c, h, w] with even sides.
        width: of a token.
    """

    def __init__(self, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, *sides = shape
        part = (sides[0] // 2, sides[1] // 2)
        self.embed = nn.Conv2d(channels, width, part, stride=part)
        # As large as an embedded patch: with vectors near zero, patches of a sample could be told in no order.
        self.place = nn.Parameter(0.5 * torch.randn(4, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens [m, 4, width]."""
        out: Tensor = self.embed(x).flatten(2).mT + self.place
        return out


class Mean(nn.Module):
    """The mean over tokens [m, t, width]."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [m, width]."""
        return tokens.mean(1)


def residual(
    shape: tuple[int, ...],
    width: int,
    outputs: int = 1,
    activation: str = "relu",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """Return a residual network without normalisation: stem, four blocks of two 3x3 convolutions, linear head.

    The stem, padded by 1, turns the image into a 7x7 map, so that the head has 49 width features. That of Iurada et
    al. 2026 but for the size of the images (32x32 there, with a 28x28 stem); PyTorch's default initialisation.

    Args:
        shape: of an image [c, s, s], s at least 6.
        width: channels.
        outputs: C.
        activation: name of the function between layers.
        seed: of the initialisation.
        dtype: of the parameters.
    """
    channels, side = _image(shape)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        blocks = [Block(width, activation) for _ in range(BLOCKS)]
        stem = nn.Conv2d(channels, width, side + 3 - MAP, padding=1, bias=False)
        model = nn.Sequential(
            stem,
            ACTIVATIONS[activation](),
            *blocks,
            nn.Flatten(),
            nn.Linear(width * MAP**2, outputs),
        )
    return model.to(dtype)


def transformer(
    shape: tuple[int, ...],
    width: int,
    outputs: int = 1,
    activation: str = "gelu",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """Return a vision transformer: four patches, two layers without dropout, the mean of the tokens, linear head.

    The head starts at zero, as in the code of Dosovitskiy et al. 2021; the rest by PyTorch's default.

    Args:
        shape: of an image [c, s, s], s even.
        width: of a token, a multiple of 4; also the number of features of the head.
        outputs: C.
        activation: name of the function in the hidden layers.
        seed: of the initialisation.
        dtype: of the parameters.
    """
    channels, side = _image(shape)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(
            Patches((channels, side, side), width),
            *(Attention(width, activation) for _ in range(LAYERS)),
            nn.LayerNorm(width),
            Mean(),
            head := nn.Linear(width, outputs),
        )
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return model.to(dtype)


def _image(shape: Sequence[int]) -> tuple[int, int]:
    """Channels and side of a square image."""
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] < MAP - 1:
        raise ModelError(
            f"inputs must be square images [c, s, s] with s at least {MAP - 1}, but have shape {tuple(shape)}; use"
            " another data set"
        )
    return shape[0], shape[1]
