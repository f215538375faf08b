"""Graphs read from grad_fn, and the bytes that autograd saves."""

import pytest
import torch

from helpers.autograd_graph import SavedTensors, count_nodes, graph_of, shared_part


def leaf(*numbers):
    return torch.tensor(numbers, requires_grad=True)


def test_a_graph_has_its_operations_and_its_named_leaves():
    x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
    graph = graph_of((x * w).sum(), {"x": x, "w": w})
    assert [(node.label, node.is_leaf, node.depth) for node in graph.nodes] == [
        ("Sum", False, 0),
        ("Mul", False, 1),
        ("x", True, 2),
        ("w", True, 2),
    ]
    assert graph.edges == ((0, 1), (1, 2), (1, 3))


def test_depth_is_the_longest_path_and_a_shared_node_counts_once():
    x = leaf(1.0)
    graph = graph_of((x.exp() + x).sum(), {"x": x})
    depths = {node.label: node.depth for node in graph.nodes}
    assert depths == {"Sum": 0, "Add": 1, "Exp": 2, "x": 3}


def test_a_tensor_without_history_has_an_empty_graph():
    assert graph_of(torch.ones(2)).nodes == ()
    assert count_nodes(torch.ones(2)) == 0
    assert shared_part(leaf(1.0).exp(), torch.ones(1)) == (set(), set())


def test_count_nodes_counts_long_chains():
    total = leaf(0.0)
    for _ in range(5000):
        total = total + 1
    assert count_nodes(total) == 5001


def test_the_shared_part_leaves_out_what_a_cut_removed():
    x, w = leaf(1.0), leaf(2.0)
    whole = (x * w).tanh() * w
    cut = (x * w).tanh().detach() * w
    kept_nodes, kept_edges = shared_part(whole, cut)
    graph = graph_of(whole, {"x": x, "w": w})
    assert {graph.nodes[index].label for index in kept_nodes} == {"Mul", "w"}
    assert len(kept_nodes) == 2 and len(kept_edges) == 1
    everything = shared_part(whole, (x * w).tanh() * w)
    assert everything == (set(range(len(graph.nodes))), set(range(len(graph.edges))))


def test_saved_bytes_are_held_as_long_as_the_graph():
    x = torch.ones(1000, requires_grad=True)
    with SavedTensors(ignore=[x]) as saved:
        y = x.exp()  # saves its result: 1,000 float32 values
        z = y * y  # saves the same storage twice more
        assert saved.live_bytes() == 4000
    z.sum().backward()
    assert saved.live_bytes() == 0
    torch.testing.assert_close(x.grad, 2 * (2 * x).exp())


def test_saved_bytes_are_freed_with_a_graph_that_never_ran_backward():
    x = torch.ones(1000, requires_grad=True)
    with SavedTensors() as saved:
        y = x.exp().exp()
    assert saved.live_bytes() == 8000
    del y
    assert saved.live_bytes() == 0


def test_autograd_still_detects_an_in_place_change_to_a_saved_tensor():
    x = torch.ones(3, requires_grad=True)
    with SavedTensors():
        y = x.tanh()
        y.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_an_in_place_operation_that_is_part_of_the_graph_is_allowed():
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with SavedTensors():
        y = (2 * x).relu_()
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 2.0]))
