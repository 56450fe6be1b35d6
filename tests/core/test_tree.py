import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvern.core.tree import PrefixTree

SPAN = 2


def columns(paths, mask):
    """Hashes of paths, cut so that many collide."""
    low = [hash(("low", path)) & mask for path in paths]
    high = [0 if mask < 99 else hash(("high", path)) & mask for path in paths]
    return np.array(low, np.uint64), np.array(high, np.uint64)


class TreeMachine(RuleBasedStateMachine):
    """The tree against a dictionary from token paths to nodes; hashes of three bits collide."""

    mask = 7

    def __init__(self):
        super().__init__()
        self.tree = PrefixTree(16, SPAN, 1)
        self.root = self.tree.add_root(1, 1)
        self.tree.refs[self.root] = 1
        self.nodes = {}

    def arrays(self, tokens):
        paths = [tuple(tokens[: end + SPAN]) for end in range(0, len(tokens), SPAN)]
        low, high = columns(paths, self.mask)
        return paths, low, high, np.array(tokens, np.int32).reshape(-1, SPAN)

    @rule(tokens=st.lists(st.tuples(st.integers(0, 1), st.just(0)), min_size=1, max_size=5))
    def insert(self, tokens):
        paths, low, high, rows = self.arrays([token for pair in tokens for token in pair])
        known = self.tree.walk(self.root, low, high, rows)
        want = 0
        while want < len(paths) and paths[want] in self.nodes:
            assert known[want] == self.nodes[paths[want]]
            want += 1
        assert len(known) == want
        if want < len(paths):
            parent = int(known[-1]) if want else self.root
            added = self.tree.add_path(parent, low[want:], high[want:], rows[want:])
            self.tree.blocks[added, 0] = 1
            for path, node in zip(paths[want:], added.tolist(), strict=True):
                self.nodes[path] = node

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def remove_subtree(self, data):
        path = data.draw(st.sampled_from(sorted(self.nodes)))
        gone = [other for other in self.nodes if other[: len(path)] == path]
        ids = np.array([self.nodes.pop(other) for other in gone], np.int32)
        self.tree.blocks[ids, 0] = 0
        self.tree.remove_idle(ids)
        self.drop_empty(path[:-SPAN])

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def empty_one_node(self, data):
        path = data.draw(st.sampled_from(sorted(self.nodes)))
        node = self.nodes[path]
        self.tree.blocks[node, 0] = 0
        self.tree.remove_idle(np.array([node], np.int32))
        self.drop_empty(path)

    def drop_empty(self, path):
        while path and not self.has_child(path) and not self.tree.blocks[self.nodes[path], 0]:
            del self.nodes[path]
            path = path[:-SPAN]

    def has_child(self, path):
        return any(len(o) == len(path) + SPAN and o[: len(path)] == path for o in self.nodes)

    @invariant()
    def agrees(self):
        tree = self.tree
        assert tree.num_nodes == len(self.nodes) + 1
        for path, node in self.nodes.items():
            parent = self.nodes[path[:-SPAN]] if len(path) > SPAN else self.root
            assert tree.is_alive[node]
            assert tree.parent[node] == parent
            assert node in tree.children(parent, 100).tolist()


class ClearTreeMachine(TreeMachine):
    """The same without collisions."""

    mask = (1 << 60) - 1


TreeMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestTreeMachine = TreeMachine.TestCase
ClearTreeMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestClearTreeMachine = ClearTreeMachine.TestCase
