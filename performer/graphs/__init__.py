"""Graph random features: kernels between nodes, PageRank and Gaussian processes by random walks.

Graph          an undirected weighted graph: `Graph.from_edges`, `from_scipy`, `from_networkx`
features       `graph_random_features`: a sparse, unbiased kernel estimate that multiplies vectors
attention      `masked_attention`: random-feature attention between nodes, times a kernel
kernels        kernels between nodes: series for random features, dense for reference
couplings      joint laws of the lengths of walks: independent, antithetic, sigma
matching       learning of the permutation of the sigma-coupling
walks          random walks from all nodes
pagerank       PageRank by random walks and by power iteration
theory         expected errors in closed form; `theory.recommend` chooses the walks
gp             Gaussian processes on the nodes: posteriors, samples, fits
"""

from performer.graphs import attention as attention
from performer.graphs import couplings as couplings
from performer.graphs import features as features
from performer.graphs import gp as gp
from performer.graphs import kernels as kernels
from performer.graphs import matching as matching
from performer.graphs import pagerank as pagerank
from performer.graphs import theory as theory
from performer.graphs import walks as walks
from performer.graphs.attention import masked_attention as masked_attention
from performer.graphs.features import graph_random_features as graph_random_features
from performer.graphs.graph import Graph as Graph
