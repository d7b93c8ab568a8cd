"""Count the communities of a graph of nearest neighbours: a number of clusters that no k-means has part in."""

import torch
import torch.nn.functional as F
from torch import Tensor

SEEN, NEIGHBOURS = 1000, 40  # nodes at most, and the edges of each: groups of fewer points are joined to others
LEAST_SHARE = 4  # a node has no more edges than this part of all nodes


def count_communities(points: Tensor, generator: torch.Generator) -> int:
    """Return how many communities Louvain's method finds among the points (N, D), or a random part of them.

    >>> points = torch.eye(3).repeat_interleave(40, dim=0)
    >>> points = points + 0.1 * torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    >>> count_communities(points, torch.Generator().manual_seed(0))
    3
    """
    import networkx  # a quarter of a second

    chosen = torch.randperm(len(points), generator=generator)[:SEEN]
    unit = F.normalize(points[chosen], dim=1)
    edges = max(1, min(NEIGHBOURS, len(unit) // LEAST_SHARE, len(unit) - 1))
    near = (unit @ unit.T).fill_diagonal_(-torch.inf).topk(edges, dim=1).indices
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(unit)))
    graph.add_edges_from((node, other) for node, others in enumerate(near.tolist()) for other in others)
    seed = int(torch.randint(2**31, (), generator=generator))
    return len(networkx.community.louvain_communities(graph, seed=seed))
