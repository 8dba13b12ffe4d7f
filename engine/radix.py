"""The nodes of a trie with compressed edges: what :mod:`seqkv.engine.trie` does to them in loops, for Numba.

A leaf is a session. Every other node but the root is a place where sessions part, and has at least two children, so
that there are at most twice as many nodes as sessions. A session that others continue, or that is stored twice, is a
leaf at the end of an edge without tokens. An edge's tokens are a stretch of a pool that all edges share; what no edge
uses any more is dropped when the pool is moved. A table with open addressing finds the child of a node by the first
token of its edge. Nothing here checks its arguments or makes room: trie.py does.
"""

from __future__ import annotations

import numpy as np
from numba import njit

NODE = np.dtype(
    [
        ("bits", "f8"),  # surprisal of the prefix that ends at the node
        ("uses", "i8"),  # of all sessions below, together
        ("start", "i8"),  # where the tokens of the edge that leads to the node are in the pool
        ("depth", "i4"),  # tokens of the prefix; -1 if the row is free
        ("parent", "i4"),
        ("child", "i4"),  # the first one; -1 in a leaf
        ("next", "i4"),  # sibling, or the next free row
        ("previous", "i4"),
    ],
    align=True,
)
ROOT, NONE = 0, -1

# what `size` counts: tokens written to the pool, tokens on edges, rows ever used; and the first row that is free again
WRITTEN, LIVE, ROWS, FREE = range(4)


@njit(cache=True, nogil=True)
def _place(nodes, tokens, table, parent, token):
    """Where in the table the child of `parent` by `token` is, or would be put."""
    mask = table.size - 1
    at = _home(parent, token) & mask
    while table[at] != NONE:
        row = nodes[table[at]]
        if row.parent == parent and tokens[row.start] == token:
            break
        at = (at + 1) & mask
    return at


@njit(cache=True, nogil=True)
def _home(parent, token):
    key = np.uint64(parent) << np.uint64(32) | np.uint64(token)
    key = (key ^ key >> np.uint64(32)) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(key >> np.uint64(32))


@njit(cache=True, nogil=True)
def _vacate(nodes, tokens, table, at):
    """Takes an entry out of the table, and moves those behind it that could not be found any more."""
    mask = table.size - 1
    hole = at
    at = (at + 1) & mask
    while table[at] != NONE:
        row = nodes[table[at]]
        home = _home(row.parent, tokens[row.start]) & mask
        if (at - home) & mask >= (at - hole) & mask:
            table[hole] = table[at]
            hole = at
        at = (at + 1) & mask
    table[hole] = NONE


@njit(cache=True, nogil=True)
def _length(nodes, node):
    return nodes[node].depth - nodes[nodes[node].parent].depth


@njit(cache=True, nogil=True)
def _take_row(nodes, size):
    node = size[FREE]
    if node == NONE:
        node = size[ROWS]
        size[ROWS] += 1
    else:
        size[FREE] = nodes[node].next
    return node


@njit(cache=True, nogil=True)
def _free_row(nodes, size, node):
    nodes[node].depth = -1
    nodes[node].next = size[FREE]
    size[FREE] = node


@njit(cache=True, nogil=True)
def _stand_in(nodes, new, old):
    """Puts `new` in the place of `old` among its siblings."""
    row = nodes[new]
    row.parent, row.next, row.previous = nodes[old].parent, nodes[old].next, nodes[old].previous
    if row.next != NONE:
        nodes[row.next].previous = new
    if row.previous != NONE:
        nodes[row.previous].next = new
    else:
        nodes[row.parent].child = new


@njit(cache=True, nogil=True)
def descend(nodes, tokens, table, ids):
    """Follows ids int32 [tokens] from the root. Returns (node, matched): the first `matched` ids lead to the node, or
    to a place on the edge to it."""
    node = ROOT
    matched = 0
    while matched < ids.size:
        child = table[_place(nodes, tokens, table, node, ids[matched])]
        if child == NONE:
            break
        node = child
        start = nodes[node].start - matched
        stop = min(nodes[node].depth, ids.size)
        while matched < stop and tokens[start + matched] == ids[matched]:
            matched += 1
        if matched < nodes[node].depth:
            break
    return node, matched


