"""Trees of drafts of a fixed shape: which one of so many candidates is best, and how many tokens it would bring.

Owns the arithmetic of Medusa's and EAGLE-1's static trees (2401.10774, section 2.3.3; 2401.15077, section 3.1.2), over what was
measured of a head along answers. A candidate is named by its path: (0, 2) is the third likeliest token behind the likeliest. The
head is asked about an answer's own tokens, so that a path stands exactly as far as the ranks of these tokens are on it. No
independence of depths is assumed. Nor are all places of an answer alike: a step whose drafts stand passes their places by, so that
steps begin more often where drafts are wrong. What counts is the mean over steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Path = tuple[int, ...]


@dataclass(frozen=True)
class DraftTree:
    """Candidates by path, each with its parents. shares[d] of a tree: of some places, those at which it has d + 1 tokens right; of
    the places of `steps`, what `simulation.speculation.predict` takes beside `widths`."""

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        orphans = [path for path in self.paths if len(path) > 1 and path[:-1] not in self.paths]
        if orphans or () in self.paths or len(set(self.paths)) < len(self.paths):
            raise ValueError(f"paths={self.paths} must be different, none empty, each with its parent; without are {orphans}")

    @property
    def widths(self) -> list[int]:
        """Candidates at each depth."""
        counts = Counter(map(len, self.paths))
        return [counts[depth] for depth in sorted(counts)]

    def depths(self, ranks: np.ndarray) -> np.ndarray:  # i32[chains, depth], as draft_chains.chain_ranks -> i64[chains]
        """How many tokens it has right at each place. ValueError if the tree is deeper than what was measured."""
        if len(self.widths) > ranks.shape[1]:
            raise ValueError(f"a tree of depth {len(self.widths)} needs ranks of as many drafts, found {ranks.shape[1]}")
        paths = {*self.paths}
        right = [[path[:depth] in paths for depth in range(1, len(self.widths) + 1)] for path in map(tuple, ranks.tolist())]
        return np.array(right, bool).reshape(len(ranks), len(self.widths)).sum(1)

    def shares(self, ranks: np.ndarray) -> list[float]:
        """Of these places. Errors as `depths`."""
        right = self.depths(ranks)[:, None] > np.arange(len(self.widths))
        return (right.sum(0) / max(1, len(ranks))).tolist()

    def steps(self, ranks: np.ndarray, answers: np.ndarray) -> np.ndarray:  # -> intp[steps]
        """The places at which steps begin that verify this tree along whole answers. answers: i64[chains], which one each place is
        of; an answer's places stand one behind the other. Errors as `depths`."""
        found, at, depths = [], 0, self.depths(ranks).tolist()
        firsts = np.searchsorted(answers, answers, side="right").tolist()  # of the next answer
        while at < len(depths):
            found.append(at)
            at = min(at + 1 + depths[at], firsts[at])
        return np.array(found, np.intp)


def chain(num_drafts: int) -> DraftTree:
    """The tree of width one."""
    return DraftTree(tuple((0,) * (depth + 1) for depth in range(num_drafts)))


def best_tree(ranks: np.ndarray, num_nodes: int, max_rank: int = 10) -> DraftTree:
    """The tree of so many candidates, or of as many as ever were right, with most tokens a step at the measured places. max_rank:
    candidates of a parent. A path is right no more often than its parent, so those that were right most often are a tree."""
    counts: Counter[Path] = Counter()
    for path in map(tuple, ranks.tolist()):
        for depth, rank in enumerate(path):
            if rank >= max_rank:
                break
            counts[path[: depth + 1]] += 1
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return DraftTree(tuple(order[:num_nodes]))


def best_tree_of_steps(ranks: np.ndarray, answers: np.ndarray, num_nodes: int, max_rank: int = 10, rounds: int = 8) -> DraftTree:
    """Of trees of so many candidates one with many tokens a step along these answers. Which places count depends on the tree. So
    that of all places is followed by those of all places and of all steps that the trees before had, and the best one is taken: no
    worse than `best_tree`, and not always the best there is."""
    best, fewest, places = DraftTree(()), len(ranks) + 1, np.arange(len(ranks))
    for _ in range(rounds):
        tree = best_tree(ranks[places], num_nodes, max_rank)
        steps = tree.steps(ranks, answers)
        if len(steps) < fewest:
            best, fewest = tree, len(steps)
        places = np.concatenate([places, steps])
    return best


def hits(ranks: np.ndarray, ks: Sequence[int]) -> list[list[float]]:
    """Of each depth the shares of tokens that are among the k likeliest, for each k."""
    return [[float((column < k).mean()) for k in ks] for column in ranks.T]
