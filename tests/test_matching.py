import dataclasses
import itertools
import json
from functools import cache
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exhume.ambiguity import Ambiguity
from exhume.candidates import Candidates
from exhume.errors import ExhumeError
from exhume.matching import assign, match
from exhume.metrics import relative_l2
from exhume.reconstruction import Reconstruction
from exhume.truth import Truth
from exhume.victims.data import load, split

load = cache(load)


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def count(distance, threshold):
    return sum(bool(distance[pair] < threshold) for pair in assign(distance, threshold).items())


def most(distance, threshold):
    """The largest count of any assignment, by trying them all."""
    d = distance if len(distance) <= distance.shape[1] else distance.T
    choices = itertools.permutations(range(d.shape[1]), len(d))
    return max(sum(bool(d[i, j] < threshold) for i, j in enumerate(choice)) for choice in choices)


@st.composite
def distances(draw, largest=5):
    n, m = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    entry = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.29, 0.3, 5.0, 1e9, torch.inf]))
    values = draw(st.lists(entry, min_size=n * m, max_size=n * m))
    return torch.tensor(values, dtype=torch.float64).reshape(n, m)


@given(distances(), st.floats(0.05, 0.9))
@settings(deadline=None, max_examples=200)
def test_the_count_is_the_largest_that_any_assignment_reaches(distance, threshold):
    pairs = assign(distance, threshold)
    assert len(set(pairs.values())) == len(pairs)
    assert count(distance, threshold) == most(distance, threshold)


def test_capped_distances_alone_would_miss_a_match():
    distance = torch.tensor([[0.0, 0.29], [0.29, 1.0]], dtype=torch.float64)
    assert count(distance, 0.3) == 2


