"""Random features as a scikit-learn transformer: `RBFSampler` with a choice of coupling."""

from numbers import Integral, Real
from typing import Any, Literal

import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from performer import couplings, features
from performer.typing import Coupling

# One compiled program for each shape and dtype, shared by all transformers of any gamma.
_features = jax.jit(features.trigonometric)


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Random Fourier features: a linear model on them approximates one with the RBF kernel.

        phi(x).phi(y) is an unbiased estimate of exp(-gamma |x - y|^2)

    with m = n_components / 2 frequencies, their m sines first, then their m cosines. The frequencies
    are drawn jointly, by a coupling; most of them have a lower error than the independent ones
    ("iid") for the same number of columns, at the same cost of `transform`.

    Sources: Rahimi and Recht 2007; Reid et al. (VRC), Def. 3.3, for the coupling "pnc".

    Parameters:
        coupling: joint law of the frequencies: a name that `performer.couplings.get` knows ("pnc",
            "orf", "simrf+", "iid", ...) or a function (key, m, d) -> (m, d). With lengths of another
            law (`norms.matern`) the kernel is that law's, of sqrt(2 gamma) |x - y|. Antithetic
            couplings waste half the columns: w and -w have the same features up to signs.
        n_components: number of output columns, even: 2m.
        gamma: positive, in 1 / (units of X)^2; the lengthscale is 1 / sqrt(2 gamma). Or "scale" for
            1 / (n_features * X.var()) of the X that is fitted (1 where that variance is 0).
        random_state: an integer for the same frequencies in every fit, a `RandomState`, or None.

    Attributes:
        frequencies_: the draw of the coupling, (m, n_features), before gamma.
        gamma_: gamma as a number.
        n_features_in_: width of X in fit.
        feature_names_in_: names of its columns, where they are all strings.

    Raises (in `fit`; setting a parameter never does):
        ValueError: for n_components that is not positive and even (an antithetic coupling needs a
            multiple of 4), gamma that is not positive and finite, an unknown coupling, or one that
            returns another shape; for X that is not a dense, finite, two-dimensional array.

    Example:
        >>> X, y = sklearn.datasets.load_diabetes(return_X_y=True)
        >>> features = RandomFeatures(n_components=200, gamma=0.05, random_state=0)
        >>> model = make_pipeline(StandardScaler(), features, Ridge())
        >>> search = GridSearchCV(model, {"randomfeatures__coupling": ["iid", "orf", "pnc"]})
        >>> search.fit(X, y).best_params_
    """

    def __init__(
        self,
        coupling: str | Coupling = "pnc",
        n_components: int = 100,
        gamma: float | Literal["scale"] = 1.0,
        random_state: int | np.random.RandomState | None = None,
    ):
        self.coupling = coupling
        self.n_components = n_components
        self.gamma = gamma
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "RandomFeatures":
        """Draws the frequencies; of X it uses the width and, for gamma="scale", the variance."""
        X = validate_data(self, X, dtype=(np.float64, np.float32))
        coupling, m, self.gamma_ = self._coupling(), self._num_frequencies(), self._gamma(X)
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        with jax.enable_x64(False):  # the same draw whatever the global setting is
            frequencies = np.array(coupling(jax.random.key(seed), m, X.shape[1]))
        if frequencies.shape != (m, X.shape[1]):
            raise ValueError(
                f"coupling must return (m, d) = {(m, X.shape[1])}, got {frequencies.shape}"
            )
        self.frequencies_ = frequencies
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The features (n, n_components), float32 for float32 inputs and float64 for all others."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        with jax.enable_x64(X.dtype == np.float64):
            phi = _features(X, self.frequencies_, lengthscale=(2 * self.gamma_) ** -0.5)
        return np.array(phi)  # a copy: JAX's own memory is read-only

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @property
    def _n_features_out(self) -> int:
        return 2 * len(self.frequencies_)

    def _coupling(self) -> Coupling:
        if callable(self.coupling):
            return self.coupling
        if isinstance(self.coupling, str):
            return couplings.get(self.coupling)
        raise ValueError(
            f"coupling must be a name or a function (key, m, d) -> (m, d), got {self.coupling!r}"
        )

    def _num_frequencies(self) -> int:
        n = self.n_components
        if isinstance(n, Integral) and n > 0 and n % 2 == 0:
            return int(n) // 2
        fix = f"; use {n + 1}" if isinstance(n, Integral) and n > 0 else ""
        raise ValueError(
            "n_components must be a positive even integer (a sine and a cosine for each"
            f" frequency), got {n!r}{fix}"
        )

    def _gamma(self, X: np.ndarray) -> float:
        if isinstance(self.gamma, str) and self.gamma == "scale":
            variance = float(X.var())
            return 1 / (X.shape[1] * variance) if variance else 1.0
        if isinstance(self.gamma, Real) and 0 < self.gamma < float("inf"):
            return float(self.gamma)
        raise ValueError(f"gamma must be positive and finite, or 'scale', got {self.gamma!r}")
