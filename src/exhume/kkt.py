"""Our own attack on final weights alone: corners of the box in the row space, else a descent; no truth is seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from exhume.ambiguity import ambiguity
from exhume.candidates import Candidates
from exhume.certificate import WITNESS, Certificate, certify
from exhume.change import affine, decayed_target
from exhume.clock import Clock, Observer
from exhume.descent import Descent
from exhume.equations.part import split
from exhume.equations.span import Span
from exhume.evidence import Evidence
from exhume.moves.corners import Corners, Found, independent
from exhume.moves.guide import Leverage, by_leverage
from exhume.objective import Objective
from exhume.reconstruction import Reconstruction
from exhume.spaces import Space, subspace
from exhume.survey import survey

GAP, CLEAR = (
    10.0,
    100.0,
)  # a smaller drop in the spectrum is no rank; one that is not the largest must be clear
NORMS = (0.2, 5.0)  # of a model input, relative to the estimate
LEAST = 10  # active bounds of a corner that is certified, however few dimensions there are
AGREE = 0.01  # relative distance within which two searches found the same corner
NOTE = (
    "A corner by accident has as many active bounds as the row space has dimensions; a certified candidate has twice"
    " as many, was found again from other hidden units, and unless labels are real has the margin of a sample."
)


@dataclass(frozen=True, eq=False)
class RowSpace:
    """Where the first layer's final weights confine the samples.

    Args:
        space: the affine hull of the samples if the first bias decays as the weights do, else their linear span.
        rank: of the first layer.
        gap: drop of the spectrum there.
        spectrum: singular values.
        whole: whether the hull is affine.
    """

    space: Space
    rank: int
    gap: float
    spectrum: Tensor
    whole: bool

    @property
    def norm(self) -> float | None:
        """Typical norm of a sample, exact where samples are orthogonal; None where the hull is not affine."""
        return None if self.space.origin is None else self.rank**0.5 * float(self.space.origin.norm())


def row_space(evidence: Evidence, samples: int | None, units: Tensor | None = None) -> RowSpace | None:
    """Read the samples' span off the first layer, sum_i delta_i (x_i, 1); None if its spectrum shows no rank.

    Args:
        evidence: of a dense chain; its initial weights are not used.
        samples: their number, if known: the rank is no larger.
        units: hidden units to read it off; None for all.
    """
    chain = evidence.chain
    assert chain is not None
    target = decayed_target(replace(evidence, init=None), survey(replace(evidence, init=None)).decay)
    weight, name = target[chain.weights[0]], chain.biases[0]
    share = evidence.recipe.share
    whole = name is not None and share(name) == share(chain.weights[0]) > 0
    rows = torch.cat([weight, target[name][:, None]], 1) if whole and name is not None else weight
    rows = rows if units is None else rows[units]
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    # The last singular value over rounding is no gap: what is left of the initialisation has full rank.
    most = min(len(values) - 1, samples or len(values))
    floor = float(torch.finfo(evidence.stored_dtype).eps * values[0])
    clipped = values.clamp_min(floor)
    drops = clipped[:most] / clipped[1 : most + 1]
    # Weak samples come after large drops too: the last clear one counts, and where none is clear the largest.
    clear = (drops >= CLEAR).nonzero()[:, 0]
    last = int(clear[-1]) if len(clear) else int(drops.argmax())
    rank, gap = last + 1, float(drops[last])
    if gap < GAP or float(values[0]) <= floor or rank >= min(rows.shape) - 1:
        return None
    space = affine(right[:rank]) if whole else subspace(right[:rank])
    return RowSpace(space, rank, gap, values, whole) if space.basis is not None else None


@dataclass(frozen=True)
class KKTAttack:
    """Recover samples from final weights alone.

    Where the first layer shows a rank and the range of the features is known, samples are sought as corners of the
    box in the row space, twice on different hidden units; the equation of final weights alone and the margins of the
    network then tell which are real. Elsewhere the equation is solved by a descent.

    Args:
        name: shown in reports.
        corners: the search.
        leverage: says where to look for corners, where the second layer tells samples apart.
        descent: what is done where there are no corners.
        samples: number of samples, if known; the rank of the first layer serves otherwise.
        held_out: share of the hidden units left out, and predicted for the certificate.
        margin: largest ratio of a sample's margin to the typical one, or its inverse.
        margin_mse: the same where training was on squared loss, which draws outputs to labels.
    """

    name: str
    corners: Corners
    leverage: Leverage
    descent: Descent
    samples: int | None = None
    held_out: float = 0.2
    margin: float = 1.6
    margin_mse: float = 1.05

    def missing(self, evidence: Evidence) -> tuple[str, ...]:
        """What the attack needs and the evidence lacks."""
        return replace(self.descent, samples=self.samples).missing(evidence)

    def run(
        self,
        evidence: Evidence,
        seed: int = 0,
        budget: float | None = None,
        observer: Observer | None = None,
    ) -> Reconstruction:
        """Reconstruct samples from the evidence alone.

        Args:
            evidence: final weights, forward function and input specification.
            seed: of the searches.
            budget: seconds after which the best result so far is returned.
            observer: told about progress.

        Raises:
            MissingEvidence: there is no rank to tell the number of samples, and it is not stated.
        """
        evidence, box = replace(evidence, init=None), evidence.input.box()
        rows = None if evidence.chain is None or box is None else row_space(evidence, self.samples)
        if rows is None or box is None:
            why = "no corners were sought: no plain dense network, no rank of its first layer, or no range"
            return self._descend(evidence, seed, budget, observer, why)
        clock = Clock(budget, observer)
        found = self._search(evidence, rows, seed, clock.part(0.5))
        if not len(independent(found.z, self.corners.apart)):
            left = None if budget is None else max(budget - clock.elapsed, 0.0)
            why = f"no corners of the box were found in the row space of the first layer, of rank {rows.rank}"
            return self._descend(evidence, seed, left, observer, why)
        other = self._search(evidence, rows, seed + WITNESS, clock)
        return self._report(evidence, rows, found, other, seed, clock)

    def _descend(
        self, evidence: Evidence, seed: int, budget: float | None, observer: Observer | None, why: str
    ) -> Reconstruction:
        found = replace(self.descent, samples=self.samples).run(evidence, seed, budget, observer)
        return replace(found, attack=self.name, assumed=(*found.assumed, why))

    def _search(self, evidence: Evidence, rows: RowSpace, seed: int, clock: Clock) -> Found:
        """Corners in the row space of some of the hidden units, in the coordinates of the whole."""
        parts, box = split(evidence, "all", self.held_out, seed), evidence.input.box()
        assert box is not None
        seen = None if parts is None else row_space(evidence, rows.rank, parts[0].units)
        # Fewer units can show a lower rank: then all are used, and the witness is one of other starts alone.
        used = seen if seen is not None and seen.rank == rows.rank else rows
        units = None if parts is None or used is rows else parts[0].units
        norm = used.norm or survey(evidence).norm
        bounded = used.space.within((NORMS[0] * norm, NORMS[1] * norm))
        search = partial(
            self.corners.precise(1 / used.gap).run,
            used.space,
            *box,
            torch.Generator().manual_seed(seed),
            lambda done: clock.tick(f"{done} corners of the box in the row space", None),
        )
        guide = by_leverage(self.leverage, evidence, bounded, rows.rank, norm, units)
        found = search(guide)
        if guide is not None and not len(found.z) and not clock.expired:
            found = search(
                None
            )  # no corner at all has little leverage: the weights are not where they were held for
        return replace(found, z=rows.space.coordinates(used.space.expand(found.z)))

    def _report(
        self, evidence: Evidence, rows: RowSpace, found: Found, other: Found, seed: int, clock: Clock
    ) -> Reconstruction:
        space, shape = rows.space, evidence.input.shape
        most = rows.rank
        usual = self._usual(evidence, space, found, most)
        # Corners of a plausible margin first, each kind by the bounds that meet there.
        order = (found.active + found.active.max() * usual).argsort(descending=True, stable=True)
        kept = order[independent(found.z[order], self.corners.apart)][:most]
        z, active, usual = found.z[kept], found.active[kept], usual[kept]
        ground = replace(survey(evidence), space=space)
        equation = Span(nodes=(1.0,))
        everything = Objective(equation.bind(evidence, space, ground.decay), space)
        point = everything.at(z)
        certificate: Certificate | None = None
        parts = split(evidence, "all", self.held_out, seed)
        if parts is not None:
            fit, held = (equation.bind(evidence, space, ground.decay, None, part) for part in parts)
            certificate = certify(evidence, fit, held, z, everything, point, space.expand(other.z))
            good = (certificate.agreement < AGREE) & usual & (active >= self._enough(space))
            certificate = replace(
                certificate, certified=certificate.certified & good, notes=(*certificate.notes, NOTE)
            )
        rank = active.argsort(descending=True)
        u = space.expand(z[rank]).view(-1, *shape)
        shown = f"the first layer has rank {rows.rank} (singular values drop {rows.gap:.2g}-fold there)"
        notes = [
            *ground.notes,
            f"{shown}: that many samples were sought, where {self.samples} were stated"
            if self.samples is not None and self.samples != rows.rank
            else f"{shown}: that many samples were sought",
            f"{len(found.z)} corners of the box in the {'affine hull' if rows.whole else 'span'} were found by"
            f" {found.programs} linear programs; the {len(z)} kept have {int(active.min())} to {int(active.max())}"
            f" active bounds, where {space.dim} would be chance",
            "the range of the features is exact: samples that do not reach its ends are not found this way",
            *(["moves were asked for, but corners are not moved"] if self.descent.moves is not None else []),
        ]
        return Reconstruction(
            attack=self.name,
            candidates=Candidates(evidence.input.decode(u), point.coef[rank], evidence.output(u)),
            importance=active[rank].double() / float(active.sum()),
            misfit=point.misfit,
            loss=point.loss,
            status="stopped" if clock.expired else "converged",
            reason="The run was ended early; the best result so far is reported."
            if clock.expired
            else "The search for corners was completed.",
            steps=found.programs,
            seconds=clock.elapsed,
            seed=seed,
            trace=(point.loss,),
            assumed=tuple(notes),
            spectrum=tuple(rows.spectrum.tolist()),
            rank=rows.rank,
            certificate=None if certificate is None else certificate.take(rank),
            expected=self.samples,
            ambiguity=ambiguity(evidence, "all", self.samples, ground),
        )

    @staticmethod
    def _enough(space: Space) -> int:
        """Active bounds that no corner has by accident: twice as many as chance, and never a handful."""
        return max(2 * (space.dim + 1), LEAST)

    def _usual(self, evidence: Evidence, space: Space, found: Found, most: int) -> Tensor:
        """Whether the network separates a corner from other classes as far as it does the most active ones [k].

        At a stationary point samples have nearly one margin: those beyond it have no multiplier and leave no trace.
        """
        recipe = evidence.recipe
        if recipe.labels == "real":
            return torch.ones(len(found.z), dtype=torch.bool)
        margins = margin(evidence.output(space.expand(found.z).view(-1, *evidence.input.shape)))
        best = independent(found.z, self.corners.apart)[:most]
        # Where the search has missed samples, the rest of the basis is corners by accident.
        clear = best[found.active[best] >= self._enough(space)]
        ratio = margins / margins[clear if len(clear) else best].median().clamp_min(1e-300)
        reach = self.margin_mse if recipe.loss == "mse" else self.margin
        return (ratio < reach) & (ratio > 1 / reach)


def margin(out: Tensor) -> Tensor:
    """|f| with one output, the largest above the next with several [m]."""
    if out.shape[1] == 1:
        return out[:, 0].abs()
    top = out.topk(2, 1).values
    return top[:, 0] - top[:, 1]
