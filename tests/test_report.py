import base64
import datetime
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from safetensors.torch import load_file
from torch import nn

from exhume import report as reports
from exhume.ambiguity import Ambiguity
from exhume.candidates import Candidates
from exhume.errors import ExhumeError, OutputError
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.matching import assign, match
from exhume.metrics import relative_l2
from exhume.reconstruction import Reconstruction
from exhume.report.data import SPECTRUM_LIMIT, TRACE_LIMIT, kept
from exhume.report.gallery import control_errors, gallery
from exhume.report.output import HTML, JSON, MARKER, TENSORS, write_atomically
from exhume.report.pictures import png
from exhume.truth import Truth

CURVES = {"trace": (1.0, 0.1, 0.01), "spectrum": (3.0, 2.0, 1e-12), "rank": 2}  # most of the time of a page
EVIL = "<script>alert('x')</script>"


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def evidence(*shape, **spec):
    size = torch.Size(shape).numel()
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, 4), nn.ReLU(), nn.Linear(4, 2))
    init = {name: 0.9 * p + 0.01 for name, p in net.state_dict().items()}
    return Evidence.from_module(net, input=InputSpec(shape, **spec), init=init, recipe=Recipe(loss="mse"))


def reconstruction(x, name="exhume", **changes):
    m = len(x)
    found = Reconstruction(
        attack=name,
        candidates=Candidates(x, draw(m, 6, seed=1), draw(m, 2, seed=2)),
        importance=draw(m, seed=3).sort(descending=True)[0],
        misfit=1e-3,
        loss=2e-3,
        status="converged",
        reason="The loss no longer fell.",
        steps=7,
        seconds=1.5,
        seed=0,
        trace=(),
        assumed=("features lie between 0 and 1",),
    )
    return replace(found, **changes)


@dataclass(frozen=True, eq=False)
class Certified(Reconstruction):
    """A reconstruction with a certificate."""

    certificate: object = None


def certified(found):
    score = torch.arange(len(found.x), dtype=torch.float64)
    certificate = SimpleNamespace(
        recovered=len(score) - 2,
        false_rate=0.25,
        score=score,
        certified=score > 1,
        error_estimate=score.rsqrt(),  # infinite at score 0
        notes=("Scored on units that were left out of the fit.",),
    )
    return Certified(**{**vars(found), "certificate": certificate})


def write(folder, evidence, founds, truth=None, include_images=False, extra=(), **told):
    results = [reports.attack_result(f, None if truth is None else match(f, truth)) for f in founds]
    report = reports.build(evidence, [*results, *extra], seed=3, **told)
    page = reports.write(reports.prepare(folder), report, founds, truth=truth, include_images=include_images)
    return report, page.read_text(encoding="utf-8")


