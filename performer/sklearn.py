"""Random features as a scikit-learn transformer: `RBFSampler` with a choice of coupling."""

from functools import partial
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import issparse

from performer import features, kernels
from performer.choices import optional

with optional():
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data


@partial(jax.jit, static_argnames=("kernel", "odd"))
def _features(x, frequencies, phase, lengthscale, *, kernel, odd):
    """Columns of the feature map; if odd the last frequency has one, cos(w.x + phase), not two.

    With a uniform phase its mean is half of that of two columns. The mean over n such halves is
    unbiased for any n.
    """
    m = len(frequencies)
    weights = jnp.full(m, 2 / (2 * m - odd))
    if isinstance(x, tuple):  # the projections of sparse points
        phi = kernel.feature_map.from_projections(*x, weights=weights)
    else:
        phi = kernel.feature_map(x, frequencies, weights=weights, lengthscale=lengthscale)
    if not odd:
        return phi
    sines, cosines = phi[:, :m], phi[:, m:]
    last = jnp.cos(phase) * cosines[:, -1:] - jnp.sin(phase) * sines[:, -1:]
    return jnp.concatenate([sines[:, :-1], cosines[:, :-1], last], axis=1)


_CHECKS: dict[str, Any] = dict(dtype=(np.float64, np.float32), accept_sparse="csr")


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Random features: a linear model on them approximates one with the kernel.

    For the kernel "rbf", phi(x).phi(y) is an unbiased estimate of exp(-gamma |x - y|^2). The
    columns are the m sines, then the m cosines, of m = n_components / 2 frequencies. (If
    n_components is odd, the last of (n_components + 1) / 2 frequencies has only a cosine, with a
    random phase.) Couplings have a lower error than `RBFSampler` with as many columns.

    Sources: Rahimi and Recht 2007; Reid et al. (VRC), Def. 3.3, for the coupling "pnc".

    Parameters:
        coupling: joint law of the frequencies: a name in `performer.couplings` ("pnc", "orf",
            "simrf+", "iid", ...) or any function (key, m, d) -> (m, d). Antithetic couplings waste
            half of the trigonometric columns: those of w and -w are equal up to signs.
        n_components: number of output columns.
        gamma: positive, in 1 / (units of X)^2; the lengthscale is 1 / sqrt(2 gamma). Or "scale":
            1 / (n_features * X.var()) of the X in `fit`, 1 if X is constant.
        random_state: an integer for the same draw in every `fit`; or a `RandomState`, or None.
        kernel: "rbf", another name in `performer.kernels`, or a `Kernel` such as
            `kernels.matern(1.5)`, of points times sqrt(2 gamma). Kernels without sines and cosines
            use n_components frequencies, one column for each.

    Attributes:
        frequencies_: the draw of the coupling, (m, n_features); gamma is not in it.
        phase_: uniform on [0, 2 pi); used if n_components is odd.
        gamma_: gamma as a number.
        n_features_in_, feature_names_in_: width and column names of the X in `fit`.

    Raises:
        ValueError: in `fit`, for an unknown coupling or kernel, a coupling that does not support
            the kernel or the sizes (antithetic ones need an even m) or returns values that are not
            finite, n_components that is not a positive integer, or gamma that is not positive and
            finite; for X that is not a finite 2-D array or sparse matrix, or so large that its
            features are not finite.

    Example:
        >>> X, y = sklearn.datasets.load_diabetes(return_X_y=True)
        >>> features = RandomFeatures(n_components=200, gamma=0.05, random_state=0)
        >>> model = make_pipeline(StandardScaler(), features, Ridge())
        >>> search = GridSearchCV(model, {"randomfeatures__coupling": ["iid", "orf", "pnc"]})
        >>> search.fit(X, y).best_params_
    """

    # No types: by scikit-learn's rules the constructor accepts anything and `fit` checks it.
    def __init__(
        self, coupling="pnc", n_components=100, gamma=1.0, random_state=None, kernel="rbf"
    ):
        self.coupling = coupling
        self.n_components = n_components
        self.gamma = gamma
        self.random_state = random_state
        self.kernel = kernel

    def fit(self, X: Any, y: Any = None) -> "RandomFeatures":
        """Draw the frequencies, given the width of X and, with gamma="scale", its variance."""
        X = validate_data(self, X, **_CHECKS)
        kernel, d, gamma = kernels.get(self.kernel), X.shape[1], self._number_gamma(X)
        m, odd = self._num_frequencies(kernel, d)
        if not (isinstance(self.coupling, str) or callable(self.coupling)):
            raise ValueError(f"coupling must be a name or a function, got {self.coupling!r}")
        random = check_random_state(self.random_state)
        seed, self.phase_ = random.randint(np.iinfo(np.int32).max), random.uniform(0, 2 * np.pi)
        with jax.enable_x64(False):  # one draw, whatever the global setting
            key = jax.random.key(seed)
            try:
                frequencies = np.array(kernel.coupled(self.coupling)(key, m, d))
            except ValueError as error:
                count = f"n_components={self.n_components} has m = {m} frequencies"
                raise ValueError(f"{error}; {count}") from error
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
        """Return the features (n, n_components), dense; float32 for float32 X, else float64."""
        check_is_fitted(self)
        X = validate_data(self, X, **_CHECKS, reset=False)
        with jax.enable_x64(X.dtype == np.float64):
            draw, lengthscale = (self.frequencies_, self.phase_), (2 * self.gamma_) ** -0.5
            x = self._project(X / lengthscale) if issparse(X) else X
            phi = _features(x, *draw, lengthscale, kernel=self._kernel, odd=self._odd)
        phi = np.array(phi)  # a copy: arrays of JAX are read-only
        if not np.isfinite(phi).all():
            raise ValueError(
                f"X, up to {abs(X).max():.3g} with gamma = {self.gamma_:.3g}, is too large for"
                f" {X.dtype}: scale it (StandardScaler), or use a smaller gamma"
            )
        return phi

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.sparse = True
        return tags

    def _project(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return W x and |x|^2 / 2 of a sparse matrix."""
        if not isinstance(self._kernel.feature_map, features.FeatureMap):
            raise ValueError(f"X must be dense for {self._kernel}: its map is not a FeatureMap")
        half = np.asarray(X.multiply(X).sum(axis=1)).reshape(-1, 1) / 2
        return X @ self.frequencies_.T.astype(X.dtype), half

    def _num_frequencies(self, kernel: kernels.Kernel, d: int) -> tuple[int, bool]:
        """Return the number of frequencies, and True if the last has one column, not two."""
        n = self.n_components
        if not (isinstance(n, Integral) and n > 0):
            raise ValueError(f"n_components must be a positive integer such as 100, got {n!r}")
        one = jax.ShapeDtypeStruct((1, d), np.float32)
        width = jax.eval_shape(kernel.feature_map, one, one).shape[1]  # columns of a frequency
        if n % width and kernel.feature_map != features.trigonometric:
            raise ValueError(f"n_components must be a multiple of {width} for {kernel}, got {n}")
        return -(-int(n) // width), bool(n % width)

    def _number_gamma(self, X: Any) -> float:
        gamma: Any = self.gamma
        if isinstance(gamma, str) and gamma == "scale":
            with np.errstate(over="ignore"):
                X = X.astype(np.float64)  # the variance of float32 entries may exceed float32
                if X.max() == X.min():  # the variance of equal entries may round to 1e-17, not 0
                    return 1.0
                variance = float(_variance(X) if issparse(X) else X.var())
            gamma = 1 / (X.shape[1] * variance) if variance else 1.0
            if not 0 < gamma < float("inf"):
                raise ValueError(
                    f"gamma='scale' has no value for X.var() = {variance:.3g}: scale X"
                )
            return gamma
        if isinstance(gamma, Real) and 0 < float(gamma) < float("inf"):
            return float(gamma)
        raise ValueError(f"gamma must be a positive, finite number or 'scale', got {gamma!r}")


def _variance(X: Any) -> float:
    """Return the variance of all entries of a sparse matrix, in two passes: nothing cancels."""
    size = X.shape[0] * X.shape[1]
    mean = X.sum() / size
    return (np.sum((X.data - mean) ** 2) + (size - X.nnz) * mean**2) / size
