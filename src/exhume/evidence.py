"""What the attacker knows: a pure forward function, weights, and the input specification; never data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from exhume.errors import CheckpointError, ModelError
from exhume.functional import DenseChain, Head, call, find_head, recognise

Parameters = dict[str, Tensor]
Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class InputSpec:
    """Shape and range of one sample x, and the map u = (x - mean) / scale to what the model sees.

    Args:
        shape: shape of one sample, without the batch dimension.
        low: smallest value a feature of x can take, if known.
        high: largest value.
        mean: subtracted from x; a scalar tensor or one broadcastable to `shape`.
        scale: divides x - mean; likewise.
        sample_norm: norm of every model input u, where the owner normalises each sample.
    """

    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    mean: Tensor | None = None
    scale: Tensor | None = None
    sample_norm: float | None = None

    @property
    def size(self) -> int:
        """Number of features d."""
        return int(torch.Size(self.shape).numel())

    def _affine(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.zeros(()) if self.mean is None else self.mean
        scale = torch.ones(()) if self.scale is None else self.scale
        return mean.to(like), scale.to(like)

    def encode(self, x: Tensor) -> Tensor:
        """Map samples x [m, *shape] to model inputs u [m, *shape]."""
        mean, scale = self._affine(x)
        return (x - mean) / scale

    def decode(self, u: Tensor) -> Tensor:
        """Map model inputs u [m, *shape] back to samples x [m, *shape]."""
        mean, scale = self._affine(u)
        return u * scale + mean

    def box(self) -> tuple[Tensor, Tensor] | None:
        """Return the lower and upper bound of u, each [d] in float64, or None without `low` and `high`."""
        if self.low is None or self.high is None:
            return None
        ends = torch.stack([torch.full(self.shape, v, dtype=torch.float64) for v in (self.low, self.high)])
        ends = self.encode(ends).flatten(1)
        return ends.amin(0), ends.amax(0)  # a negative scale swaps the ends


@dataclass(frozen=True)
class Recipe:
    """What is known of the training run; every field may be unknown (None).

    `decay_share` holds patterns of parameter names, each with the weight decay of those parameters relative to
    `weight_decay`; the first pattern that fits counts, and parameters that none fits have all of it.
    """

    loss: str | None = None
    reduction: str | None = None
    labels: str | None = None
    optimizer: str | None = None
    lr: float | None = None
    steps: int | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    batch_size: int | None = None
    decay_share: tuple[tuple[str, float], ...] | None = None

    def share(self, name: str) -> float:
        """Weight decay of a parameter relative to `weight_decay`."""
        return next((share for pattern, share in self.decay_share or () if fnmatch(name, pattern)), 1.0)


@dataclass(frozen=True, eq=False)
class Evidence:
    """All an attack may use.

    Args:
        forward: pure function f(params, u) of model inputs u [m, *shape], returns outputs [m, C].
        final: trained parameters theta_f by name, as stored (their dtype tells how precise they are).
        input: what is known of the inputs.
        init: parameters theta_0 before training, same names and shapes, if known.
        recipe: what is known of the training run.
        chain: the dense layers, if the model is a recognised multi-layer perceptron.
        head: the linear layer that the model ends in, if it does.
        dropout: whether the module has layers that drop activations in training.
    """

    forward: Forward
    final: Parameters
    input: InputSpec
    init: Parameters | None = None
    recipe: Recipe = field(default_factory=Recipe)
    chain: DenseChain | None = None
    head: Head | None = None
    dropout: bool = False

    @property
    def outputs(self) -> int:
        """Number of outputs C."""
        return int(self.output(torch.zeros(1, *self.input.shape, dtype=torch.float64)).shape[1])

    @property
    def stored_dtype(self) -> torch.dtype:
        """The coarsest dtype among the stored weights: it bounds the precision of any change of weights."""
        stored = [*self.final.values(), *(self.init or {}).values()]
        return max((p.dtype for p in stored), key=lambda dtype: torch.finfo(dtype).eps)

    def at(self, node: float) -> Parameters:
        """Return theta_0 + node * (theta_f - theta_0) in float64; node 1 needs no init."""
        final = {k: p.double() for k, p in self.final.items()}
        if node == 1.0 or self.init is None:
            return final
        return {k: torch.lerp(self.init[k].double(), p, node) for k, p in final.items()}

    def moved(self, name: str) -> bool:
        """Whether a parameter differs from its initial value, as far as is known."""
        return self.init is None or not torch.equal(self.init[name], self.final[name])

    def output(self, u: Tensor, node: float = 1.0) -> Tensor:
        """Return f(u; theta_node) [m, C] for model inputs u [m, *shape]."""
        with torch.no_grad():
            return _two_dimensional(self.forward(self.at(node), u.double()))

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        *,
        input: InputSpec,
        final: Mapping[str, Tensor] | None = None,
        init: Mapping[str, Tensor] | None = None,
        recipe: Recipe | None = None,
    ) -> Evidence:
        """Build evidence from a module without touching it.

        Args:
            model: gives the architecture; copied, switched to eval mode and to float64.
            input: what is known of the inputs.
            final: state dict of the trained model; by default that of `model`.
            init: state dict before training, if known.
            recipe: what is known of the training run.

        Raises:
            CheckpointError: keys, shapes or values of a state dict do not fit the model.
            ModelError: the forward pass fails on the input shape, is random, or couples the samples of a batch.
        """
        final = model.state_dict() if final is None else final
        trained = _fit_to(model, final, "final")
        initial = None if init is None else _fit_to(model, init, "init")
        twin = copy.deepcopy(model).cpu().eval().double().requires_grad_(False)
        twin.load_state_dict({k: v.detach().clone() for k, v in final.items()})
        names = {name for name, _ in twin.named_parameters()}

        def forward(params: Mapping[str, Tensor], u: Tensor) -> Tensor:
            return _two_dimensional(call(twin, params, u))

        _probe(forward, {k: p.double() for k, p in trained.items() if k in names}, input)
        return cls(
            forward=forward,
            final={k: p for k, p in trained.items() if k in names},
            init=None if initial is None else {k: p for k, p in initial.items() if k in names},
            input=input,
            recipe=recipe or Recipe(),
            chain=recognise(twin, input.shape),
            head=find_head(twin, input.shape),
            dropout=any(
                isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in twin.modules()
            ),
        )


def _two_dimensional(out: Tensor) -> Tensor:
    """Outputs as [m, C]; a model that returns [m] has one output."""
    return out.reshape(out.shape[0], -1)


def _fit_to(model: nn.Module, state: Mapping[str, Tensor], role: str) -> Parameters:
    """Check that a state dict fits the model and holds finite numbers; return a detached copy on the CPU."""
    wanted = model.state_dict()
    missing, extra = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    if missing or extra:
        raise CheckpointError(
            f"the {role} weights must have the model's keys, but lack {missing or 'none'} and have in excess"
            f" {extra or 'none'}; check that checkpoint and factory belong together"
        )
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"the {role} weight {name!r} must have shape {tuple(wanted[name].shape)} as the model does,"
                f" but has {tuple(tensor.shape)}; check that checkpoint and factory belong together"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"the {role} weights must be finite, but {name!r} holds NaN or infinity;"
                " audit a checkpoint from before the training diverged"
            )
    return {k: v.detach().to("cpu", copy=True) for k, v in state.items()}


def _probe(forward: Forward, params: Parameters, spec: InputSpec) -> None:
    """Run the forward pass on three made-up inputs: it must work, repeat itself, and treat samples apart."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, *spec.shape, generator=generator, dtype=torch.float64)
    state = torch.random.get_rng_state()
    try:
        with torch.no_grad():
            first, second, single = forward(params, u), forward(params, u), forward(params, u[:1])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the model must accept inputs of shape [batch, {', '.join(map(str, spec.shape))}], but failed"
            f" with {reason!r}; check [input] shape"
        ) from error
    finally:
        torch.random.set_rng_state(state)
    if not torch.equal(first, second):
        raise ModelError(
            "the forward pass must be deterministic in eval mode, but two runs on one input differ;"
            " remove the randomness from forward() (dropout must respect eval mode)"
        )
    if not torch.allclose(first[:1], single, rtol=1e-8, atol=1e-10):
        raise ModelError(
            "each output must depend on its own sample alone, but it changes with the rest of the batch;"
            " use running statistics (eval mode) in normalisation layers"
        )