def strict(path):
    def refuse(constant):
        raise AssertionError(f"{path.name} holds {constant}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def image_truth(n=3, k=5, shape=(1, 6, 6)):
    return Truth(train=draw(n, *shape, seed=11), control=draw(k, *shape, seed=12))


def near(truth, noise=0.01):
    return truth.train + noise * draw(*truth.train.shape, seed=13)


# Strict JSON


def test_a_diverged_attack_still_makes_strict_json(tmp_path):
    nan, inf = float("nan"), float("inf")
    found = certified(
        reconstruction(
            torch.full((3, 1, 6, 6), nan, dtype=torch.float64),
            status="diverged",
            loss=nan,
            misfit=inf,
            trace=(1.0, inf, nan),
            spectrum=(inf, nan),
            importance=torch.tensor([inf, nan, -inf]),
        )
    )
    write(tmp_path / "out", evidence(1, 6, 6), [found], image_truth())
    attack = strict(tmp_path / "out" / JSON)["attacks"][0]
    assert attack["status"] == "diverged"
    assert attack["loss"] is None and attack["misfit"] is None and attack["trace"] == [1.0, None, None]
    assert attack["certificate"]["error_estimate"][0] is None
    assert [sample["importance"] for sample in attack["per_sample"]] == [None] * 3
    assert attack["matched"]["train"]["median"] is None


def test_the_keys_that_checks_read_are_there(tmp_path):
    truth = image_truth()
    found = certified(reconstruction(near(truth)))
    write(tmp_path / "out", evidence(1, 6, 6), [found], truth, verdict="leak")
    told = strict(tmp_path / "out" / JSON)
    attack = told["attacks"][0]
    assert (told["schema_version"], told["verdict"], told["seed"]) == (1, "leak", 3)
    assert datetime.date.fromisoformat(told["created"])
    assert {"name", "status", "seconds", "steps", "loss"} <= attack.keys()
    assert attack["certificate"]["recovered"] == 1
    for side in ("train", "control", "random", "mean_image"):
        assert {"n", "count", "close", "median", "metric", "threshold"} <= attack["matched"][side].keys()
    assert attack["matched"]["train"]["count"] == 3 and attack["matched"]["control"]["count"] == 0
    assert [sample["candidate"] for sample in attack["per_sample"]] == [0, 1, 2]
    assert sorted(sample["truth"] for sample in attack["per_sample"]) == [0, 1, 2]
    assert [sample["certified"] for sample in attack["per_sample"]] == [False, False, True]


def test_a_count_up_to_a_declared_ambiguity_stands_beside_and_only_where_it_is_declared(tmp_path):
    truth = Truth(train=draw(3, 1, 6, 6, seed=11) - 0.5, control=draw(5, 1, 6, 6, seed=12) - 0.5)
    found = reconstruction(-truth.train)
    plain, page = write(tmp_path / "plain", evidence(1, 6, 6), [found], truth)
    assert "up to" not in page
    assert plain.attacks[0].matched.train.gauge is None and plain.attacks[0].ambiguity is None
    declared = replace(found, ambiguity=Ambiguity(True, False, ("the <sign> is not told",)))
    _, page = write(tmp_path / "declared", evidence(1, 6, 6), [declared], truth)
    assert "matched up to sign" in page and "the &lt;sign&gt; is not told" in page
    attack = strict(tmp_path / "declared" / JSON)["attacks"][0]
    assert attack["ambiguity"] == {"sign": True, "scale": False, "reasons": ["the <sign> is not told"]}
    assert attack["matched"]["train"]["gauge"] == {"count": 3, "close": 3, "median": 0.0}
    assert (
        attack["matched"]["control"]["gauge"]["count"] == attack["matched"]["random"]["gauge"]["count"] == 0
    )
    assert attack["matched"]["mean_image"]["gauge"] is None
    before = strict(tmp_path / "plain" / JSON)["attacks"][0]["matched"]
    for side in ("train", "control", "random", "mean_image"):
        assert before[side] | {"gauge": None} == attack["matched"][side] | {"gauge": None}
    assert reports.read(tmp_path / "declared" / JSON).attacks[0].ambiguity.sign


def test_without_truth_nothing_is_scored(tmp_path):
    told, page = write(tmp_path / "out", evidence(1, 6, 6), [reconstruction(draw(3, 1, 6, 6))])
    assert told.verdict is None and told.attacks[0].matched is None
    assert told.attacks[0].per_sample[0].truth is None and told.attacks[0].per_sample[0].error is None
    assert "Not scored: no truth was given." in page


def test_what_is_written_is_read_back(tmp_path):
    truth = image_truth()
    failed = reports.failed_attack("other", RuntimeError("no memory"), 2.0)
    told, _ = write(
        tmp_path / "out",
        evidence(1, 6, 6, low=0.0, high=1.0),
        [certified(reconstruction(near(truth), **CURVES))],
        truth,
        extra=[failed],
        verdict="leak",
        reasons=["All rows were recovered."],
        samples=3,
        command="exhume audit TARGET.toml",
    )
    assert reports.read(tmp_path / "out" / JSON) == told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: told | {"schema_version": 2}, "schema_version is wrong"),
        (lambda told: told | {"extra": 1}, "extra is wrong"),
        (lambda told: told | {"verdict": "safe"}, "verdict is wrong"),
        (lambda told: told | {"attacks": told["attacks"] * 2}, "different names"),
        (lambda told: told | {"seed": float("nan")}, "holds NaN"),
        (lambda told: [told], "top level is wrong"),
    ],
)
def test_reading_refuses_what_is_no_report(tmp_path, change, message):
    report = reports.build(evidence(3), [reports.attack_result(reconstruction(draw(2, 3)))], seed=0)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(change(json.loads(report.to_json()))))
    with pytest.raises(ExhumeError, match=message):
        reports.read(path)


