"""Checks of arguments: names, counts, positive numbers, shapes of arrays; optional imports."""

import difflib
import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

LARGEST = 2**31 - 1
"""The largest int32."""
NEAR = 0.5
"""Least similarity, by difflib, of a name to one that may be meant."""


def unknown(kind: str, name: str, choices: Collection[str], shown: str = "") -> str:
    """Return "unknown coupling 'orff'; did you mean 'orf'? Choices: iid, orf, ...".

    Args:
        kind: kind of thing, as "coupling".
        name: the unknown name.
        choices: the known names, at least one.
        shown: list of choices as displayed; the names separated by commas if empty.
    """
    by_lower_case = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=NEAR)
    meant = "".join(f"; did you mean {by_lower_case[each]!r}?" for each in near) or "."
    return f"unknown {kind} {name!r}{meant} Choices: {shown or ', '.join(choices)}"


DISTRIBUTIONS = {
    "absl": "absl-py",
    "orbax": "orbax-checkpoint",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
}
"""Distributions of modules with another name."""


def install(module: str | None) -> str:
    """Return the command that installs a module: "pip install pillow" for "PIL.Image"."""
    name = str(module).split(".")[0]
    return f"pip install {DISTRIBUTIONS.get(name, name)}"


@contextmanager
def optional() -> Iterator[None]:
    """Say how to install a module that an import in the `with` block does not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: {install(error.name)}"
        raise ModuleNotFoundError(message, name=error.name) from error


def positive_integer(name: str, value: Any) -> int:
    """Return the value as an int; ValueError unless it is a positive integer."""
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a positive integer, got {value!r}") from None
    if value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value}")
    return value


def require_numbered(name: str, count: int) -> None:
    """Raise ValueError for a count of `name` above the largest int32."""
    if count > LARGEST:
        raise ValueError(f"{count} {name} are more than int32 can number: at most {LARGEST}")


def positive_values(name: str, value: ArrayLike) -> ArrayLike:
    """Return the value; ValueError unless it is positive and finite (unchecked if traced)."""
    if not isinstance(value, Tracer):
        bad = [v for v in np.ravel(np.asarray(value)).tolist() if not 0 < v < float("inf")]
        if bad:
            raise ValueError(f"{name} must be positive and finite, got {bad[0]}")
    return value


def positive_number(name: str, value: ArrayLike) -> ArrayLike:
    """Return the value; ValueError unless it is one positive, finite number."""
    if np.shape(value) != ():
        raise ValueError(f"{name} must be one number, got an array of shape {np.shape(value)}")
    return positive_values(name, value)


def positive_lengthscale(value: ArrayLike, d: int) -> ArrayLike:
    """Return the value; ValueError unless it is one positive, finite number, or d of them."""
    shape = np.shape(positive_values("lengthscale", value))
    if shape not in ((), (d,)):
        raise ValueError(f"lengthscale must be one number or of the shape ({d},), got {shape}")
    return value


def real_array(name: str, values: Any) -> Array:
    """Return the values as a JAX array, 64-bit integers of NumPy as float32 unless x64 is enabled.

    JAX would keep their low 32 bits without a warning: 5 000 000 000 would be 705 032 704.

    Raises:
        ValueError: for values of NumPy or pandas that are not numbers, such as dates and strings.
    """
    if hasattr(values, "__array__") and not isinstance(values, jax.Array):
        values = np.asarray(values)
        if values.dtype.kind in "OSUMm":
            raise ValueError(f"{name} must be real numbers, got {values.dtype}")
        if values.dtype in (np.int64, np.uint64) and jnp.result_type(float) != jnp.float64:
            values = values.astype(np.float32)
    return jnp.asarray(values)


def checked_arrays(**named: tuple[Any, str]) -> list[Array]:
    """Return the arrays in one dtype: float64 if any of them is, else float32.

    Args:
        named: array and axes by name, one letter for each axis: `checked_arrays(x=(x, "nd"))`. Axes
            with the same letter must have the same size.

    Raises:
        ValueError: for another shape (the message has the name, the expected and the actual shape),
            and as `real_array`.
    """
    with jax.ensure_compile_time_eval():  # constants of a traced function are checked also
        arrays = {name: real_array(name, array) for name, (array, _) in named.items()}
    wide = any(array.dtype == jnp.float64 for array in arrays.values())
    sizes: dict[str, int] = {}
    for name, (_, axes) in named.items():
        shape = arrays[name].shape
        if len(shape) != len(axes) or any(
            sizes.setdefault(axis, size) != size for axis, size in zip(axes, shape, strict=True)
        ):
            expected = ", ".join(f"{a} = {sizes[a]}" if a in sizes else a for a in axes)
            column = (
                f"; points on a line are {name}[:, None]" if len(shape) == 1 < len(axes) else ""
            )
            raise ValueError(f"{name} must have the shape ({expected}), got {shape}{column}")
    with jax.ensure_compile_time_eval():
        return [array.astype(jnp.float64 if wide else jnp.float32) for array in arrays.values()]


def finite_arrays(**named: tuple[Any, str]) -> list[Array]:
    """`checked_arrays`; ValueError also for entries that are not finite (unchecked if traced)."""
    arrays = checked_arrays(**named)
    for name, array in zip(named, arrays, strict=True):
        if not isinstance(array, Tracer) and not np.isfinite(np.asarray(array)).all():
            raise ValueError(f"{name} has entries that are not finite")
    return arrays
