import subprocess
import sys

import numpy as np
import pytest
import torch

from exhume import metrics
from exhume.metrics import gauge_l2, is_image, relative_l2, rho, rho_pm, ssim, ssim_matrix


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_relative_l2_equals_its_formula_for_every_pair():
    x_hat, x, centre, scale = draw(3, 2, 5), draw(4, 2, 5, seed=1), draw(2, 5, seed=2), 1 + draw(2, 5, seed=3)
    found = relative_l2(x_hat, x, centre, scale)
    for i in range(4):
        for j in range(3):
            wanted = ((x_hat[j] - x[i]) / scale).norm() / ((x[i] - centre) / scale).norm()
            assert found[i, j] == pytest.approx(wanted.item(), rel=1e-12)


def test_relative_l2_resolves_candidates_far_closer_than_the_square_root_of_the_precision():
    x = 1e3 + draw(2, 50)
    x_hat = x.clone()
    x_hat[0, 0] += 1e-9
    found = relative_l2(x_hat, x)
    assert found[0, 0].item() == pytest.approx(1e-9 / x[0].norm().item(), rel=1e-3)
    assert found[1, 1] == 0


def test_relative_l2_is_infinite_for_broken_candidates_and_for_a_row_at_the_centre():
    x = draw(3, 4)
    x_hat = torch.stack([x[1], torch.full((4,), torch.nan), torch.full((4,), torch.inf), 1e300 * x[0]])
    found = relative_l2(x_hat, x, centre=x[0])
    assert found[0].isinf().all()
    assert found[1:, 1:].isinf().all()
    assert found[1, 0] == 0
    assert relative_l2(x[:0], x).shape == (3, 0)


@pytest.mark.parametrize(
    ("shape", "image"),
    [
        ((8, 8), True),
        ((1, 28, 28), True),
        ((3, 32, 32), True),
        ((30,), False),
        ((6, 9, 9), False),
        ((2, 9), False),
    ],
)
def test_images_are_told_from_tables(shape, image):
    assert is_image(shape) is image


def slow_ssim(a, b, span):
    """Window by window on the reflected image, as Wang et al. 2004 define it with uniform weights."""
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    pad = [torch.nn.functional.pad(t[None], (1, 1, 1, 1), mode="reflect")[0] for t in (a, b)]
    total = []
    for c in range(a.shape[0]):
        for i in range(a.shape[1]):
            for j in range(a.shape[2]):
                p, q = (t[c, i : i + 3, j : j + 3].reshape(-1) for t in pad)
                mean = 2 * p.mean() * q.mean() + c1, p.mean() ** 2 + q.mean() ** 2 + c1
                cross = ((p - p.mean()) * (q - q.mean())).mean()
                spread = 2 * cross + c2, p.var(correction=0) + q.var(correction=0) + c2
                total.append(mean[0] * spread[0] / (mean[1] * spread[1]))
    return torch.stack(total).mean()


@pytest.mark.parametrize("shape", [(1, 6, 5), (3, 4, 4), (5, 5), (3, 3)])
def test_ssim_equals_its_definition(shape):
    a, b = draw(2, *shape), draw(2, *shape, seed=1)
    found = ssim(a, b, 0.0, 1.0)
    for k in range(2):
        pair = [t[k] if len(shape) == 3 else t[k][None] for t in (a, b)]
        assert found[k].item() == pytest.approx(slow_ssim(*pair, 1.0).item(), rel=1e-8)


def test_ssim_of_equals_is_one_clamps_to_the_range_and_refuses_nan():
    x = draw(3, 1, 8, 8)
    wild = x.clone()
    wild[0, 0, 0, 0] = torch.nan
    wild[1] = torch.where(x[1] > 0.5, 50.0, -50.0)
    found = ssim(wild, x, 0.0, 1.0)
    assert found[0] == -torch.inf
    assert found[1].item() == pytest.approx(ssim(wild[1:2].clamp(0, 1), x[1:2], 0.0, 1.0).item())
    assert found[2].item() == pytest.approx(1.0)