def test_reading_a_missing_file_says_so(tmp_path):
    with pytest.raises(ExhumeError, match="cannot be read"):
        reports.read(tmp_path / "report.json")


def test_bytes_that_are_no_text_do_not_stop_a_report(tmp_path):
    found = reconstruction(draw(2, 3))
    told, page = write(tmp_path / "out", evidence(3), [found], command="exhume \udcff.toml")
    assert told.command == "exhume ?.toml" and told.command in page


@given(st.integers(0, 5000), st.integers(2, 700))
@settings(deadline=None)
def test_thinning_keeps_both_ends_and_the_order(length, limit):
    index = kept(length, limit)
    assert len(index) == min(length, limit)
    assert list(index) == sorted(set(index))
    if length:
        assert index[0] == 0 and index[-1] == length - 1


def test_long_curves_are_thinned(tmp_path):
    trace, spectrum = (tuple(float(i) for i in range(k, 0, -1)) for k in (1201, 1500))
    attack = reports.attack_result(reconstruction(draw(2, 3), trace=trace, spectrum=spectrum))
    assert len(attack.trace) == TRACE_LIMIT and len(attack.spectrum) == SPECTRUM_LIMIT
    assert (attack.trace[0], attack.trace[-1], attack.trace_length) == (1201.0, 1.0, 1201)
    assert (attack.spectrum[0], attack.spectrum[-1], attack.spectrum_length) == (1500.0, 1.0, 1500)


# The page


def test_names_from_outside_are_escaped(tmp_path):
    truth = Truth(train=draw(2, 3, seed=1), control=draw(2, 3, seed=2))
    found = reconstruction(near(truth), name=EVIL, status=EVIL, reason=EVIL, assumed=(EVIL,))
    model = evidence(3)
    model = replace(model, final={f"{EVIL}{name}": p for name, p in model.final.items()})
    report = reports.build(
        replace(model, forward=lambda params, u: u.sum(1, keepdim=True), init=None, chain=None),
        [reports.attack_result(found, match(found, truth)), reports.failed_attack(EVIL + "2", EVIL)],
        seed=0,
        verdict="leak",
        reasons=[EVIL],
        features=[EVIL, '" onload="alert(1)', "&amp;"],
        command=EVIL,
    )
    folder = reports.prepare(tmp_path / "out")
    page = reports.write(folder, report, [found], truth=truth, include_images=True).read_text()
    assert "<script" not in page and ' onload="alert' not in page
    assert page.count("&lt;script&gt;") >= 12
    assert "&amp;amp;" in page
    assert strict(folder / JSON)["attacks"][0]["name"] == EVIL


def test_the_page_asks_the_network_for_nothing(tmp_path):
    truth = image_truth()
    found = certified(reconstruction(near(truth), **CURVES))
    _, page = write(tmp_path / "out", evidence(1, 6, 6), [found], truth, include_images=True)
    links = re.findall(r"""(?:src|href|action|data|poster)\s*=\s*["']?([^"'>\s]*)|url\(([^)]*)\)""", page)
    assert links
    assert all((a or b).startswith(("data:image/png;base64,", "#")) for a, b in links)
    assert not re.search(r"https?://|<script|<link|<iframe|@import|<object", page)


