"""The estimators as float64 loops straight from the papers' equations. Nothing of ours is imported here.

Arrays are [num_envs, T]. `bootstrap` is always dense here: the value that stands at every cut (`dense_bootstrap` makes
it from the other forms). Each function returns (advantages, returns), 0 in masked cells.

`gae` and `gae_by_episode` compute the same thing in different ways, so that each checks the other.
"""

import numpy as np


def gae(
    rewards,
    values,
    terminated=None,
    truncated=None,
    *,
    gamma=0.99,
    lambda_=0.95,
    bootstrap=None,
    next_values=None,
    mask=None,
    mask_mode="skip",
    dtype=np.float64,
):
    """The paper's table, A[t] = delta[t] + beta[t] * A[t+1] with carry 0, plus cuts and masks; one pass over a row.

    delta = r + g*(1-term)*V[t+1] - V        beta = g*lam*(1-done)

    With dtype=np.float32 every operation rounds to float32, in this order: the serial loop others are measured by.
    """
    num_envs, num_steps = rewards.shape
    rewards, values = rewards.astype(dtype), values.astype(dtype)
    discounts = np.broadcast_to(np.asarray(gamma, dtype), rewards.shape)
    decays = np.broadcast_to(np.asarray(np.multiply(gamma, lambda_), dtype), rewards.shape)
    bootstrap = None if bootstrap is None else bootstrap.astype(dtype)
    next_values = None if next_values is None else next_values.astype(dtype)
    per_step = np.ndim(gamma) > 0  # such a discount, if 0, severs like a termination
    advantages = np.zeros(rewards.shape, dtype)
    for n in range(num_envs):
        carry = 0
        following = None  # V(s_{t+1}) where the row itself tells it; None where the row ends
        hole = False  # a masked step that severs comes next
        for t in reversed(range(num_steps)):
            if mask is not None and not mask[n, t]:
                if mask_mode == "reset":
                    carry, hole = 0, True
                continue
            term = terminated is not None and bool(terminated[n, t])
            trunc = truncated is not None and bool(truncated[n, t])
            g = discounts[n, t]
            if hole and not trunc:
                v_next = 0
            elif next_values is not None:
                v_next = next_values[n, t]
            elif trunc or following is None:
                v_next = bootstrap[n, t]
            else:
                v_next = following
            delta = rewards[n, t] + (0 if term or (per_step and g == 0) else g * v_next) - values[n, t]
            beta = 0 if term or trunc else decays[n, t]
            carry = delta if beta == 0 else delta + beta * carry
            advantages[n, t] = carry
            following, hole = values[n, t], False
    return advantages, _returns(advantages, values, mask)


def gae_by_episode(
    rewards,
    values,
    terminated=None,
    truncated=None,
    *,
    gamma=0.99,
    lambda_=0.95,
    bootstrap=None,
    next_values=None,
    mask=None,
    mask_mode="skip",
):
    """Schulman 2016, eq. 16, one episode at a time: A_t = sum_l (g*lam)^l * delta_{t+l}, delta = r + g*V' - V.

    The row is cut into pieces, the value after its last step is appended to each piece, and nothing is carried.
    """
    terminated = np.zeros(rewards.shape, bool) if terminated is None else np.asarray(terminated, bool)
    truncated = np.zeros(rewards.shape, bool) if truncated is None else np.asarray(truncated, bool)
    mask = np.ones(rewards.shape, bool) if mask is None else np.asarray(mask, bool)
    discounts = np.broadcast_to(np.asarray(gamma, np.float64), rewards.shape)
    advantages = np.zeros(rewards.shape, np.float64)
    for n in range(len(rewards)):
        for piece in _pieces(terminated[n] | truncated[n], mask[n], mask_mode):
            last = piece[-1]
            before_hole = mask_mode == "reset" and last + 1 < rewards.shape[1] and not mask[n, last + 1]
            if terminated[n, last] or (before_hole and not truncated[n, last]):
                tail = 0.0
            else:
                tail = bootstrap[n, last] if next_values is None else next_values[n, last]
            if next_values is None:
                v = np.append(values[n, piece], tail)[1:]
            else:
                v = np.append(next_values[n, piece[:-1]], tail)
            deltas = rewards[n, piece] + _times(discounts[n, piece], v) - values[n, piece]
            decays = lambda_ * discounts[n, piece]
            for i, t in enumerate(piece):
                weights = np.cumprod(np.append(1.0, decays[i:-1]))
                advantages[n, t] = np.sum(_times(weights, deltas[i:]))
    return advantages, _returns(advantages, values, mask)


def _pieces(done, mask, mask_mode):
    """Index arrays of the episodes of one row: masked steps are deleted (skip) or end a piece (reset)."""
    pieces, piece = [], []
    for t in range(len(done)):
        if mask[t]:
            piece.append(t)
        if (done[t] and mask[t]) or (not mask[t] and mask_mode == "reset"):
            pieces.append(piece)
            piece = []
    pieces.append(piece)
    return [np.array(p) for p in pieces if p]


def _times(weight, x):
    """weight * x, where a weight of 0 keeps NaN and infinity out."""
    with np.errstate(invalid="ignore"):
        return np.where(weight == 0, 0.0, weight * x)


def _returns(advantages, values, mask):
    """V + A where there is a step, 0 where there is none."""
    if mask is None:
        return advantages + values
    return np.where(np.asarray(mask, bool), advantages + values, 0)


def dense_bootstrap(form, shape, mask=None, mask_mode="skip", entries=()):
    """The value at every cut, from any of the forms a caller may use.

    form: None, a number, [num_envs] (the window's edge) or [num_envs, T]; entries: (env, time, value) triples, which
    win over it. A cut that is given no value holds NaN.
    """
    num_envs, num_steps = shape
    dense = np.full(shape, np.nan)
    if form is not None and np.ndim(form) in (0, 2):
        dense[:] = form
    elif form is not None:
        for n in range(num_envs):
            valid = range(num_steps) if mask is None or mask_mode == "reset" else np.flatnonzero(mask[n])
            if len(valid):
                dense[n, valid[-1]] = form[n]
    for n, t, value in entries:
        dense[n, t] = value
    return dense


def episode_ids(terminated, truncated, mask=None, mask_mode="skip"):
    """A number per cell, equal for cells of one episode; masked cells get -1."""
    shape = terminated.shape
    mask = np.ones(shape, bool) if mask is None else np.asarray(mask, bool)
    done = np.asarray(terminated, bool) | np.asarray(truncated, bool)
    ids = np.full(shape, -1)
    count = 0
    for n in range(shape[0]):
        for piece in _pieces(done[n], mask[n], mask_mode):
            ids[n, piece] = count
            count += 1
    return ids