@njit(cache=True, nogil=True)
def _split(nodes, tokens, bits, table, size, node, depth):
    """Cuts the edge to a node in two. Returns the new node, which ends at `depth`."""
    upper = _take_row(nodes, size)
    at = _place(nodes, tokens, table, nodes[node].parent, tokens[nodes[node].start])
    _stand_in(nodes, upper, node)
    row = nodes[upper]
    row.start, row.depth, row.uses, row.child = nodes[node].start, depth, nodes[node].uses, node
    kept = depth - nodes[row.parent].depth
    row.bits = nodes[row.parent].bits + bits[row.start : row.start + kept].astype(np.float64).sum()
    table[at] = upper
    nodes[node].parent, nodes[node].next, nodes[node].previous = upper, NONE, NONE
    nodes[node].start += kept
    if nodes[node].depth > depth:
        table[_place(nodes, tokens, table, upper, tokens[nodes[node].start])] = node
    return upper


@njit(cache=True, nogil=True)
def add(ids, surprisal, uses, nodes, tokens, bits, table, size):
    """A new leaf for ids int32 [tokens] with surprisal float32 [tokens]. Needs two rows, and room for all tokens."""
    node, matched = descend(nodes, tokens, table, ids)
    if matched < nodes[node].depth or (node != ROOT and nodes[node].child == NONE):
        node = _split(nodes, tokens, bits, table, size, node, matched)
    leaf = _take_row(nodes, size)
    start = size[WRITTEN]
    total = nodes[node].bits
    for i in range(matched, ids.size):
        tokens[start + i - matched] = ids[i]
        bits[start + i - matched] = surprisal[i]
        total += surprisal[i]
    size[WRITTEN] += ids.size - matched
    size[LIVE] += ids.size - matched
    row = nodes[leaf]
    row.bits, row.uses, row.start, row.depth = total, 0, start, ids.size
    row.parent, row.child, row.next, row.previous = node, NONE, nodes[node].child, NONE
    if row.next != NONE:
        nodes[row.next].previous = leaf
    nodes[node].child = leaf
    if matched < ids.size:
        table[_place(nodes, tokens, table, node, ids[matched])] = leaf
    count(nodes, leaf, uses)
    return leaf


@njit(cache=True, nogil=True)
def count(nodes, leaf, uses):
    """Adds to the uses of a leaf."""
    node = leaf
    while node != NONE:
        nodes[node].uses += uses
        node = nodes[node].parent


@njit(cache=True, nogil=True)
def cut(nodes, tokens, table, size, leaf):
    """Takes a leaf away. Returns the one child that its parent is left with, to be merged with it, or NONE."""
    count(nodes, leaf, -nodes[leaf].uses)
    row = nodes[leaf]
    parent = row.parent
    if _length(nodes, leaf):
        _vacate(nodes, tokens, table, _place(nodes, tokens, table, parent, tokens[row.start]))
        size[LIVE] -= _length(nodes, leaf)
    if row.next != NONE:
        nodes[row.next].previous = row.previous
    if row.previous != NONE:
        nodes[row.previous].next = row.next
    else:
        nodes[parent].child = row.next
    _free_row(nodes, size, leaf)
    only = nodes[parent].child
    return only if parent != ROOT and nodes[only].next == NONE else NONE


@njit(cache=True, nogil=True)
def merge(only, nodes, tokens, bits, table, size):
    """Makes one edge of those that lead to an only child and to its parent. Needs room for its tokens."""
    parent = nodes[only].parent
    first, second = nodes[parent].start, nodes[only].start
    upper, lower = _length(nodes, parent), _length(nodes, only)
    if lower:
        _vacate(nodes, tokens, table, _place(nodes, tokens, table, parent, tokens[second]))
    at = _place(nodes, tokens, table, nodes[parent].parent, tokens[first])
    if lower and first + upper != second:  # the two are not neighbours in the pool
        start = size[WRITTEN]
        for i in range(upper):
            tokens[start + i], bits[start + i] = tokens[first + i], bits[first + i]
        for i in range(lower):
            tokens[start + upper + i], bits[start + upper + i] = tokens[second + i], bits[second + i]
        size[WRITTEN] += upper + lower
        first = start
    _stand_in(nodes, only, parent)
    nodes[only].start = first
    table[at] = only
    _free_row(nodes, size, parent)