def test_the_page_has_its_parts_in_order(tmp_path):
    truth = image_truth()
    _, page = write(
        tmp_path / "out",
        evidence(1, 6, 6),
        [reconstruction(near(truth), **CURVES)],
        truth,
        verdict="no evidence",
        reasons=["Chance explains it."],
    )
    parts = [
        "No evidence of leakage with these attacks.",
        "Chance explains it.",
        'class="own">training rows',
        "never seen by the model",
        "random candidates<span>",
        "mean image",
        "Recovered images",
        "Loss after each step",
        "Singular values",
        "Error of each row",
        "assumed to know",
        "features lie between 0 and 1",
        "No evidence is not safety.",
        "how to repeat this run",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_no_chart_shares_an_id_with_another(tmp_path):
    truth = image_truth()
    founds = [reconstruction(near(truth), name, **CURVES) for name in ("one", "two")]
    _, page = write(tmp_path / "out", evidence(1, 6, 6), founds, truth)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert ids and len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', page)) <= set(ids)


def test_a_failed_attack_stays_beside_a_good_one(tmp_path):
    failed = reports.failed_attack("doomed", MemoryError("no memory left"), 4.0)
    found = reconstruction(draw(3, 1, 6, 6))
    told, page = write(tmp_path / "out", evidence(1, 6, 6), [found], extra=[failed])
    assert [(a.name, a.status) for a in told.attacks] == [("exhume", "converged"), ("doomed", "failed")]
    assert told.attacks[1].error == "no memory left"
    assert "Failed: no memory left" in page and "doomed" in page


def test_a_report_of_failures_alone_can_be_written(tmp_path):
    _, page = write(tmp_path / "out", evidence(3), [], extra=[reports.failed_attack("doomed", ValueError())])
    assert "Failed: ValueError" in page and "There is no curve to show." in page
    assert load_file(tmp_path / "out" / TENSORS) == {}


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (30,), (2, 5), (4, 2, 5), (50,)])
@pytest.mark.parametrize("m", [0, 2, 70])
def test_samples_of_any_shape_are_shown(shape, m):
    found = reconstruction(draw(m, *shape))
    report = reports.build(evidence(*shape), [reports.attack_result(found)], seed=0)
    shown = gallery(found, report.attacks[0], report.target, None)
    image = shape in ((6, 6), (3, 6, 6))
    assert len(shown.cards) + shown.hidden == m and len(shown.cards) == min(m, 60 if image else 12)
    assert all(len(card.pictures) == image for card in shown.cards)
    assert all(
        len(card.values) + shown.hidden_features == (0 if image else found.x[0].numel())
        for card in shown.cards
    )


def test_what_the_page_leaves_out_is_said(tmp_path):
    _, page = write(
        tmp_path / "out", evidence(50), [reconstruction(draw(13, 50)), reconstruction(draw(0, 50), "b")]
    )
    assert "1 more candidate and 10 more features of each" in page
    assert "The attack returned no candidate." in page


def test_an_image_is_drawn_pixel_for_pixel():
    image = torch.tensor([[0.0, 0.5, 1.0], [-1.0, 2.0, float("nan")], [0.2, 0.4, 0.6]])
    uri = png(image, 0.0, 1.0)
    pixels = imread(io.BytesIO(base64.b64decode(uri.partition(",")[2])))[..., :3]
    wanted = image.nan_to_num(nan=0.0).clamp(0, 1)[..., None].expand(-1, -1, 3)
    assert abs(pixels - wanted.numpy()).max() < 0.5 / 255 + 1e-6


# Real rows


@pytest.mark.parametrize("include", [False, True])
def test_real_images_are_shown_on_request_only(tmp_path, include):
    truth = image_truth()
    _, page = write(
        tmp_path / "out",
        evidence(1, 6, 6, low=0.0, high=1.0),
        [reconstruction(near(truth, 0.1))],
        truth,
        include_images=include,
    )
    assert all((png(row, 0.0, 1.0) in page) == include for row in truth.train)
    assert any(png(row, 0.0, 1.0) in page for row in truth.control) == include