@given(distances(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_count_does_not_depend_on_the_order(distance, random):
    rows, columns = (random.sample(range(k), k) for k in distance.shape)
    assert count(distance[rows][:, columns], 0.3) == count(distance, 0.3)


@given(distances(), st.floats(0.05, 0.9), st.floats(0.05, 0.9))
@settings(deadline=None)
def test_the_count_grows_with_the_threshold(distance, a, b):
    assert count(distance, min(a, b)) <= count(distance, max(a, b))


@given(distances())
@settings(deadline=None)
def test_more_candidates_never_lower_the_count(distance):
    assert count(distance[:, :-1], 0.3) <= count(distance, 0.3) <= count(distance[:, :-1], 0.3) + 1


def test_among_the_largest_counts_the_nearest_pairs_are_taken():
    distance = torch.tensor([[0.2, 0.1, 7.0], [0.1, 0.2, 9.0], [8.0, 6.0, 2.0]], dtype=torch.float64)
    assert assign(distance, 0.3) == {0: 1, 1: 0, 2: 2}


def test_errors_beyond_the_threshold_still_count_in_the_assignment():
    distance = torch.tensor([[5.0, 1.0], [1.0, 5.0]], dtype=torch.float64)
    assert assign(distance, 0.3) == {0: 1, 1: 0}


def planted(n=6, shape=(1, 8, 8), noise=1e-3):
    """Truth, three strangers with shuffled noisy copies of n - 2 training rows, and each row's copy."""
    truth = Truth(draw(n, *shape), draw(2 * n, *shape, seed=1), public_mean=torch.full(shape, 0.5))
    order = torch.randperm(n - 2, generator=torch.Generator().manual_seed(2))
    copies = truth.train[order] + noise * draw(n - 2, *shape, seed=3)
    return truth, torch.cat([draw(3, *shape, seed=4), copies]), {int(i): 3 + k for k, i in enumerate(order)}


def test_planted_samples_are_found_and_the_control_is_not():
    truth, x_hat, source = planted()
    found = match(x_hat, truth)
    assert (found.train.n, found.train.count, found.train.close, found.train.ssim_count) == (6, 4, 4, 4)
    assert (found.control.n, found.control.count, found.control.close) == (6, 0, 0)
    assert {r.truth: r.candidate for r in found.rows if r.error < 0.3} == source
    assert all(r.ssim > 0.99 and r.feature_error is None for r in found.rows if r.error < 0.3)
    assert found.train.median == median(r.error for r in found.rows)


def test_a_candidate_may_match_train_and_control():
    truth, _, _ = planted()
    found = match(torch.cat([truth.train, truth.control[:2]]), truth)
    assert (found.train.count, found.control.count) == (6, 2)


def test_a_reconstruction_stands_for_its_samples():
    truth, x_hat, _ = planted()
    assert (
        match(SimpleNamespace(x=x_hat.float().requires_grad_()), truth).train
        == match(x_hat.float(), truth).train
    )


def test_the_nulls_stand_beside():
    truth, x_hat, _ = planted()
    found = match(x_hat, truth)
    assert found.random.count == 0
    assert found.mean_image.count == 0
    assert found.mean_image.median == pytest.approx(1.0)
    assert match(x_hat, truth, seed=1).random.median != found.random.median
    assert match(x_hat, truth) == found


def test_the_scores_are_strict_json_even_without_candidates():
    truth, x_hat, _ = planted()
    for candidates in (x_hat, x_hat[:0], torch.full_like(x_hat, torch.nan)):
        json.dumps(dataclasses.asdict(match(candidates, truth)), allow_nan=False)


def test_without_candidates_nothing_matches_and_there_is_no_median():
    truth, x_hat, _ = planted()
    found = match(x_hat[:0], truth)
    assert (found.train.count, found.train.close, found.train.median, found.train.ssim_count) == (
        0,
        0,
        None,
        0,
    )
    assert all(row.candidate is None and row.error is None for row in found.rows)


def test_rows_without_a_candidate_count_as_infinitely_far():
    truth, _, _ = planted()
    assert match(truth.train[:3], truth).train.median is None
    assert match(truth.train[:4], truth).train.median == 0
    assert [r.candidate for r in match(truth.train[:4], truth).rows] == [0, 1, 2, 3, None, None]


def test_broken_candidates_never_match_and_do_not_hide_good_ones():
    truth, x_hat, source = planted()
    broken = x_hat.clone()
    broken[0], broken[1] = torch.nan, torch.inf
    assert match(broken, truth).train.count == 4
    assert all(row.candidate not in (0, 1) for row in match(broken, truth).rows)
    broken[source[0], 0, 0, 0] = torch.nan
    assert match(broken, truth).train.count == 3


def test_one_candidate_explains_one_row_and_one_row_takes_one_candidate():
    truth, _, _ = planted()
    same = truth.train[:1].expand(5, 1, 8, 8)
    assert match(same, truth).train.count == 1
    twice = dataclasses.replace(truth, train=torch.cat([truth.train, truth.train[:1]]))
    assert match(same[:1], twice).train.count == 1
    assert match(same, twice).train.count == 2


def test_the_mean_comes_from_rows_outside_train_and_the_control_in_use():
    train, control, x_hat = draw(4, 5), draw(9, 5, seed=1), draw(6, 5, seed=2)
    spare = match(x_hat, Truth(train, control))
    assert "5 control rows" in spare.centred_by
    assert spare.train == match(x_hat, Truth(train, control, control[4:].mean(0))).train
    bare = match(x_hat, Truth(train, control[:4]))
    assert "zero" in bare.centred_by
    assert bare.train.median == match(x_hat, Truth(train, control, torch.zeros(()))).train.median
    assert match(x_hat, Truth(train, control[:2])).control.n == 2


def test_tables_report_each_feature_and_need_a_unit_for_each():
    truth = Truth(draw(3, 2) * torch.tensor([1.0, 1e6]), draw(3, 2, seed=1), torch.zeros(2))
    found = match(truth.train + torch.tensor([0.9, 1.0]), truth)
    assert found.train.count == 3  # the first feature, all wrong, does not show
    assert found.rows[0].feature_error == pytest.approx((0.9, 1.0))
    assert found.rows[0].ssim is None
    assert found.train.ssim_count is None
    scaled = dataclasses.replace(truth, public_scale=torch.tensor([1.0, 1e6]))
    assert match(truth.train + torch.tensor([0.9, 1.0]), scaled).train.count == 0


@pytest.mark.parametrize("name", ["digits", "faces", "breast-cancer"])
def test_unrelated_real_rows_rarely_match(name):
    false, close = 0, 0
    dataset = load(name)
    for seed in range(50):
        drawn = split(dataset, 20, seed)
        distance = relative_l2(drawn.control.x, drawn.train.x, drawn.spec.mean, drawn.spec.scale)
        false += count(distance, 0.3)
        close += count(distance, 0.1)
    assert false / 50 <= 0.1
    assert close == 0


def test_ssim_alone_would_call_unrelated_faces_recovered():
    drawn = split(load("faces"), 20, 0)
    found = match(drawn.control.x, drawn.truth())
    assert found.train.ssim_count >= 5
    assert found.train.count == 0
    assert found.control.count == 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"control": draw(4, 1, 8, 9)}, "check that the files belong together"),
        ({"control": draw(0, 1, 8, 8)}, "at least one row"),
        ({"train": draw(0, 1, 8, 8)}, "at least one row"),
        ({"control": draw(6, 1, 8, 8)}, "6 of its 6 rows occur in train"),
        ({"train": torch.full((2, 1, 8, 8), torch.nan)}, "must be finite"),
        ({"public_mean": torch.zeros(3, 7)}, "broadcastable"),
        ({"public_mean": torch.tensor(torch.nan)}, "must be finite"),
        ({"public_scale": torch.zeros(())}, "must be positive"),
        ({"train_label": torch.zeros(5)}, "one label for each of the 6 train rows"),
        ({"control_label": torch.zeros(5)}, "one label for each of the 12 control rows"),
    ],
)
def test_a_truth_that_cannot_be_judged_is_refused(change, words):
    truth, _, _ = planted()
    with pytest.raises(ExhumeError, match=words):
        dataclasses.replace(truth, **change)


