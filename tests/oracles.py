"""The estimators as float64 loops straight from the papers' equations. Nothing of ours is imported here.

Arrays are [num_envs, T], with trailing dimensions for actions or features. `bootstrap` is dense: the value at every
cut (`dense_bootstrap` makes it from the other forms). `ends` are the flags, the mask and its mode, as `classify_steps`
takes them. Masked cells yield 0.

Each estimator is there as the paper's table, one step after another. With dtype=np.float32 a table rounds every
operation to float32: the serial loop that others are measured by. The table of `gae` finds the boundaries itself; the
other backward ones share `classify_steps`.
"""

import itertools

import numpy as np

MASKED, TERMINAL, CUT, GOES_ON = range(4)


def classify_steps(shape, terminated=None, truncated=None, mask=None, mask_mode="skip", gamma=None):
    """What every step's transition leads to (MASKED ... GOES_ON), and the index of the step it goes on to.

    A discount per step of 0 is a terminal state. So is a masked step in mode "reset", unless the step before it is
    truncated. The end of the rollout is a cut.
    """
    kind, after = np.full(shape, MASKED), np.full(shape, -1)
    for n in range(shape[0]):
        following, hole = None, False
        for t in reversed(range(shape[1])):
            if mask is not None and not mask[n, t]:
                if mask_mode == "reset":
                    following, hole = None, True
                continue
            term = terminated is not None and bool(terminated[n, t])
            trunc = truncated is not None and bool(truncated[n, t])
            if term or (np.ndim(gamma) > 0 and gamma[n, t] == 0) or (hole and not trunc):
                kind[n, t] = TERMINAL
            elif trunc or following is None:
                kind[n, t] = CUT
            else:
                kind[n, t], after[n, t] = GOES_ON, following
            following, hole = t, False
    return kind, after


def dense_bootstrap(form, shape, mask=None, mask_mode="skip", entries=()):
    """The value at every cut, from any of the forms a caller may use.

    form: None, a number, [num_envs] (the rollout's end) or [num_envs, T]; entries: (env, time, value) triples, which
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


def iterate_backward(kind, after):
    """(n, t, kind, following t) of every step that is not masked, later ones first."""
    for n, t in np.argwhere(kind != MASKED)[::-1].tolist():
        yield n, t, kind[n, t], after[n, t]


def gated_product(factor, x):
    """factor * x, where a factor of 0 lets nothing through."""
    return 0 if factor == 0 else factor * x


def take(arguments, *names):
    """Take those of some names out of further arguments, None for one that is not there; the rest are `ends`."""
    return [arguments.pop(name, None) for name in names]


def take_ratios(arguments, dtype=np.float64):
    """pi/mu from either form."""
    log_ratios, target, behaviour = take(arguments, "log_ratios", "target_log_probs", "behaviour_log_probs")
    return np.exp(target.astype(dtype) - behaviour.astype(dtype) if log_ratios is None else log_ratios.astype(dtype))


def cast(dtype, *arrays):
    """Arrays, numbers or None in this type."""
    return [None if x is None else np.asarray(x, dtype) for x in arrays]


# --- backward, as tables ----------------------------------------------------------------------------------------------


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
    """
    num_envs, num_steps = rewards.shape
    rewards, values, bootstrap, next_values = cast(dtype, rewards, values, bootstrap, next_values)
    discounts = np.broadcast_to(np.asarray(gamma, dtype), rewards.shape)
    decays = np.broadcast_to(np.asarray(np.multiply(gamma, lambda_), dtype), rewards.shape)
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
    return advantages, add_values(advantages, values, mask)


def add_values(advantages, values, mask):
    """V + A where there is a step, 0 where there is none."""
    return advantages + values if mask is None else np.where(mask, advantages + values, 0)