@pytest.mark.parametrize("include", [False, True])
def test_real_values_of_a_table_are_shown_on_request_only(tmp_path, include):
    planted = torch.tensor([[712.3, 0.04561, 98.76], [301.7, 0.07772, 55.55]], dtype=torch.float64)
    control = torch.tensor([[611.9, 0.03333, 44.44], [505.1, 0.02222, 33.33]], dtype=torch.float64)
    truth = Truth(train=planted, control=control, public_scale=torch.tensor([100.0, 0.01, 10.0]))
    found = reconstruction(planted * (1 + 0.01 * draw(2, 3, seed=5)))
    write(tmp_path / "out", evidence(3), [found], truth, include_images=include)
    page = (tmp_path / "out" / HTML).read_text()
    assert all((f"{value:.4g}" in page) == include for value in planted.flatten())
    # |x_hat - x| of one feature would give x away, so it must be nowhere either
    numbers = set(re.findall(r"\d\.?\d*e?-?\d*", (tmp_path / "out" / JSON).read_text()))
    secret = [*planted.flatten(), *control.flatten(), *(found.x - planted).abs().flatten()]
    assert not {f"{float(value)!r}" for value in secret} & numbers
    tensors = torch.cat([t.flatten() for t in load_file(tmp_path / "out" / TENSORS).values()])
    assert not torch.isin(torch.cat([planted, control]).flatten(), tensors).any()


def test_beside_a_match_stands_its_own_row_else_the_nearest():
    truth = Truth(train=torch.eye(4, 5, dtype=torch.float64), control=torch.ones(2, 5, dtype=torch.float64))
    x = torch.cat([1.01 * truth.train[[2]], torch.tensor([[0.1, 0.9, 0.1, 0.1, 0.9]])])
    found = reconstruction(x.double())
    report = reports.build(evidence(5), [reports.attack_result(found, match(found, truth))], seed=0)
    cards = gallery(found, report.attacks[0], report.target, truth).cards
    assert [[value.train for value in card.values].index("1") for card in cards] == [2, 1]
    assert [card.matched for card in cards] == [True, False]


@pytest.mark.parametrize(("n", "k"), [(3, 3), (3, 7), (4, 2)])
@pytest.mark.parametrize("public", [False, True])
def test_control_errors_are_those_the_match_counts(n, k, public):
    train, control = draw(n, 4, seed=1), draw(k, 4, seed=2)
    control[-1] = control[0]  # rows of a table may repeat
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    truth = Truth(train, control, public_mean=draw(4, seed=3) if public else None, public_scale=scale)
    x = control[torch.arange(5) % k] + 0.1 * draw(5, 4, seed=4)
    centre = truth.public_mean if public else control[n:].mean(0) if k > n else torch.zeros(4)
    distance = relative_l2(x, control[:n], centre, scale)
    slow = [float(distance[pair]) for pair in assign(distance, 0.3).items()]
    errors = control_errors(reconstruction(x), truth)
    assert sorted(errors) == pytest.approx(sorted(slow))
    assert sum(error < 0.3 for error in errors) == match(x, truth).control.count


# The output folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_that_exhume_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years")
    (tmp_path / JSON).write_text("somebody else's")
    before = contents(tmp_path)
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"must be new, empty or made by exhume.*--force"):
            reports.prepare(tmp_path, resume=resume)
    report = reports.build(evidence(3), [], seed=0)
    with pytest.raises(OutputError, match=r"call exhume\.report\.prepare"):
        reports.write(tmp_path, report, [])
    assert contents(tmp_path) == before
    assert reports.prepare(tmp_path, force=True) == tmp_path
    assert (tmp_path / "thesis.tex").read_text() == "ten years"


def test_an_earlier_run_is_overwritten_with_force_or_resumed(tmp_path):
    folder = reports.prepare(tmp_path / "a" / "b")
    assert reports.prepare(folder) == folder  # nothing but the marker in it yet
    (folder / JSON).write_text("{}")
    with pytest.raises(OutputError, match="holds an earlier run"):
        reports.prepare(folder)
    assert reports.prepare(folder, resume=True) == reports.prepare(folder, force=True) == folder
    assert (folder / JSON).read_text() == "{}" and (folder / MARKER).is_file()


