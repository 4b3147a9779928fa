"""Targets with the same statistics and no answer, to say what chance looks like."""

from __future__ import annotations

from dataclasses import replace

import torch

from exhume.errors import MissingEvidence
from exhume.evidence import Evidence


def permuted(evidence: Evidence, seed: int) -> Evidence:
    """Reassign the change of weights to other hidden units of the first layer.

    The rows of [DW_1, Db_1] and the columns of DW_2 are permuted together, while theta_0 stays: spectrum, row space
    and norms are those of the target, but no input explains which unit changed how.

    Args:
        evidence: must have a dense chain with a hidden layer, and initial weights.
        seed: of the permutation.

    Raises:
        MissingEvidence: it has not.
    """
    chain, init = evidence.chain, evidence.init
    if chain is None or init is None or len(chain.weights) < 2:
        raise MissingEvidence(
            "a permuted target needs initial weights and a plain dense network with a hidden layer, but the"
            " evidence lacks them; use another null"
        )
    first, bias, second = chain.weights[0], chain.biases[0], chain.weights[1]
    width = init[first].shape[0]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    change = {k: evidence.final[k].double() - init[k].double() for k in init}
    change[first] = change[first][order]
    change[second] = change[second][:, order]
    if bias is not None:
        change[bias] = change[bias][order]
    final = {k: (init[k].double() + d).to(evidence.final[k].dtype) for k, d in change.items()}
    return replace(evidence, final=final)
