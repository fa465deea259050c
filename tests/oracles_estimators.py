"""The other estimators as float64 loops straight from the papers' equations. Nothing of ours is imported here.

Arrays are [num_envs, T], with trailing dimensions for actions or features. `bootstrap` is dense: the value that stands
at every cut (`oracles.dense_bootstrap` makes it from the other forms). Masked cells yield 0.

Each estimator is there twice: as the paper's table, one step after another, and one trajectory at a time, as the
explicit sum of the paper that it comes from. With dtype=np.float32 a table rounds every operation to float32: the
serial loop that others are measured by.
"""

import numpy as np

MASKED, TERMINAL, CUT, GOES_ON = range(4)


def what_follows(shape, terminated=None, truncated=None, mask=None, mask_mode="skip", gamma=None):
    """What every step's transition leads to (MASKED ... GOES_ON), and the index of the step it goes on to.

    A discount per step of 0 is a terminal state. So is a masked step in mode "reset", unless the step before it is
    truncated. The end of the window is a cut.
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


def backward(kind, after):
    """(n, t, kind, following t) of every step that is not masked, later ones first."""
    for n, t in np.argwhere(kind != MASKED)[::-1].tolist():
        yield n, t, kind[n, t], after[n, t]


def carry(factor, x):
    """factor * x, where a factor of 0 lets nothing through."""
    return 0 if factor == 0 else factor * x


def log_ratio(log_ratios, target_log_probs, behaviour_log_probs, dtype):
    """log(pi/mu) from either form."""
    if log_ratios is not None:
        return log_ratios.astype(dtype)
    return target_log_probs.astype(dtype) - behaviour_log_probs.astype(dtype)


def cast(dtype, *arrays):
    """Arrays, numbers or None in this type."""
    return [None if x is None else np.asarray(x, dtype) for x in arrays]


# --- backward, as tables ----------------------------------------------------------------------------------------------


def vtrace(
    rewards,
    values,
    terminated=None,
    truncated=None,
    *,
    log_ratios=None,
    target_log_probs=None,
    behaviour_log_probs=None,
    gamma=0.99,
    lambda_=1.0,
    rho_bar=1.0,
    c_bar=1.0,
    rho_bar_pg=None,
    bootstrap=None,
    next_values=None,
    mask=None,
    mask_mode="skip",
    dtype=np.float64,
):
    """Espeholt 2018, section 4.1: D[t] = rho*(r + g*NV - V) + g*c*D[t+1]; vs = V + D; A = rho_pg*(r + g*NVS - V)."""
    kind, after = what_follows(rewards.shape, terminated, truncated, mask, mask_mode, gamma)
    ratios = np.exp(log_ratio(log_ratios, target_log_probs, behaviour_log_probs, dtype))
    rewards, values, bootstrap, next_values = cast(dtype, rewards, values, bootstrap, next_values)
    g, lam, rho_bar_pg = cast(dtype, gamma, lambda_, rho_bar if rho_bar_pg is None else rho_bar_pg)
    rho, rho_pg = (np.minimum(ratios, bar) for bar in cast(dtype, rho_bar, rho_bar_pg))
    decays = np.broadcast_to(g * (lam * np.minimum(ratios, dtype(c_bar))), rewards.shape)
    g = np.broadcast_to(g, rewards.shape)
    errors, targets, advantages = np.zeros((3, *rewards.shape), dtype)
    for n, t, leads_to, then in backward(kind, after):
        if leads_to == TERMINAL:
            value = target = dtype(0)
        elif leads_to == CUT:
            value = target = (bootstrap if next_values is None else next_values)[n, t]
        else:
            value = values[n, then] if next_values is None else next_values[n, t]
            target = value + errors[n, then]
        error = rho[n, t] * (rewards[n, t] + carry_value(g[n, t], value, leads_to) - values[n, t])
        if leads_to == GOES_ON:
            error = error + carry(decays[n, t], errors[n, then])
        errors[n, t], targets[n, t] = error, values[n, t] + error
        advantages[n, t] = rho_pg[n, t] * (rewards[n, t] + carry_value(g[n, t], target, leads_to) - values[n, t])
    return targets, advantages


def carry_value(g, value, leads_to):
    """g * NV, whatever g is where the trajectory terminates."""
    return 0 if leads_to == TERMINAL else g * value


def retrace(
    rewards,
    q_values,
    terminated=None,
    truncated=None,
    *,
    log_ratios=None,
    target_log_probs=None,
    behaviour_log_probs=None,
    expected_next_q=None,
    next_action_probs=None,
    next_q_values=None,
    gamma=0.99,
    lambda_=1.0,
    c_bar=1.0,
    rho_bar=1.0,
    mask=None,
    mask_mode="skip",
    dtype=np.float64,
):
    """Munos 2016, eq. 3-4: D[t] = r + g*NQ - Q + g*c[t+1]*D[t+1]; targets Q + D; A = rho*(r + g*NQR - Q)."""
    kind, after = what_follows(rewards.shape, terminated, truncated, mask, mask_mode, gamma)
    ratios = np.exp(log_ratio(log_ratios, target_log_probs, behaviour_log_probs, dtype))
    rewards, q_values, g, lam = cast(dtype, rewards, q_values, gamma, lambda_)
    next_q = expectation(expected_next_q, next_action_probs, next_q_values, dtype)
    traces, rho = lam * np.minimum(ratios, dtype(c_bar)), np.minimum(ratios, dtype(rho_bar))
    g = np.broadcast_to(g, rewards.shape)
    errors, targets, advantages = np.zeros((3, *rewards.shape), dtype)
    for n, t, leads_to, then in backward(kind, after):
        error = rewards[n, t] + carry_value(g[n, t], next_q[n, t], leads_to) - q_values[n, t]
        target = next_q[n, t]
        if leads_to == GOES_ON:
            error = error + carry(g[n, t] * traces[n, then], errors[n, then])
            target = targets[n, then]
        errors[n, t], targets[n, t] = error, q_values[n, t] + error
        advantages[n, t] = rho[n, t] * (rewards[n, t] + carry_value(g[n, t], target, leads_to) - q_values[n, t])
    return targets, advantages


def expectation(expected_next_q, next_action_probs, next_q_values, dtype=np.float64):
    """E_pi[Q(s_{t+1}, .)], summed over one action after another."""
    if expected_next_q is not None:
        return expected_next_q.astype(dtype)
    total = np.zeros(next_q_values.shape[:-1], dtype)
    for a in range(next_q_values.shape[-1]):
        total = total + next_action_probs[..., a].astype(dtype) * next_q_values[..., a].astype(dtype)
    return total


def lambda_returns(
    rewards,
    values=None,
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
    """Sutton & Barto 2018, eq. 12.18: G[t] = r + g*((1-lam)*NV + lam*G[t+1]); r + g*NV at a cut, r at a terminal."""
    kind, after = what_follows(rewards.shape, terminated, truncated, mask, mask_mode, gamma)
    rewards, values, bootstrap, next_values = cast(dtype, rewards, values, bootstrap, next_values)
    g, lam = cast(dtype, gamma, lambda_)
    decays, g = np.broadcast_to(g * lam, rewards.shape), np.broadcast_to(g, rewards.shape)
    returns = np.zeros(rewards.shape, dtype)
    for n, t, leads_to, then in backward(kind, after):
        value, weight = dtype(0), dtype(1)
        if leads_to == CUT:
            value = (bootstrap if next_values is None else next_values)[n, t]
        elif leads_to == GOES_ON:
            value, weight = values[n, then] if next_values is None else next_values[n, t], dtype(1) - lam
        returns[n, t] = rewards[n, t] + carry_value(g[n, t] * weight, value, leads_to)
        if leads_to == GOES_ON:
            returns[n, t] += carry(decays[n, t], returns[n, then])
    return (returns,)


def discounted_returns(
    rewards,
    terminated=None,
    truncated=None,
    *,
    gamma=0.99,
    bootstrap=None,
    mask=None,
    mask_mode="skip",
    dtype=np.float64,
):
    """G[t] = r + g*G[t+1]; r + g*bootstrap at a cut; r at a terminal."""
    kind, after = what_follows(rewards.shape, terminated, truncated, mask, mask_mode, gamma)
    rewards, bootstrap, g = cast(dtype, rewards, bootstrap, gamma)
    g, returns = np.broadcast_to(g, rewards.shape), np.zeros(rewards.shape, dtype)
    for n, t, leads_to, then in backward(kind, after):
        returns[n, t] = rewards[n, t]
        if leads_to == CUT:
            returns[n, t] += g[n, t] * bootstrap[n, t]
        elif leads_to == GOES_ON:
            returns[n, t] += carry(g[n, t], returns[n, then])
    return (returns,)


# --- backward, one trajectory at a time -------------------------------------------------------------------------------


def trajectories(shape, terminated, truncated, mask, mask_mode):
    """(n, indices of its steps, whether it has a future) of every trajectory: rows are cut, masked steps deleted."""
    for n in range(shape[0]):
        done = np.zeros(shape[1], bool)
        for flags in (terminated, truncated):
            done |= False if flags is None else np.asarray(flags[n], bool)
        keep = np.ones(shape[1], bool) if mask is None else np.asarray(mask[n], bool)
        for piece in pieces(done, keep, mask_mode):
            last = piece[-1]
            term = terminated is not None and terminated[n, last]
            before_hole = mask_mode == "reset" and last + 1 < shape[1] and not keep[last + 1]
            cut_here = truncated is not None and truncated[n, last]
            yield n, piece, not term and (cut_here or not before_hole)


def pieces(done, keep, mask_mode):
    """Index arrays of the trajectories of one row."""
    found, piece = [], []
    for t in range(len(done)):
        if keep[t]:
            piece.append(t)
        if (done[t] and keep[t]) or (not keep[t] and mask_mode == "reset"):
            found.append(piece)
            piece = []
    return [np.array(p) for p in (*found, piece) if p]


def trajectory_ids(shape, terminated=None, truncated=None, mask=None, mask_mode="skip"):
    """A number per cell, equal for the cells of one trajectory; masked cells get -1."""
    ids = np.full(shape, -1)
    for i, (n, piece, _) in enumerate(trajectories(shape, terminated, truncated, mask, mask_mode)):
        ids[n, piece] = i
    return ids


def times(weight, x):
    """weight * x, where a weight of 0 keeps NaN and infinity out."""
    with np.errstate(invalid="ignore"):
        return np.where(weight == 0, 0.0, weight * x)


def tail(has_future, bootstrap, next_values, n, last):
    """What follows the last step of a trajectory."""
    return (bootstrap if next_values is None else next_values)[n, last] if has_future else 0.0


def vtrace_by_trajectory(
    rewards,
    values,
    terminated=None,
    truncated=None,
    *,
    log_ratios=None,
    target_log_probs=None,
    behaviour_log_probs=None,
    gamma=0.99,
    lambda_=1.0,
    rho_bar=1.0,
    c_bar=1.0,
    rho_bar_pg=None,
    bootstrap=None,
    next_values=None,
    mask=None,
    mask_mode="skip",
):
    """Espeholt 2018, eq. 1: vs = V + sum_t g^(t-s) * (prod_{i=s}^{t-1} c_i) * rho_t * (r_t + g*V(s_{t+1}) - V(s_t))."""
    ratios = np.exp(log_ratio(log_ratios, target_log_probs, behaviour_log_probs, np.float64))
    g = np.broadcast_to(np.asarray(gamma, np.float64), rewards.shape)
    targets, advantages = np.zeros((2, *rewards.shape))
    for n, piece, has_future in trajectories(rewards.shape, terminated, truncated, mask, mask_mode):
        end = tail(has_future, bootstrap, next_values, n, piece[-1])
        ahead = values[n, piece[1:]] if next_values is None else next_values[n, piece[:-1]]
        r, v, discount, ratio = (x[n, piece] for x in (rewards, values, g, ratios))
        deltas = np.minimum(rho_bar, ratio) * (r + times(discount, np.append(ahead, end)) - v)
        decays = discount * lambda_ * np.minimum(c_bar, ratio)
        sums = np.array([times(np.cumprod(np.append(1, decays[i:-1])), deltas[i:]).sum() for i in range(len(piece))])
        targets[n, piece] = v + sums
        next_targets = np.append(ahead + sums[1:], end)
        rho = np.minimum(rho_bar if rho_bar_pg is None else rho_bar_pg, ratio)
        advantages[n, piece] = rho * (r + times(discount, next_targets) - v)
    return targets, advantages


def retrace_by_trajectory(
    rewards,
    q_values,
    terminated=None,
    truncated=None,
    *,
    log_ratios=None,
    target_log_probs=None,
    behaviour_log_probs=None,
    expected_next_q=None,
    next_action_probs=None,
    next_q_values=None,
    gamma=0.99,
    lambda_=1.0,
    c_bar=1.0,
    rho_bar=1.0,
    mask=None,
    mask_mode="skip",
):
    """Munos 2016, eq. 3: Q(s_0, a_0) + sum_t g^t * (prod_{i=1}^t c_i) * (r_t + g*E_pi Q(s_{t+1}, .) - Q(s_t, a_t))."""
    ratios = np.exp(log_ratio(log_ratios, target_log_probs, behaviour_log_probs, np.float64))
    g = np.broadcast_to(np.asarray(gamma, np.float64), rewards.shape)
    next_q = (next_action_probs * next_q_values).sum(-1) if expected_next_q is None else expected_next_q
    targets, advantages = np.zeros((2, *rewards.shape))
    for n, piece, has_future in trajectories(rewards.shape, terminated, truncated, mask, mask_mode):
        r, q, discount, ratio = (x[n, piece] for x in (rewards, q_values, g, ratios))
        ahead = np.append(next_q[n, piece[:-1]], next_q[n, piece[-1]] if has_future else 0.0)
        deltas = r + times(discount, ahead) - q
        into = discount[:-1] * lambda_ * np.minimum(c_bar, ratio[1:])
        sums = np.array([times(np.cumprod(np.append(1, into[i:])), deltas[i:]).sum() for i in range(len(piece))])
        targets[n, piece] = q + sums
        following = np.append((q + sums)[1:], ahead[-1])
        advantages[n, piece] = np.minimum(rho_bar, ratio) * (r + times(discount, following) - q)
    return targets, advantages


def lambda_returns_by_trajectory(
    rewards,
    values=None,
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
    """Sutton & Barto 2018, eq. 12.3: (1-lam) * sum_n lam^(n-1) * G^(n), the last n-step return taking the rest."""
    g = np.broadcast_to(np.asarray(gamma, np.float64), rewards.shape)
    returns = np.zeros(rewards.shape)
    for n, piece, has_future in trajectories(rewards.shape, terminated, truncated, mask, mask_mode):
        end = tail(has_future, bootstrap, next_values, n, piece[-1])
        ahead = np.append(values[n, piece[1:]] if next_values is None else next_values[n, piece[:-1]], end)
        for i, t in enumerate(piece):
            weights = np.cumprod(np.append(1, g[n, piece[i:]]))
            sums = np.cumsum(times(weights[:-1], rewards[n, piece[i:]]))
            n_step = sums + times(weights[1:], ahead[i:])
            mixture = (1 - lambda_) * float(lambda_) ** np.arange(len(n_step))
            mixture[-1] = float(lambda_) ** (len(n_step) - 1)
            returns[n, t] = (mixture * n_step).sum()
    return (returns,)


def discounted_returns_by_trajectory(
    rewards, terminated=None, truncated=None, *, gamma=0.99, bootstrap=None, mask=None, mask_mode="skip"
):
    """Sum_k g^k * r[t+k], and g^K times the value at the end."""
    g = np.broadcast_to(np.asarray(gamma, np.float64), rewards.shape)
    returns = np.zeros(rewards.shape)
    for n, piece, has_future in trajectories(rewards.shape, terminated, truncated, mask, mask_mode):
        stream = np.append(rewards[n, piece], bootstrap[n, piece[-1]] if has_future else 0.0)
        for i, t in enumerate(piece):
            returns[n, t] = times(np.cumprod(np.append(1, g[n, piece[i:]])), stream[i:]).sum()
    return (returns,)


# --- forward ----------------------------------------------------------------------------------------------------------


def initial_state(x, state, dtype):
    """Copies of (value, done), or those of a stream that begins."""
    if state is None:
        return np.zeros((x.shape[0], *x.shape[2:]), dtype), np.zeros(x.shape[0], bool)
    return state[0].astype(dtype), state[1].astype(bool)


def eligibility_traces(
    x, terminated=None, truncated=None, *, decay, state=None, mask=None, mask_mode="skip", dtype=np.float64
):
    """z[t] = x[t] + decay[t]*z[t-1], 0 before an episode's first step. `decay` is a number, or shaped like x.

    Returns z and the state to go on with: the last z, and whether the next step starts afresh.
    """
    x, decay = cast(dtype, x, decay)
    decay, traces = np.broadcast_to(decay, x.shape), np.zeros(x.shape, dtype)
    value, done = initial_state(x, state, dtype)
    for n in range(x.shape[0]):
        for t in range(x.shape[1]):
            if mask is not None and not mask[n, t]:
                done[n] |= mask_mode == "reset"
                continue
            factor = np.zeros_like(decay[n, t]) if done[n] else decay[n, t]
            value[n] = traces[n, t] = x[n, t] + np.where(factor == 0, dtype(0), factor * value[n])
            done[n] = any(flags is not None and bool(flags[n, t]) for flags in (terminated, truncated))
    return traces, (value, done)


def eligibility_traces_by_trajectory(
    x, terminated=None, truncated=None, *, decay, state=None, mask=None, mask_mode="skip"
):
    """z[t] = sum_k (prod_{j=k+1}^t decay[j]) * x[k] over the steps k <= t of the episode; an initial trace first.

    Returns z only.
    """
    decay, traces = np.broadcast_to(np.asarray(decay, np.float64), x.shape), np.zeros(x.shape)
    begun = set()
    for n, piece, _ in trajectories(x.shape[:2], terminated, truncated, mask, mask_mode):
        stream, factors = x[n, piece], decay[n, piece]
        carries_on = state is not None and n not in begun and not state[1][n]
        carries_on &= mask_mode == "skip" or piece[0] == 0
        begun.add(n)
        if carries_on:
            stream = np.concatenate([state[0][n][None], stream])
        else:
            factors = factors[1:]
        for i, t in enumerate(piece, start=len(stream) - len(piece)):
            weights = [np.prod(factors[k:i], axis=0) for k in range(i + 1)]
            traces[n, t] = sum(times(w, s) for w, s in zip(weights, stream, strict=False))
    return traces


def episodic_prefix_sum(
    x, dones=None, *, boundary="ends_at", state=None, mask=None, mask_mode="skip", dtype=np.float64
):
    """C[t] = x[t] + C[t-1] within an episode, integers as integers. Returns C and the state to go on with."""
    dtype = np.int64 if x.dtype.kind == "i" else dtype
    x, sums = x.astype(dtype), np.zeros(x.shape, dtype)
    value, afresh = initial_state(x, state, dtype)
    for n in range(x.shape[0]):
        for t in range(x.shape[1]):
            if mask is not None and not mask[n, t]:
                afresh[n] |= mask_mode == "reset"
                continue
            done = dones is not None and bool(dones[n, t])
            start = afresh[n] or (boundary == "starts_at" and done)
            value[n] = sums[n, t] = x[n, t] if start else x[n, t] + value[n]
            afresh[n] = boundary == "ends_at" and done
    return sums, (value, afresh)


def episodic_prefix_sum_by_trajectory(x, dones=None, *, boundary="ends_at", state=None, mask=None, mask_mode="skip"):
    """A cumulative sum of each piece. Returns C only."""
    shape, sums = x.shape[:2], np.zeros(x.shape, np.int64 if x.dtype.kind == "i" else np.float64)
    ends, begins = dones, np.zeros(shape, bool)
    if boundary == "starts_at" and dones is not None:
        keep = np.ones(shape, bool) if mask is None else mask
        ends = np.zeros(shape, bool)
        for n in range(shape[0]):
            steps = np.flatnonzero(keep[n])
            ends[n, steps[:-1]] = dones[n, steps[1:]]
            begins[n, steps[:1]] = dones[n, steps[:1]]
    begun = set()
    for n, piece, _ in trajectories(shape, ends, None, mask, mask_mode):
        sums[n, piece] = np.cumsum(x[n, piece], axis=0)
        fresh = n in begun or state is None or state[1][n] or begins[n, piece[0]]
        if not fresh and (mask_mode == "skip" or piece[0] == 0):
            sums[n, piece] += state[0][n]
        begun.add(n)
    return sums


def linear_recurrence(alpha, beta, initial=None, *, reverse=True, dtype=np.float64):
    """A[t] = alpha[t] + beta[t]*A[t+1], or A[t-1]; a beta of 0 lets nothing through."""
    alpha, beta = cast(dtype, alpha, beta)
    states = np.zeros(alpha.shape, dtype)
    state = np.zeros((len(alpha), *alpha.shape[2:]), dtype) if initial is None else initial.astype(dtype)
    for t in reversed(range(alpha.shape[1])) if reverse else range(alpha.shape[1]):
        state = states[:, t] = alpha[:, t] + np.where(beta[:, t] == 0, dtype(0), beta[:, t] * state)
    return (states,)


def linear_recurrence_as_sum(alpha, beta, initial=None, *, reverse=True):
    """A[t] = sum_k (prod of the betas from t up to k) * alpha[k], the initial state being the last of the alphas."""
    if not reverse:
        flipped = linear_recurrence_as_sum(alpha[:, ::-1], beta[:, ::-1], initial)
        return (flipped[0][:, ::-1],)
    initial = np.zeros((len(alpha), *alpha.shape[2:])) if initial is None else initial
    stream = np.concatenate([alpha, initial[:, None]], axis=1)
    states = np.zeros(alpha.shape)
    for t in range(alpha.shape[1]):
        for k in range(t, stream.shape[1]):
            states[:, t] += times(np.prod(beta[:, t:k], axis=1), stream[:, k])
    return (states,)