def vtrace(
    rewards, values, *, gamma=0.99, lambda_=1.0, rho_bar=1.0, c_bar=1.0, rho_bar_pg=None, dtype=np.float64, **ends
):
    """Espeholt 2018, section 4.1: D[t] = rho*(r + g*NV - V) + g*c*D[t+1]; vs = V + D; A = rho_pg*(r + g*NVS - V)."""
    ratios, ahead = take_ratios(ends, dtype), take(ends, "bootstrap", "next_values")
    kind, after = classify_steps(rewards.shape, gamma=gamma, **ends)
    rewards, values, bootstrap, next_values = cast(dtype, rewards, values, *ahead)
    g, lam, rho_bar_pg = cast(dtype, gamma, lambda_, rho_bar if rho_bar_pg is None else rho_bar_pg)
    rho, rho_pg = (np.minimum(ratios, bar) for bar in cast(dtype, rho_bar, rho_bar_pg))
    decays = np.broadcast_to(g * (lam * np.minimum(ratios, dtype(c_bar))), rewards.shape)
    g = np.broadcast_to(g, rewards.shape)
    errors, targets, advantages = np.zeros((3, *rewards.shape), dtype)
    for n, t, leads_to, then in iterate_backward(kind, after):
        if leads_to == TERMINAL:
            value = target = dtype(0)
        elif leads_to == CUT:
            value = target = (bootstrap if next_values is None else next_values)[n, t]
        else:
            value = values[n, then] if next_values is None else next_values[n, t]
            target = value + errors[n, then]
        error = rho[n, t] * (rewards[n, t] + discount_value(g[n, t], value, leads_to) - values[n, t])
        if leads_to == GOES_ON:
            error = error + gated_product(decays[n, t], errors[n, then])
        errors[n, t], targets[n, t] = error, values[n, t] + error
        advantages[n, t] = rho_pg[n, t] * (rewards[n, t] + discount_value(g[n, t], target, leads_to) - values[n, t])
    return targets, advantages


def discount_value(g, value, leads_to):
    """g * NV, whatever g is where the trajectory terminates."""
    return 0 if leads_to == TERMINAL else g * value


def retrace(rewards, q_values, *, gamma=0.99, lambda_=1.0, c_bar=1.0, rho_bar=1.0, dtype=np.float64, **ends):
    """Munos 2016, eq. 3-4: D[t] = r + g*NQ - Q + g*c[t+1]*D[t+1]; targets Q + D; A = rho*(r + g*NQR - Q)."""
    ratios, next_q = take_ratios(ends, dtype), sum_over_actions(*take(ends, *NEXT_Q), dtype)
    kind, after = classify_steps(rewards.shape, gamma=gamma, **ends)
    rewards, q_values, g, lam = cast(dtype, rewards, q_values, gamma, lambda_)
    traces, rho = lam * np.minimum(ratios, dtype(c_bar)), np.minimum(ratios, dtype(rho_bar))
    g = np.broadcast_to(g, rewards.shape)
    errors, targets, advantages = np.zeros((3, *rewards.shape), dtype)
    for n, t, leads_to, then in iterate_backward(kind, after):
        error = rewards[n, t] + discount_value(g[n, t], next_q[n, t], leads_to) - q_values[n, t]
        target = next_q[n, t]
        if leads_to == GOES_ON:
            error = error + gated_product(g[n, t] * traces[n, then], errors[n, then])
            target = targets[n, then]
        errors[n, t], targets[n, t] = error, q_values[n, t] + error
        advantages[n, t] = rho[n, t] * (rewards[n, t] + discount_value(g[n, t], target, leads_to) - q_values[n, t])
    return targets, advantages


NEXT_Q = ("expected_next_q", "next_action_probs", "next_q_values")


def sum_over_actions(expected_next_q, next_action_probs, next_q_values, dtype=np.float64):
    """E_pi[Q(s_{t+1}, .)], summed over one action after another."""
    if expected_next_q is not None:
        return expected_next_q.astype(dtype)
    total = np.zeros(next_q_values.shape[:-1], dtype)
    for a in range(next_q_values.shape[-1]):
        total = total + next_action_probs[..., a].astype(dtype) * next_q_values[..., a].astype(dtype)
    return total


def lambda_returns(
    rewards, values=None, *, gamma=0.99, lambda_=0.95, bootstrap=None, next_values=None, dtype=np.float64, **ends
):
    """Sutton & Barto 2018, eq. 12.18: G[t] = r + g*((1-lam)*NV + lam*G[t+1]); r + g*NV at a cut, r at a terminal."""
    kind, after = classify_steps(rewards.shape, gamma=gamma, **ends)
    rewards, values, bootstrap, next_values = cast(dtype, rewards, values, bootstrap, next_values)
    g, lam = cast(dtype, gamma, lambda_)
    decays, g = np.broadcast_to(g * lam, rewards.shape), np.broadcast_to(g, rewards.shape)
    returns = np.zeros(rewards.shape, dtype)
    for n, t, leads_to, then in iterate_backward(kind, after):
        value, weight = dtype(0), dtype(1)
        if leads_to == CUT:
            value = (bootstrap if next_values is None else next_values)[n, t]
        elif leads_to == GOES_ON:
            value, weight = values[n, then] if next_values is None else next_values[n, t], dtype(1) - lam
        returns[n, t] = rewards[n, t] + discount_value(g[n, t] * weight, value, leads_to)
        if leads_to == GOES_ON:
            returns[n, t] += gated_product(decays[n, t], returns[n, then])
    return (returns,)


