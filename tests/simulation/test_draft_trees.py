"""Static trees of drafts against a walk through every tree there is, and against what ranks say word by word."""

import itertools

import numpy as np
import pytest

from jaxserve.simulation.draft_trees import DraftTree, best_tree, best_tree_of_steps, chain, hits

RANKS = np.random.default_rng(0).choice(4, (300, 3), p=[0.5, 0.25, 0.15, 0.1])


def tokens_walked(paths, ranks: np.ndarray) -> float:
    """A step's tokens: one, and as far as the place's ranks walk down the tree."""
    total = 0
    for row in ranks.tolist():
        node = ()
        for rank in row:
            if (*node, rank) not in paths:
                break
            node = (*node, rank)
        total += 1 + len(node)
    return total / len(ranks)


def test_tokens_are_those_of_a_walk_down_the_tree():
    tree = DraftTree(((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 3)))
    assert tree.widths == [3, 3, 3]
    assert 1 + sum(tree.shares(RANKS)) == pytest.approx(tokens_walked(tree.paths, RANKS))
    assert chain(2).paths == ((0,), (0, 0)) and chain(3).widths == [1, 1, 1]
    assert chain(3).shares(RANKS) == pytest.approx([(RANKS[:, : d + 1] == 0).all(1).mean() for d in range(3)])


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_no_tree_of_as_many_candidates_is_better(num_nodes):
    """Ranks here depend on those before them, so that choosing by each depth apart would go wrong."""
    ranks = RANKS.copy()
    ranks[:, 1] = np.where(ranks[:, 0] == 1, 1, ranks[:, 1])
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    best = 0.0
    for paths in itertools.combinations(every, num_nodes):
        if all(len(path) == 1 or path[:-1] in paths for path in paths):
            best = max(best, tokens_walked(paths, ranks))
    tree = best_tree(ranks, num_nodes, max_rank=3)
    assert len(tree.paths) == num_nodes
    assert tokens_walked(tree.paths, ranks) == pytest.approx(best) == 1 + sum(tree.shares(ranks))


def test_steps_pass_by_what_stands():
    """An answer of which one half is always right and the other never: five tokens a step there, one here."""
    ranks, answers = np.array([[0] * 4] * 100 + [[1] * 4] * 100), np.zeros(200, int)
    assert 1 + sum(chain(4).shares(ranks)) == 3, "a mean over places"
    steps = chain(4).steps(ranks, answers)
    assert steps.tolist() == [*range(0, 100, 5), *range(100, 200)]
    assert 1 + sum(chain(4).shares(ranks[steps])) == pytest.approx(200 / 120)
    cut = chain(4).steps(ranks[:7], np.array([0, 0, 0, 1, 1, 1, 1]))
    assert cut.tolist() == [0, 3], "no step goes on in the next answer"
    assert not len(chain(4).steps(ranks[:0], answers[:0]))


def test_a_tree_for_steps_has_candidates_for_where_steps_begin():
    """Most places have the likeliest tokens, four in a row; most steps begin where the second or third one is right."""
    ranks = np.array([[0] * 4] * 150 + [[1, 1, 5, 5], [2, 5, 5, 5]] * 60)
    answers = np.zeros(len(ranks), int)
    by_places, by_steps = best_tree(ranks, 4), best_tree_of_steps(ranks, answers, 4)
    assert by_places.paths == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    num_steps = [len(tree.steps(ranks, answers)) for tree in (by_places, by_steps)]
    assert num_steps[1] < num_steps[0] - 10 and {(1,), (2,)} <= {*by_steps.paths}


def test_a_tree_has_no_more_candidates_than_were_ever_right():
    assert best_tree(np.array([[0, 7], [2, 0]]), 10, max_rank=5).paths == ((0,), (2,), (2, 0))


def test_what_is_no_tree_is_refused():
    for paths in (((0, 1),), ((0,), (0,)), ((),)):
        with pytest.raises(ValueError, match="must be different, none empty, each with its parent"):
            DraftTree(paths)
    with pytest.raises(ValueError, match="a tree of depth 4 needs ranks of as many drafts, found 3"):
        chain(4).shares(RANKS)


def test_hits_by_depth():
    assert hits(np.array([[0, 5], [2, 0], [1, 9], [0, 0]]), (1, 3)) == [[0.5, 1.0], [0.5, 0.5]]
