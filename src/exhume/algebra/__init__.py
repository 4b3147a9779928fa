"""Closed-form recovery of samples from two-layer networks with a polynomial activation.

`examine` decides from the weights whether they determine the samples, `recover` computes these from points and values
of the gradient field that the samples make, and `moment_starts` serves other activations. See docs/algebra.md.
"""

from exhume.algebra.examine import Examination as Examination
from exhume.algebra.examine import examine as examine
from exhume.algebra.field import Field as Field
from exhume.algebra.field import from_change as from_change
from exhume.algebra.field import from_checkpoints as from_checkpoints
from exhume.algebra.field import from_gradient as from_gradient
from exhume.algebra.field import from_stationary as from_stationary
from exhume.algebra.field import from_values as from_values
from exhume.algebra.identifiability import Identifiability as Identifiability
from exhume.algebra.identifiability import identify as identify
from exhume.algebra.moments import moment_starts as moment_starts
from exhume.algebra.recovery import Recovered as Recovered
from exhume.algebra.recovery import recover as recover