def test_an_empty_folder_is_taken(tmp_path):
    assert reports.prepare(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_no_output_folder(tmp_path, force):
    file = tmp_path / "out"
    file.write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        reports.prepare(file, force=force)
    with pytest.raises(OutputError, match="must be writable"):
        reports.prepare(file / "below", force=force)
    assert file.read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / JSON
    write_atomically(path, b"old")

    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(OutputError, match="No space left"):
        write_atomically(path, b"new")
    assert contents(tmp_path) == {JSON: b"old"}


def test_only_the_report_files_are_written(tmp_path):
    write(tmp_path / "out", evidence(3), [reconstruction(draw(2, 3))])
    assert contents(tmp_path / "out").keys() == {MARKER, JSON, HTML, TENSORS}


def test_the_tensors_of_one_attack_have_plain_names(tmp_path):
    found = reconstruction(draw(4, 1, 6, 6).transpose(2, 3))
    write(tmp_path / "out", evidence(1, 6, 6), [found])
    stored = load_file(tmp_path / "out" / TENSORS)
    assert stored.keys() == {"x", "coef", "label"}
    assert all(torch.equal(value, getattr(found.candidates, name)) for name, value in stored.items())


def test_the_tensors_of_several_attacks_carry_their_names_even_if_one_failed(tmp_path):
    founds = [reconstruction(draw(2, 3)), reconstruction(draw(4, 3), name="loo")]
    write(tmp_path / "two", evidence(3), founds)
    names = [f"{attack}.{name}" for attack in ("exhume", "loo") for name in ("x", "coef", "label")]
    assert sorted(load_file(tmp_path / "two" / TENSORS)) == sorted(names)
    write(tmp_path / "one", evidence(3), founds[:1], extra=[reports.failed_attack("loo", "no memory")])
    assert sorted(load_file(tmp_path / "one" / TENSORS)) == sorted(names[:3])


def test_reconstructions_of_another_run_are_refused(tmp_path):
    report = reports.build(evidence(3), [reports.attack_result(reconstruction(draw(2, 3)))], seed=0)
    folder = reports.prepare(tmp_path / "out")
    for found in (reconstruction(draw(3, 3)), reconstruction(draw(2, 3), name="loo")):
        with pytest.raises(ExhumeError, match="must be those the report tells of"):
            reports.write(folder, report, [found])


# What the report says of the model and the attacker


def test_the_attackers_knowledge_is_read_off_the_evidence():
    known = evidence(3, low=0.0, high=1.0, mean=torch.tensor(0.5))
    rich = {fact.item: fact for fact in reports.build(known, [], seed=0, samples=7).knowledge}
    poor = {
        fact.item: fact
        for fact in reports.build(replace(evidence(3), init=None, recipe=Recipe()), [], seed=0).knowledge
    }
    for item in ("initial weights", "input range", "number of training rows", "training recipe"):
        assert rich[item].known and not poor[item].known
    for facts in (rich, poor):
        assert facts["trained weights"].known
        assert not facts["labels"].known and not facts["training rows"].known
    assert rich["number of training rows"].detail == "7" and rich["input range"].detail == "from 0 to 1"
    assert rich["preprocessing"].detail == "a mean is subtracted"
    assert rich["training recipe"].detail.startswith("loss mse; not known: reduction")
    assert rich["architecture"].detail == "dense layers 3–4–2, activation relu"


def test_the_target_is_described():
    model = evidence(3)
    target = reports.build(model, [], seed=0).target
    assert (target.parameters, target.outputs, target.dtype) == (26, 2, "float32")
    assert [layer.shape for layer in target.layers] == [(4, 3), (4,), (2, 4), (2,)]
    start, end = (torch.cat([p.flatten() for p in model.at(node).values()]) for node in (0.0, 1.0))
    assert target.relative_change == pytest.approx(float((end - start).norm() / start.norm()))
    assert reports.build(replace(model, init=None), [], seed=0).target.relative_change is None


def test_feature_names_must_fit():
    with pytest.raises(ExhumeError, match="name each of the 3 features"):
        reports.build(evidence(3), [], seed=0, features=["age"])


def test_two_attacks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="different names"):
        reports.build(evidence(3), [reports.failed_attack("a", "x")] * 2, seed=0)


def test_importing_the_report_does_not_import_its_drawing_tools():
    code = "import sys, exhume.report; print({'matplotlib', 'jinja2', 'torchmetrics'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