def discounted_returns(rewards, **arguments):
    """G[t] = r + g*G[t+1]; r + g*bootstrap at a cut; r at a terminal: the lambda-return of 1, whatever values are."""
    return lambda_returns(rewards, np.zeros_like(rewards), lambda_=1.0, **arguments)


# --- trajectories -----------------------------------------------------------------------------------------------------


def split_row(done, keep, mask_mode):
    """Index arrays of the trajectories of one row, masked steps deleted."""
    found, piece = [], []
    for t in range(len(done)):
        if keep[t]:
            piece.append(t)
        if (done[t] and keep[t]) or (not keep[t] and mask_mode == "reset"):
            found.append(piece)
            piece = []
    return [np.array(p) for p in (*found, piece) if p]


def number_trajectories(shape, terminated=None, truncated=None, mask=None, mask_mode="skip"):
    """A number per cell, equal for the cells of one trajectory; masked cells get -1."""
    ids, numbers = np.full(shape, -1), itertools.count()
    done, keep = np.zeros(shape, bool), np.ones(shape, bool) if mask is None else np.asarray(mask, bool)
    for flags in (terminated, truncated):
        done |= False if flags is None else np.asarray(flags, bool)
    for n in range(shape[0]):
        for piece in split_row(done[n], keep[n], mask_mode):
            ids[n, piece] = next(numbers)
    return ids


# --- forward ----------------------------------------------------------------------------------------------------------


def copy_state(x, state, dtype):
    if state is None:
        return np.zeros((x.shape[0], *x.shape[2:]), dtype), np.zeros(x.shape[0], bool)
    return state[0].astype(dtype), state[1].astype(bool)


def eligibility_traces(
    x, terminated=None, truncated=None, *, decay, state=None, mask=None, mask_mode="skip", dtype=np.float64
):
    """z[t] = x[t] + decay[t]*z[t-1], 0 before an episode's first step. `decay` is a number, or shaped like x.

    Returns z and the state to go on with: the last z, and whether the next step starts afresh.
    """
    return accumulate(*cast(dtype, x, decay), (terminated, truncated), (), state, mask, mask_mode)


def episodic_prefix_sum(
    x, dones=None, *, boundary="ends_at", state=None, mask=None, mask_mode="skip", dtype=np.float64
):
    """C[t] = x[t] + C[t-1] within an episode, integers as integers. Returns C and the state to go on with."""
    x, one = cast(np.int64 if x.dtype.kind == "i" else dtype, x, 1)
    ends, starts = ((dones,), ()) if boundary == "ends_at" else ((), (dones,))
    return accumulate(x, one, ends, starts, state, mask, mask_mode)


def accumulate(x, decay, ends, starts, state, mask, mask_mode):
    decay, sums = np.broadcast_to(decay, x.shape), np.zeros_like(x)
    value, afresh = copy_state(x, state, x.dtype)
    for n in range(x.shape[0]):
        for t in range(x.shape[1]):
            if mask is not None and not mask[n, t]:
                afresh[n] |= mask_mode == "reset"
                continue
            is_first = afresh[n] or any(flags is not None and bool(flags[n, t]) for flags in starts)
            factor = np.zeros_like(decay[n, t]) if is_first else decay[n, t]
            value[n] = sums[n, t] = x[n, t] + np.where(factor == 0, np.zeros_like(factor), factor * value[n])
            afresh[n] = any(flags is not None and bool(flags[n, t]) for flags in ends)
    return sums, (value, afresh)


def linear_recurrence(alpha, beta, initial=None, *, reverse=True, dtype=np.float64):
    """A[t] = alpha[t] + beta[t]*A[t+1], or A[t-1]; a beta of 0 lets nothing through."""
    alpha, beta = cast(dtype, alpha, beta)
    states = np.zeros(alpha.shape, dtype)
    state = np.zeros((len(alpha), *alpha.shape[2:]), dtype) if initial is None else initial.astype(dtype)
    for t in reversed(range(alpha.shape[1])) if reverse else range(alpha.shape[1]):
        state = states[:, t] = alpha[:, t] + np.where(beta[:, t] == 0, dtype(0), beta[:, t] * state)
    return (states,)
