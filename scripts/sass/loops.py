"""Finds loops in a graph of jumps: of machine code (rounds.py), and of PTX (compiler-lane.py).

`successors` has a set for each node. Components are found as Tarjan does, "Depth-First Search and Linear Graph Algorithms",
SIAM Journal on Computing 1(2), 1972, without recursion.
"""


def components(nodes, successors):
    """Strongly connected sets of nodes. A set of one node counts only if the node follows itself."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []
    for root in sorted(nodes):
        work = [(root, iter(sorted(successors[root] & nodes)))] if root not in index else []
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            for step in rest:
                if step not in index:
                    work.append((step, iter(sorted(successors[step] & nodes))))
                    break
                if step in on_stack:
                    low[node] = min(low[node], index[step])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    ring = set()
                    while not ring or member != node:
                        member = stack.pop()
                        on_stack.discard(member)
                        ring.add(member)
                    if len(ring) > 1 or node in successors[node]:
                        found.append(ring)
    return found


def innermost(nodes, successors):
    """The nodes of each loop that contains no other loop."""
    found = []
    for ring in components(nodes, successors):
        heads = {step for node in successors if node not in ring for step in successors[node] if step in ring}
        found += innermost(ring - heads, successors) or [ring]
    return found
