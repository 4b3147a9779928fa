"""Fit again with what the first fit has told: equation weights, labels, and signs of multipliers.

The span equation holds up to a misfit of its own, larger in some parameter groups than in others. Weights of one over
the misfit of each group make its least-squares solution the efficient one (feasible generalised least squares;
Aitken 1936). A network trained to zero squared loss also satisfies f(x_i; theta_f) = y_i, as many equations more as
it has samples and outputs. And the multipliers at theta_0 push each output towards its label, which gives their sign.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from exhume.equations.base import Bound
from exhume.equations.fold import Folded
from exhume.equations.recipe import labels
from exhume.equations.span import EquationWeights, groups
from exhume.evidence import Evidence
from exhume.spaces import Space
from exhume.terms import Fitted


@dataclass(frozen=True)
class Sharpen:
    """What a second fit uses.

    Args:
        weights: equation weights from the misfit of the first fit.
        output: the equation f(x; theta_f) = y, where the recipe says squared loss and which labels.
        signs: multipliers at theta_0 with the sign of the label, where the recipe says which loss.
    """

    weights: bool = True
    output: bool = True
    signs: bool = True


def estimated(equation: Bound, net: Folded, residual: Tensor) -> EquationWeights:
    """Weights of one over the root mean square residual of each parameter group, relative to the biases'.

    Args:
        equation: bound with any weights.
        net: the folded net, whose parameters the equations belong to.
        residual: of the fit, t - Phi' c [P].
    """
    found = {}
    for group, names in groups(net.init, net.chain).items():
        ones = {k: torch.full_like(p, float(k in names)) for k, p in net.init.items()}
        scale = equation.vector(ones)
        own = scale > 0
        if bool(own.any()):
            found[group] = 1 / float((residual[own] / scale[own]).square().mean().sqrt().clamp_min(1e-300))
    unit = found.get("bias", max(found.values()))
    return EquationWeights(**{f.name: found.get(f.name, unit) / unit for f in fields(EquationWeights)})


def fitted(evidence: Evidence, u: Tensor, noise: float, energy: float) -> Fitted | None:
    """The output equation, weighted by how far the candidates' outputs are from labels now.

    noise^2 / (energy * median |f - y|^2)

    Args:
        evidence: its recipe must state squared loss, and labels that are not the outputs themselves.
        u: the candidates as model inputs [m, d].
        noise: root mean square residual of one weighted equation.
        energy: |t|^2, which the loss is relative to.

    Returns:
        The term, or None where no such equation holds.
    """
    recipe = evidence.recipe
    if recipe.loss != "mse" or recipe.labels not in ("pm1", "01", "onehot"):
        return None
    params, shape = evidence.at(1.0), evidence.input.shape

    def output(u: Tensor) -> Tensor:
        return evidence.forward(params, u.view(-1, *shape)).flatten(1)

    def label(u: Tensor) -> Tensor:
        return labels(evidence, u.view(-1, *shape))

    missed = float((output(u) - label(u)).square().median())
    return Fitted(output, label, noise**2 / (energy * max(missed, 1e-12)))


def signs(evidence: Evidence, space: Space, nodes: tuple[float, ...], z: Tensor) -> Tensor:
    """Signs of the multipliers at candidates z [m, q], -1, 0 or 1, [m, k]: those of the label at node 0, others free.

    Gradient descent starts at outputs near zero, so its first steps push each output towards its label: for one
    output in the direction of a label of +-1; for several in that of the candidate's own class, and with softmax away
    from all others.
    """
    recipe, c = evidence.recipe, evidence.outputs
    free = z.new_zeros(len(z), len(nodes), c)
    y = labels(evidence, space.expand(z).view(-1, *evidence.input.shape))
    if recipe.loss == "cross-entropy":
        head = 2 * y - 1
    elif recipe.labels == "onehot":
        head = F.one_hot(y.argmax(1), c).to(z.dtype)
    elif recipe.labels == "pm1" or recipe.loss in ("logistic", "bce"):
        head = y.sign()
    else:
        return free.flatten(1)
    at_start = torch.tensor([v == 0.0 for v in nodes])
    free[:, at_start] = head[:, None]
    return free.flatten(1)
