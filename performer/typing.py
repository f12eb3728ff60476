"""Notation and array aliases of the package.

One letter means one thing in every signature, as in `Float[Array, "b t n h"]`:

    b  batch                  h  head_dim, the width of a query or key
    t  query length           v  width of a value
    s  key length             m  num_features, the number of frequencies
    n  heads                  d  dimension of the inputs of a kernel (h, inside attention)

The papers write the frequencies w_i or ω_i (the rows of W here) and call their number m or s.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, PRNGKeyArray

Key = PRNGKeyArray
Lengths = Float[Array, " m"]
Frequencies = Float[Array, "m d"]

Norms = Callable[[Key, int, int], Lengths]
"""norms(key, m, d) -> (m,): the joint law of the lengths of the m frequencies of one block."""

Directions = Callable[[Key, Lengths, int], Frequencies]
"""directions(key, lengths, d) -> (m, d): the joint law of unit vectors, given their lengths."""

Coupling = Callable[[Key, int, int], Frequencies]
"""coupling(key, m, d) -> (m, d): the joint law of m frequencies, each marginally N(0, I_d)."""