@njit(cache=True, nogil=True)
def repack(nodes, tokens, bits, size, new_tokens, new_bits):
    """Moves what edges use to a new pool."""
    written = 0
    for node in range(1, size[ROWS]):
        if nodes[node].depth >= 0:
            start, length = nodes[node].start, _length(nodes, node)
            new_tokens[written : written + length] = tokens[start : start + length]
            new_bits[written : written + length] = bits[start : start + length]
            nodes[node].start = written
            written += length
    size[WRITTEN] = written


@njit(cache=True, nogil=True)
def rehash(nodes, tokens, size, table):
    """Fills an empty table."""
    for node in range(1, size[ROWS]):
        if nodes[node].depth >= 0 and _length(nodes, node):
            table[_place(nodes, tokens, table, nodes[node].parent, tokens[nodes[node].start])] = node


@njit(cache=True, nogil=True)
def meet(nodes, a, b):
    """The deepest node that a and b are both below."""
    while a != b:
        if nodes[a].depth > nodes[b].depth or (nodes[a].depth == nodes[b].depth and nodes[a].child == NONE):
            a = nodes[a].parent
        else:
            b = nodes[b].parent
    return a


@njit(cache=True, nogil=True)
def some_leaf(nodes, node):
    while nodes[node].child != NONE:
        node = nodes[node].child
    return node


@njit(cache=True, nogil=True)
def leaves_below(nodes, order, leaves):
    """For each node how many of some leaves are below it. order: all nodes, parents before children."""
    out = np.zeros(nodes.size, np.int64)
    for leaf in leaves:
        out[leaf] += 1
    for node in order[:0:-1]:
        out[nodes[node].parent] += out[node]
    return out


@njit(cache=True, nogil=True)
def label_sharing(nodes, order, sharing):
    """A label for each node: leaves have the same one if the prefix that they share has at least `sharing` bits.

    order: all nodes, parents before children.
    """
    label = np.full(nodes.size, NONE, np.int32)
    for node in order:
        if node != ROOT and label[nodes[node].parent] != NONE:
            label[node] = label[nodes[node].parent]
        elif nodes[node].bits >= sharing or nodes[node].child == NONE:
            label[node] = node
    return label


@njit(cache=True, nogil=True)
def label_within(nodes, order, within):
    """A label for each node: leaves of the same one are at most `within` bits apart, and there are as few as can be.

    From the leaves up: a node keeps the children whose farthest leaf is within half the distance, and the nearest of
    the others if it is not too far from those. Each child that is not kept is a cluster of its own.
    order: all nodes, parents before children.
    """
    near = np.full(nodes.size, -1.0)  # farthest leaf among children that are within half the distance
    far = np.full(nodes.size, np.inf)  # nearest of the other children, by its farthest leaf
    kept = np.full(nodes.size, NONE, np.int32)  # which one that is
    reach = np.zeros(nodes.size)  # farthest leaf of a node's cluster, from its parent
    for node in order[:0:-1]:
        if nodes[node].child == NONE:
            reach[node] = 0
        elif near[node] < 0 or near[node] + far[node] <= within:
            reach[node] = far[node]
        else:
            reach[node] = near[node]
            kept[node] = NONE
        parent = nodes[node].parent
        reach[node] += nodes[node].bits - nodes[parent].bits
        if reach[node] <= within / 2:
            near[parent] = max(near[parent], reach[node])
        elif reach[node] < far[parent]:
            far[parent] = reach[node]
            kept[parent] = node
    if near[ROOT] >= 0 and near[ROOT] + far[ROOT] > within:
        kept[ROOT] = NONE
    label = np.arange(nodes.size).astype(np.int32)
    for node in order[1:]:
        parent = nodes[node].parent
        if reach[node] <= within / 2 or kept[parent] == node:
            label[node] = label[parent]
    return label


@njit(cache=True, nogil=True)
def reach_probability(nodes, order):
    """For each node the estimated probability that the next session comes by it: see Trie.expected_reuse."""
    out = np.zeros(nodes.size)
    out[ROOT] = 1
    for node in order[1:]:
        parent = nodes[node].parent
        prior = 2.0 ** (nodes[parent].bits - nodes[node].bits)
        out[node] = out[parent] * (nodes[node].uses + prior) / (nodes[parent].uses + 1)
    return out
