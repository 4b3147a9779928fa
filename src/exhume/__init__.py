"""exhume recovers training samples from the weights of trained networks, so that their owners can check first."""

from exhume import presets as presets
from exhume.evidence import Evidence as Evidence
from exhume.evidence import InputSpec as InputSpec
from exhume.evidence import Recipe as Recipe
from exhume.matching import match as match
from exhume.snapshot import snapshot as snapshot
from exhume.targets import load as load
from exhume.truth import Truth as Truth

__version__ = "0.1.0"