def test_candidates_of_another_shape_are_refused():
    truth, x_hat, _ = planted()
    with pytest.raises(ExhumeError, match="shape"):
        match(x_hat.flatten(1), truth)


def test_the_global_generator_and_the_inputs_are_untouched():
    truth, x_hat, _ = planted()
    before, copy = torch.random.get_rng_state(), x_hat.clone()
    match(x_hat, truth)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(copy, x_hat)


# --- what the equations cannot tell, forgiven beside the plain count -----------------------------------------

SIGN, SCALE, BOTH = (
    Ambiguity(sign, scale, ()) for sign, scale in ((True, False), (False, True), (True, True))
)


def forgiven(x_hat, truth, ambiguity):
    found = match(x_hat, truth, ambiguity=ambiguity)
    return found.train.gauge.count, found.control.gauge.count, found.random.gauge.count


def centred(n=5, d=12, seed=0):
    """Rows around zero, so that unrelated ones are at right angles."""
    return Truth(draw(n, d, seed=seed) - 0.5, draw(2 * n, d, seed=seed + 1) - 0.5, torch.zeros(d))


def test_nothing_is_forgiven_where_nothing_is_declared():
    truth, x_hat, _ = planted()
    for found in (match(x_hat, truth), match(x_hat, truth, ambiguity=Ambiguity(False, False, ("told",)))):
        assert [s.gauge for s in (found.train, found.control, found.random, found.mean_image)] == [None] * 4


def test_a_declared_sign_or_scale_is_forgiven_beside_the_plain_count():
    truth = centred()
    flips = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0]).double()[:, None]
    scales = torch.tensor([0.2, 1.0, 3.0, 7.0, 0.5]).double()[:, None]
    cases = (
        ("flipped", flips, (5, 2, 5)),
        ("scaled", scales, (1, 5, 5)),
        ("both", flips * scales, (1, 2, 5)),
    )
    for name, s, counts in cases:
        x_hat = s * truth.train
        plain = match(x_hat, truth)
        for ambiguity, count in zip((SIGN, SCALE, BOTH), counts, strict=True):
            found = match(x_hat, truth, ambiguity=ambiguity)
            assert dataclasses.replace(found.train, gauge=None) == plain.train
            assert dataclasses.replace(found.control, gauge=None) == plain.control
            assert found.rows == plain.rows
            assert forgiven(x_hat, truth, ambiguity) == (count, 0, 0), name
    assert match(scales * truth.train, truth, ambiguity=SCALE).train.gauge.close == 5
    assert match(scales * truth.train, truth, ambiguity=SCALE).train.gauge.median == pytest.approx(
        0, abs=1e-12
    )