def test_ssim_matrix_is_ssim_of_every_pair_however_it_is_chunked(monkeypatch):
    x_hat, x = draw(4, 1, 6, 6), draw(3, 1, 6, 6, seed=1)
    whole = ssim_matrix(x_hat, x, 0.0, 1.0)
    monkeypatch.setattr(metrics, "_CHUNK", 5 * 36)
    torch.testing.assert_close(ssim_matrix(x_hat, x, 0.0, 1.0), whole, rtol=1e-12, atol=1e-12)
    for i in range(3):
        torch.testing.assert_close(ssim(x_hat, x[i].expand(4, 1, 6, 6), 0.0, 1.0), whole[i])
    assert ssim_matrix(x_hat[:0], x, 0.0, 1.0).shape == (3, 0)


def test_torchmetrics_is_imported_late_and_without_a_warning():
    code = (
        "import sys, torch, exhume.metrics as m;"
        "assert 'torchmetrics' not in sys.modules;"
        "m.ssim(torch.ones(1, 8, 8), torch.ones(1, 8, 8), 0.0, 1.0)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("sign", "free_scale"), [(False, False), (True, False), (False, True), (True, True)])
def test_gauge_l2_is_the_smallest_distance_over_the_changes_allowed(sign, free_scale):
    x_hat, x, centre, scale, zero = (
        draw(3, 4),
        draw(2, 4, seed=1),
        draw(4, seed=2),
        1 + draw(4, seed=3),
        draw(4, seed=4),
    )
    found = gauge_l2(x_hat, x, centre, scale, zero=zero, sign=sign, free_scale=free_scale)
    sizes = np.linspace(0, 20, 200_001) if free_scale else np.ones(1)
    factors = torch.from_numpy(np.concatenate([sizes, -sizes]) if sign else sizes)[:, None]
    for i in range(2):
        for j in range(3):
            tried = ((zero + factors * (x_hat[j] - zero) - x[i]) / scale).norm(dim=1)
            wanted = tried.min() / ((x[i] - centre) / scale).norm()
            assert found[i, j].item() == pytest.approx(wanted.item(), rel=1e-6)


def test_gauge_l2_is_infinite_for_broken_candidates_and_exact_for_scaled_rows():
    x = draw(2, 5)
    x_hat = torch.stack([-3 * x[0], torch.full((5,), torch.nan), torch.zeros(5).double()])
    found = gauge_l2(x_hat, x, sign=True, free_scale=True)
    assert found[0, 0].item() < 1e-15
    assert found[:, 1].isinf().all()
    assert found[:, 2].tolist() == pytest.approx([1.0, 1.0])


def test_rho_is_the_mean_error_of_the_best_assignment_and_counts_signs():
    x = draw(4, 6) - 0.5
    x_hat = 1.1 * x[[2, 0, 3, 1]]
    assert rho(x_hat, x) == pytest.approx(0.1)
    assert rho(torch.cat([x_hat, draw(3, 6, seed=1)]), x) == pytest.approx(0.1)
    signs = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]).double()
    assert rho(signs * x_hat, x) > 0.5
    assert rho_pm(signs * x_hat, x) == pytest.approx(0.1)
    assert rho(x_hat * 30, x) == pytest.approx(32.0)  # errors are not capped


def test_rho_forgives_one_sign_a_sample_and_not_one_an_entry():
    x = draw(3, 8) - 0.5
    mixed = x * (draw(3, 8, seed=1) - 0.5).sign()
    assert rho_pm(mixed, x) > 0.3


def test_rho_is_infinite_where_rows_lack_a_candidate():
    x = draw(3, 4)
    assert rho(x[:2], x) == torch.inf
    assert rho(torch.cat([x[:2], torch.full((1, 4), torch.nan)]), x) == torch.inf
