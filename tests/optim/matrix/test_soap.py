"""SOAP against the authors' program written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale.optim.matrix.soap import scale_by_soap, soap

B1, B2, EPS = 0.9, 0.8, 1e-8


def reference(gradients, every):
    """Updates of one matrix, in float64; signs of eigenvectors do not matter to them."""
    rows, columns = gradients[0].shape
    m, v = np.zeros((rows, columns)), np.zeros((rows, columns))
    L, R = np.zeros((rows, rows)), np.zeros((columns, columns))
    found, QL, QR = [], None, None
    for t, g in enumerate(gradients):
        if QL is not None:
            m = B1 * m + (1 - B1) * g
            v = B2 * v + (1 - B2) * (QL.T @ g @ QR) ** 2
            hat = (QL.T @ m @ QR) / (1 - B1**t)
            found.append(QL @ (hat / (np.sqrt(v / (1 - B2**t)) + EPS)) @ QR.T)
        else:
            found.append(np.zeros_like(g))
        L, R = B2 * L + (1 - B2) * g @ g.T, B2 * R + (1 - B2) * g.T @ g
        if QL is None:
            QL, QR = np.linalg.eigh(L)[1][:, ::-1], np.linalg.eigh(R)[1][:, ::-1]
        elif t % every == 0:
            left, right = (np.argsort(-np.diag(Q.T @ S @ Q), kind="stable") for Q, S in ((QL, L), (QR, R)))
            v = v[left][:, right]
            QL, QR = np.linalg.qr(L @ QL[:, left])[0], np.linalg.qr(R @ QR[:, right])[0]
    return found


def run(rule, gradients):
    @jax.jit
    def run(gradients):
        state, found = rule.init(gradients[0]), []
        for g in gradients:
            update, state = rule.update(g, state)
            found.append(update)
        return found, state

    return run(gradients)


def test_updates_are_those_of_the_authors_program():
    # square, so that no eigenvalue of the statistics is zero and no eigenvector is free
    gradients = [np.random.default_rng(i).normal(size=(4, 4)) for i in range(7)]
    found, state = run(scale_by_soap(B1, B2, EPS, every=2), [jnp.asarray(g, jnp.float32) for g in gradients])
    for update, expected in zip(found, reference(gradients, 2), strict=True):
        np.testing.assert_allclose(update, expected, rtol=2e-3, atol=2e-3)
    for Q in state.Q:
        np.testing.assert_allclose(Q.T @ Q, np.eye(4), atol=1e-5)


def test_without_bases_it_is_adam():
    gradients = [jax.random.normal(jax.random.key(i), (3, 5)) for i in range(4)]
    found, state = run(scale_by_soap(B1, B2, EPS, max_dim=2), gradients)
    expected, _ = run(optax.scale_by_adam(B1, B2, EPS), gradients)
    for update, adam in zip(found, expected, strict=True):
        np.testing.assert_allclose(update, adam, rtol=1e-5)
    assert {leaf.shape for leaf in (*state.GG, *state.Q)} == {(1,)}


def test_a_long_side_keeps_its_own_basis():
    state = scale_by_soap(max_dim=4).init(jnp.zeros((3, 5)))
    assert [leaf.shape for leaf in (*state.GG, *state.Q)] == [(3, 3), (1,), (3, 3), (1,)]


def test_zero_gradients_move_nothing_and_leave_bases_orthogonal():
    found, state = run(scale_by_soap(every=1), [jnp.zeros((3, 2))] * 3)
    assert not any(np.any(np.asarray(update)) for update in found)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def test_fields_that_are_never_quantized_have_their_names():
    state = soap(0.1).init({"w": jnp.zeros((3, 2))})[0].states["matrix"]
    assert {"GG", "Q"} <= set(state._fields)