def test_control_rows_are_forgiven_as_much_as_training_rows():
    truth = centred()
    assert forgiven(-3 * truth.control[:5], truth, BOTH) == (0, 5, 0)


def test_the_sign_turns_the_model_input_and_not_the_row_less_the_public_mean():
    public, zero = torch.full((12,), 0.5), torch.full((12,), 0.2)
    truth = Truth(draw(5, 12), draw(10, 12, seed=1), public_mean=public)
    about_zero, about_mean = 2 * zero - truth.train, 2 * public - truth.train
    declared = Ambiguity(True, False, (), zero)
    assert forgiven(about_zero, truth, declared)[0] == 5
    assert forgiven(about_mean, truth, declared)[0] == 0
    assert forgiven(-truth.train, truth, Ambiguity(True, False, ()))[0] == 5


@pytest.mark.parametrize(("about_mean", "most"), [(True, 0.1), (False, 1.5)])
def test_a_free_scale_lets_unrelated_rows_pass_where_the_model_sees_raw_images(about_mean, most):
    """All faces point nearly one way from raw zero: matches by chance are the control's to show."""
    false = []
    for seed in range(20):
        drawn = split(load("faces"), 20, seed)
        truth = Truth(drawn.train.x, drawn.control.x, public_mean=drawn.spec.mean)
        declared = Ambiguity(True, True, (), drawn.spec.mean if about_mean else None)
        found = match(drawn.control.x[:20], truth, ambiguity=declared)
        assert (found.train.count, found.control.gauge.count) == (0, 20)
        false.append(found.train.gauge.count)
    assert sum(false) / 20 <= most
    assert about_mean or sum(false) > 0


def test_a_reconstruction_declares_what_is_forgiven():
    truth = centred()
    candidates = Candidates(-truth.train, torch.ones(5, 1), torch.ones(5, 1))
    found = Reconstruction(
        attack="a", candidates=candidates, importance=torch.ones(5), misfit=0.0, loss=0.0, status="converged",
        reason="", steps=0, seconds=0.0, seed=0, trace=(), assumed=(), ambiguity=SIGN,
    )  # fmt: skip
    assert match(found, truth).train.gauge.count == 5
    assert match(dataclasses.replace(found, ambiguity=None), truth).train.gauge is None


@given(st.integers(0, 10_000), st.sampled_from([SIGN, SCALE, BOTH]))
@settings(deadline=None, max_examples=40)
def test_forgiving_never_lowers_a_count_and_does_not_depend_on_the_gauge(seed, ambiguity):
    truth = centred(4, 3, seed)
    x_hat = draw(6, 3, seed=seed + 2) - 0.5
    found = match(x_hat, truth, ambiguity=ambiguity)
    for score in (found.train, found.control, found.random):
        assert score.gauge.count >= score.count
        assert score.gauge.close >= score.close
    s = draw(6, 1, seed=seed + 3) + 0.1 if ambiguity.scale else torch.ones(6, 1).double()
    s = s * (draw(6, 1, seed=seed + 4) - 0.5).sign() if ambiguity.sign else s
    again = match(s * x_hat, truth, ambiguity=ambiguity)
    assert again.train.gauge.count == found.train.gauge.count
    assert again.train.gauge.median == pytest.approx(found.train.gauge.median)


def test_scores_with_a_gauge_are_strict_json():
    truth = centred()
    for x_hat in (truth.train, truth.train[:0], torch.full_like(truth.train, torch.nan)):
        for ambiguity in (SIGN, SCALE, BOTH):
            json.dumps(dataclasses.asdict(match(x_hat, truth, ambiguity=ambiguity)), allow_nan=False)
