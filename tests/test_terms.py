"""Priors: their curvature is the Hessian of their value, formed or not."""

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve

from exhume.spaces import full, subspace
from exhume.terms import Box, HighFrequency, Smooth

SHAPE = (2, 3, 4)
SIZE = 24
DOUBLE = torch.float64


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


TERMS = {
    "box": Box(-0.5 * torch.ones(SIZE, dtype=DOUBLE), 0.7 * torch.ones(SIZE, dtype=DOUBLE), 3.0),
    "smooth": Smooth(SHAPE, 3.0),
    "high frequency": HighFrequency(SHAPE, 3.0),
}
SPACES = {"full": full(SIZE), "affine": subspace(draw(5, SIZE, seed=1), draw(SIZE, seed=2))}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
def test_curvature_is_the_hessian_of_the_value(term, space):
    """Both penalties are piecewise quadratic, so Gauss-Newton is exact away from the kinks."""
    z, direction = draw(3, space.dim, seed=3), draw(3, space.dim, seed=4)
    formed = term.curvature(space.expand(z), space)
    for i in range(3):
        exact = torch.autograd.functional.hessian(lambda one: term.value(space.expand(one[None])).sum(), z[i])
        torch.testing.assert_close(formed[i], exact, rtol=1e-10, atol=1e-12)
    product = term.curvature_product(space.expand(z), space, direction)
    torch.testing.assert_close(product, (formed @ direction[..., None])[..., 0], rtol=1e-10, atol=1e-12)


def test_what_a_prior_likes_costs_nothing():
    assert float(TERMS["box"].value(torch.full((1, SIZE), 0.1, dtype=DOUBLE))) == 0.0
    assert float(TERMS["smooth"].value(torch.full((1, SIZE), 9.0, dtype=DOUBLE))) == 0.0
    steps = torch.arange(SIZE, dtype=DOUBLE)[None]
    # Each channel of 3 x 4 has 9 horizontal steps of 1 and 8 vertical ones of 4.
    assert float(TERMS["smooth"].value(steps)) == pytest.approx(3.0 / 24 * 2 * (9 * 1 + 8 * 16))


def test_detail_is_what_the_binomial_filter_takes_away():
    """Against scipy's filter, each channel on its own, zeros outside."""
    u = draw(2, SIZE, seed=5)
    kernel = np.outer([1, 2, 1], [1, 2, 1]) / 16
    blurred = [[convolve(c.numpy(), kernel, mode="constant") for c in one] for one in u.view(2, *SHAPE)]
    detail = u.view(2, -1) - torch.tensor(np.array(blurred)).view(2, -1)
    expected = 3.0 / SIZE * detail.square().sum(1)
    torch.testing.assert_close(TERMS["high frequency"].value(u), expected)
