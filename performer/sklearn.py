"""Random features as a scikit-learn transformer: `RBFSampler` with a choice of coupling."""

from functools import partial
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from performer import features, kernels

__all__ = ["RandomFeatures"]


@partial(jax.jit, static_argnames=("kernel", "odd"))
def _features(x, frequencies, phase, lengthscale, *, kernel, odd):
    """Columns of the feature map; if odd the last frequency has one, cos(w.x + phase), for two.

    With a uniform phase that is half of what two columns are on average, and n of these halves make
    the mean: unbiased for any n.
    """
    m = len(frequencies)
    weights = jnp.full(m, 2 / (2 * m - odd))
    phi = kernel.feature_map(x, frequencies, weights=weights, lengthscale=lengthscale)
    if not odd:
        return phi
    sines, cosines = phi[:, :m], phi[:, m:]
    last = jnp.cos(phase) * cosines[:, -1:] - jnp.sin(phase) * sines[:, -1:]
    return jnp.concatenate([sines[:, :-1], cosines[:, :-1], last], axis=1)


_DTYPES = (np.float64, np.float32)  # all others become the first


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Random features: a linear model on them approximates one with the kernel.

        phi(x).phi(y) is an unbiased estimate of exp(-gamma |x - y|^2)

    if the kernel is "rbf", with m = n_components / 2 frequencies: their m sines, then their m
    cosines. (If n_components is odd the last of (n_components + 1) / 2 frequencies has a cosine
    alone, with a random phase.) What couplings add to `RBFSampler` is a lower error for the same
    number of columns.

    Sources: Rahimi and Recht 2007; Reid et al. (VRC), Def. 3.3, for the coupling "pnc".

    Parameters:
        coupling: joint law of the frequencies: a name that `performer.couplings.get` knows ("pnc",
            "orf", "simrf+", "iid", ...) or any function (key, m, d) -> (m, d). With trigonometric
            features antithetic couplings waste half of the columns: those of w and -w are the same
            up to signs.
        n_components: number of output columns.
        gamma: positive, in 1 / (units of X)^2; the lengthscale is 1 / sqrt(2 gamma). Or "scale":
            1 / (n_features * X.var()) of the X in `fit`, 1 where X does not vary.
        random_state: an integer for the same draw in every `fit`; or a `RandomState`, or None.
        kernel: "rbf", another word of `performer.kernels`, or a `Kernel`, as `kernels.matern(1.5)`;
            of points times sqrt(2 gamma). Those without sines and cosines take n_components
            frequencies, a column for each.

    Attributes:
        frequencies_: the draw of the coupling, (m, n_features); gamma is not in it.
        phase_: uniform on [0, 2 pi); used if n_components is odd.
        gamma_: gamma as a number.
        n_features_in_, feature_names_in_: width and column names of the X in `fit`.

    Raises:
        ValueError: in `fit`, for an unknown coupling or kernel, a coupling that cannot serve the
            kernel, sizes that it does not admit (antithetic ones need an even m) or values that are
            not finite, n_components that is no positive integer, or gamma that is not positive and
            finite; for X that is not a finite 2-D array, or so large that its features are not
            finite.
        TypeError: for a sparse X.

    Example:
        >>> X, y = sklearn.datasets.load_diabetes(return_X_y=True)
        >>> features = RandomFeatures(n_components=200, gamma=0.05, random_state=0)
        >>> model = make_pipeline(StandardScaler(), features, Ridge())
        >>> search = GridSearchCV(model, {"randomfeatures__coupling": ["iid", "orf", "pnc"]})
        >>> search.fit(X, y).best_params_
    """

    # No types: by scikit-learn's rules it takes anything, and `fit` looks at it.
    def __init__(
        self, coupling="pnc", n_components=100, gamma=1.0, random_state=None, kernel="rbf"
    ):
        self.coupling = coupling
        self.n_components = n_components
        self.gamma = gamma
        self.random_state = random_state
        self.kernel = kernel

    def fit(self, X: Any, y: Any = None) -> "RandomFeatures":
        """Draws the frequencies. Of X only the width matters and, with "scale", the variance."""
        X = validate_data(self, X, dtype=_DTYPES)
        kernel, d, gamma = kernels.get(self.kernel), X.shape[1], self._number_gamma(X)
        m, odd = self._num_frequencies(kernel, d)
        if not (isinstance(self.coupling, str) or callable(self.coupling)):
            raise ValueError(f"coupling must be a name or a function, got {self.coupling!r}")
        random = check_random_state(self.random_state)
        seed, self.phase_ = random.randint(np.iinfo(np.int32).max), random.uniform(0, 2 * np.pi)
        with jax.enable_x64(False):  # one draw, whatever the global setting
            key = jax.random.key(seed)
            frequencies = np.array(kernel.coupled(self.coupling)(key, m, d))
        if frequencies.shape != (m, d):
            raise ValueError(f"coupling must return (m, d) = {(m, d)}, got {frequencies.shape}")
        if not np.isfinite(frequencies).all():
            count = np.sum(~np.isfinite(frequencies))
            raise ValueError(f"coupling returned {count} values that are not finite")
        self.frequencies_, self.gamma_ = frequencies, gamma
        self._kernel, self._odd = kernel, odd
        self._n_features_out = int(self.n_components)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The features (n, n_components); float32 for float32 inputs, float64 for all others."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_DTYPES, reset=False)
        with jax.enable_x64(X.dtype == np.float64):
            draw, lengthscale = (self.frequencies_, self.phase_), (2 * self.gamma_) ** -0.5
            phi = _features(X, *draw, lengthscale, kernel=self._kernel, odd=self._odd)
        phi = np.array(phi)  # a copy: what JAX returns is read-only
        if not np.isfinite(phi).all():
            raise ValueError(
                f"X, up to {np.abs(X).max():.3g} with gamma = {self.gamma_:.3g}, is too large for"
                f" {X.dtype}: scale it (StandardScaler), or take a smaller gamma"
            )
        return phi

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _num_frequencies(self, kernel: kernels.Kernel, d: int) -> tuple[int, bool]:
        """Number of frequencies, and True if the last has one column instead of two."""
        n = self.n_components
        if not (isinstance(n, Integral) and n > 0):
            raise ValueError(f"n_components must be a positive integer, got {n!r}; use 100, say")
        one = jax.ShapeDtypeStruct((1, d), np.float32)
        width = jax.eval_shape(kernel.feature_map, one, one).shape[1]  # columns of a frequency
        if n % width and kernel.feature_map != features.trigonometric:
            raise ValueError(f"n_components must be a multiple of {width} for {kernel}, got {n}")
        return -(-int(n) // width), bool(n % width)

    def _number_gamma(self, X: np.ndarray) -> float:
        gamma: Any = self.gamma
        if isinstance(gamma, str) and gamma == "scale":
            with np.errstate(over="ignore"):
                variance = float(X.var(dtype=np.float64))  # of float32 it may be past float32
            gamma = 1 / (X.shape[1] * variance) if variance else 1.0
            if not 0 < gamma < float("inf"):
                raise ValueError(
                    f"gamma='scale' has no value for X.var() = {variance:.3g}: scale X"
                )
            return gamma
        if isinstance(gamma, Real) and 0 < float(gamma) < float("inf"):
            return float(gamma)
        raise ValueError(f"gamma must be a positive, finite number or 'scale', got {gamma!r}")
