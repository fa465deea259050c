"""Gradient steps of DQN, QR-DQN, SAC and TD3 on MLPs, in loops that Numba compiles, beside those of `serial`.

What networks take, observations and behind them actions, is in rows that all groups share, as derivatives by it are.
"""

from __future__ import annotations

import math

import numpy as np

from rl_triton_core._internal.equations.compile import unbound
from rl_triton_core._internal.mlp.memory import call, load, load_double, store
from rl_triton_core._internal.mlp.serial import (
    ADDRESS,
    BACKWARD,
    BYTES,
    FORWARD,
    GRADIENT,
    NUM_ENDS,
    NUM_PARAMETERS,
    OPTIMIZER,
    PARAMETERS,
    ROW,
    SIZE,
    TILE,
    add,
    clear_gradients,
    clear_slopes,
    fill,
    find_end,
    get,
)

CRITICS, TARGETS, JUDGES, ACTOR, NEXT_ACTOR, ENTROPY, NUM_GROUPS = range(7)
"""Groups: judges are the critics as they value the actor's actions, and the next actor acts at next observations."""
TARGET, LOG_PROB, LEARNED, BY, LOSSES, FIRST_INPUT = range(6)
"""Rows of scratch memory; behind the inputs are the derivatives by them."""
HUBER_DELTA, CRITIC_COEF, ENTROPY_COEF, TARGET_ENTROPY, TAU, KEPT, SHARE = range(7)
"""Numbers of an update; the share of a sample in a mean."""
QUANTILES = 3  # of options, behind those of `serial`: how many a value has; 0 if it is learned itself
CRITIC_LOSS, ACTOR_LOSS, COEF, COEF_LOSS, HAS_STOPPED = range(5)
"""What is reported of a step."""
CATEGORICAL, GAUSSIAN = range(2)  # heads of actors

exp = unbound


def follow(group, targets, numbers):
    """Move targets towards what they follow."""
    share, kept = load(numbers, TAU), load(numbers, KEPT)
    for k in range(get(group, 0, NUM_PARAMETERS)):
        x, y = get(get(group, 0, PARAMETERS), k, ADDRESS), get(get(targets, 0, PARAMETERS), k, ADDRESS)
        for i in range(get(get(group, 0, PARAMETERS), k, SIZE)):
            store(y, i, kept * load(y, i) + share * load(x, i))


def gather_rows(x, first, rows, size):
    """Read what there is of some samples, one per column; whether something is NaN."""
    total = 0.0
    for j in range(x.shape[1]):
        for i in range(size):
            store(rows + j * ROW, i, x[first + i, j])
            total += 0.0 * x[first + i, j]
    return total != total


def evaluate(tables, features, results):
    """What the networks of the first group return, side by side."""
    functions, groups, rows = tables
    for low in range(0, len(features), TILE):
        size, column = min(TILE, len(features) - low), 0
        gather_rows(features, low, rows + FIRST_INPUT * ROW, size)
        call(get(functions, 0, FORWARD), (functions, groups, size))
        for k in range(get(groups, 0, NUM_ENDS)):
            ends, _, width = find_end(groups, k)
            for j in range(width):
                for i in range(size):
                    results[low + i, column + j] = load(ends + j * ROW, i)
            column += width


def draw(head, outputs, drawn, widths, log_std, actions, log_probs):
    """The actions that numbers make of outputs, as `torch.distributions` draw them, rounded as there; log π."""
    for i in range(len(drawn)):
        log_probs[i], end = 0.0, np.int64(0)
        for k in range(actions.shape[1]):
            x, number, first, peak, total, most = outputs[i, k], drawn[i, k], end, outputs[i, end], 0.0, -1.0
            if head == CATEGORICAL:  # the largest quotient of a probability and an exponential number
                end += widths[k]
                for j in range(first, end):
                    peak = max(peak, outputs[i, j])
                for j in range(first, end):
                    weight = math.exp(outputs[i, j] - peak)
                    total += weight
                    if weight / drawn[i, j] > most:
                        most, x, actions[i, k] = weight / drawn[i, j], outputs[i, j], j - first
                log_probs[i] += x - (peak + math.log(total))
            elif head == GAUSSIAN:
                std = math.exp(log_std[k])
                actions[i, k] = x + number * std
                log_probs[i] -= (actions[i, k] - x) ** 2 / (2.0 * (std * std)) + log_std[k] + 0.918938533
            else:
                actions[i, k] = 1.0 if number < 1.0 / (1.0 + math.exp(-x)) else 0.0
                log_probs[i] += min(x, 0.0) - math.log1p(math.exp(-abs(x))) - (1.0 - actions[i, k]) * x


# -- the policy --------------------------------------------------------------------------------------------------------


def bound_log_std(log_std):
    """The logarithm of a deviation, from -20 to 2."""
    return 2.0 if log_std > 2.0 else (-20.0 if log_std < -20.0 else log_std)


def find_rest(action):
    """1 - action², each operation rounded as PyTorch's: little is left of it."""
    square = np.float32(np.float64(action) * np.float64(action))
    return np.float32(np.float64(1.0) - np.float64(square))


def act(group, noise, first, rows, actions, size):
    """Actions of a policy and their log-probabilities; whether a Gaussian's mean or deviation is NaN.

    They are tanh(mean + σ·noise) of a Gaussian; else what the network returns, with noise if there is any within ±1.
    """
    means, _, width = find_end(group, 0)
    is_gaussian, log_probs, is_refused = get(group, 0, NUM_ENDS) == 2, rows + LOG_PROB * ROW, False
    log_stds = find_end(group, 1)[0] if is_gaussian else means
    fill(log_probs, size, 0.0)
    for j in range(width):
        for i in range(size):
            drawn = noise[first + i, j] if len(noise) else 0.0
            mean, raw = load(means + j * ROW, i), load(log_stds + j * ROW, i)
            if is_gaussian:
                log_std = bound_log_std(raw)
                action = np.float32(math.tanh(mean + exp(log_std) * drawn))
                density = np.float32(math.log(np.float32(np.float64(find_rest(action)) + 1e-6)))
                add(log_probs, i, -0.5 * drawn * drawn - log_std - 0.918938533 - density)
                is_refused |= mean != mean or raw != raw
            else:
                noisy = mean + drawn
                action = mean if not len(noise) else (1.0 if noisy > 1.0 else (-1.0 if noisy < -1.0 else noisy))
            store(actions + j * ROW, i, action)
    return is_refused


def find_policy_slopes(group, noise, first, actions, by_actions, numbers, size):
    """Derivatives by what the policy's networks return, from those by its actions."""
    _, by_means, width = find_end(group, 0)
    weight = load(numbers, SHARE) * load(numbers, ENTROPY_COEF)  # of log-probabilities
    is_gaussian = get(group, 0, NUM_ENDS) == 2
    log_stds, by_log_stds, _ = find_end(group, 1 if is_gaussian else 0)
    for j in range(width):
        for i in range(size):
            by = load(by_actions + j * ROW, i)
            if is_gaussian:
                action, raw = load(actions + j * ROW, i), load(log_stds + j * ROW, i)
                rest, log_std = find_rest(action), bound_log_std(raw)
                by = (by + weight * 2.0 * action / (rest + 1e-6)) * rest
                own = by * exp(log_std) * noise[first + i, j] - weight
                store(by_log_stds + j * ROW, i, own if log_std == raw else 0.0)
            store(by_means + j * ROW, i, by)


# -- values ------------------------------------------------------------------------------------------------------------


def find_targets(group, rewards, discounts, first, rows, numbers, size):
    """What critics of actions learn: r + γ·(min Q − α·log π), the least of all targets."""
    best, log_probs, entropy_coef = rows + TARGET * ROW, rows + LOG_PROB * ROW, load(numbers, ENTROPY_COEF)
    for k in range(get(group, 0, NUM_ENDS)):
        values, _, _ = find_end(group, k)
        for i in range(size):
            x = load(values, i)
            store(best, i, x if k == 0 or x < load(best, i) or x != x else load(best, i))
    for i in range(size):
        value = load(best, i) - entropy_coef * load(log_probs, i)
        store(best, i, rewards[first + i] + discounts[first + i] * value)


def find_next_values(group, rewards, discounts, first, targets, count, size):
    """What each of a value's quantiles learns, a row of each: r + γ·Q of the action whose mean is the largest."""
    values, _, width = find_end(group, 0)
    actions = width // count
    for i in range(size):
        best, most = np.int64(0), np.float64(0.0)
        for action in range(actions):
            total = np.float64(0.0)
            for k in range(count):
                total += load(values + (k * actions + action) * ROW, i)
            if action == 0 or total > most or (total != total and most == most):
                best, most = action, total
        for k in range(count):
            value = load(values + (k * actions + best) * ROW, i)
            store(targets + k * ROW, i, rewards[first + i] + discounts[first + i] * value)


def find_errors(group, chosen, first, rows, targets, quantiles, numbers, size):
    """The critics' loss, of values or their quantiles, added up, and its derivatives; whether an action is none."""
    learned, by, losses, count = rows + LEARNED * ROW, rows + BY * ROW, rows + LOSSES * ROW, max(quantiles, np.int64(1))
    delta, total = load(numbers, HUBER_DELTA), np.float64(0.0)
    share = load(numbers, CRITIC_COEF) * load(numbers, SHARE) / count
    for k in range(count * get(group, 0, NUM_ENDS)):
        values, slopes, width = find_end(group, k // count)
        place, actions = k % count * (width // count), width // count
        above = np.float32((k + 0.5) / count if quantiles else 1.0)
        below = np.float32(1.0) - above if quantiles else above
        for i in range(size):
            own = np.int64(chosen[first + i, 0]) if width > 1 else np.int64(0)
            if own < 0 or own >= actions:
                return total, True
            store(learned, i, load(values + (place + own) * ROW, i))
        fill(by, size, 0.0)
        fill(losses, size, 0.0)
        for j in range(count):
            for i in range(size):
                error = load(targets + j * ROW, i) - load(learned, i)
                cut = delta if error > delta else (-delta if error < -delta else error)
                slope = (below if error < 0.0 else above) * cut
                add(by, i, slope)
                add(losses, i, slope * (error - 0.5 * cut))
        for i in range(size):
            own = np.int64(chosen[first + i, 0]) if width > 1 else np.int64(0)
            store(slopes + (place + own) * ROW, i, -share * load(by, i))
            total += load(losses, i)
    return total / count, False


def judge(group, rows, numbers, size):
    """The actor's loss α·log π − min Q, added up, and its derivatives by values; the sum of log π."""
    share, entropy_coef = load(numbers, SHARE), load(numbers, ENTROPY_COEF)
    total = log_probs = np.float64(0.0)
    for i in range(size):
        least, by, _ = find_end(group, 0)
        for k in range(1, get(group, 0, NUM_ENDS)):
            values, slopes, _ = find_end(group, k)
            if load(values, i) < load(least, i) or load(values, i) != load(values, i):
                least, by = values, slopes
        store(by, i, -share)
        log_probs += load(rows + LOG_PROB * ROW, i)
        total += entropy_coef * load(rows + LOG_PROB * ROW, i) - load(least, i)
    return total, log_probs


# -- steps -------------------------------------------------------------------------------------------------------------


def learn_values(tables, samples, low, size):
    """Add the critics' gradients of a tile; its loss, and whether the policy refuses its observations."""
    observations, actions, next_observations, rewards, discounts, _, next_noise = samples
    functions, groups, rows, options, numbers = tables
    inputs, width = rows + FIRST_INPUT * ROW, observations.shape[1]
    critics, targets, actor = groups + CRITICS * BYTES, groups + TARGETS * BYTES, groups + NEXT_ACTOR * BYTES
    fill(rows + LOG_PROB * ROW, size, 0.0)
    is_refused = gather_rows(next_observations, low, inputs, size)
    if get(actor, 0, NUM_ENDS):
        call(get(functions, 0, FORWARD), (functions, actor, size))
        is_refused |= act(actor, next_noise, low, rows, inputs + width * ROW, size)
    call(get(functions, 0, FORWARD), (functions, targets, size))
    learned, quantiles = rows + TARGET * ROW, np.int64(load_double(options, QUANTILES))
    if get(actor, 0, NUM_ENDS):
        find_targets(targets, rewards, discounts, low, rows, numbers, size)
    else:
        learned = inputs + 2 * width * ROW
        find_next_values(targets, rewards, discounts, low, learned, max(quantiles, np.int64(1)), size)
    is_refused |= gather_rows(observations, low, inputs, size)
    if get(actor, 0, NUM_ENDS):
        gather_rows(actions, low, inputs + width * ROW, size)
    call(get(functions, 0, FORWARD), (functions, critics, size))
    clear_slopes(critics, size)
    loss, is_missing = find_errors(critics, actions, low, rows, learned, quantiles, numbers, size)
    call(get(functions, 0, BACKWARD), (functions, critics, size))
    return loss, is_missing or (is_refused and get(actor, 0, NUM_ENDS) == 2)


def learn_policy(tables, samples, low, size):
    """Add the actor's gradients of a tile; its loss, the log-probabilities' sum, and whether the policy refuses it."""
    functions, groups, rows, _, numbers = tables
    observations, noise, width = samples[0], samples[5], samples[0].shape[1]
    actor, judges, inputs = groups + ACTOR * BYTES, groups + JUDGES * BYTES, rows + FIRST_INPUT * ROW
    actions, by_inputs = inputs + width * ROW, inputs + (width + samples[1].shape[1]) * ROW
    gather_rows(observations, low, inputs, size)
    call(get(functions, 0, FORWARD), (functions, actor, size))
    is_refused = act(actor, noise, low, rows, actions, size)
    call(get(functions, 0, FORWARD), (functions, judges, size))
    clear_slopes(judges, size)
    for j in range(width + samples[1].shape[1]):
        fill(by_inputs + j * ROW, TILE, 0.0)
    loss, log_probs = judge(judges, rows, numbers, size)
    call(get(functions, 0, BACKWARD), (functions, judges, size))
    clear_slopes(actor, size)
    find_policy_slopes(actor, noise, low, actions, by_inputs + width * ROW, numbers, size)
    call(get(functions, 0, BACKWARD), (functions, actor, size))
    return loss, log_probs, is_refused


def step_policy(tables, samples, first, size, results, step):
    """Update the actor and the entropy coefficient; whether the policy refuses an observation."""
    functions, groups, _, options, numbers = tables
    actor, entropy = groups + ACTOR * BYTES, groups + ENTROPY * BYTES
    clear_gradients(actor)
    loss, log_probs, is_refused = np.float64(0.0), np.float64(0.0), False
    for low in range(first, first + size, TILE):
        found = learn_policy(tables, samples, low, min(TILE, first + size - low))
        loss, log_probs, is_refused = loss + found[0], log_probs + found[1], is_refused or found[2]
    if is_refused:
        return True
    call(get(functions, 0, OPTIMIZER), (actor, options, numbers))
    results[step, ACTOR_LOSS] = loss / size
    if get(entropy, 0, NUM_PARAMETERS):
        by, own = -np.float32(log_probs / size + load(numbers, TARGET_ENTROPY)), get(entropy, 0, PARAMETERS)
        results[step, COEF_LOSS] = load(get(own, 0, ADDRESS), 0) * by
        store(get(own, 0, GRADIENT), 0, by)
        call(get(functions, 0, OPTIMIZER), (entropy, options, numbers))
    return False


def run_steps(tables, samples, learns_policy, follows, results):
    """Make a gradient step with each minibatch, until the policy refuses one."""
    functions, groups, _, options, numbers = tables
    critics, actor, entropy = groups + CRITICS * BYTES, groups + ACTOR * BYTES, groups + ENTROPY * BYTES
    size = len(samples[0]) // len(results)
    store(numbers, SHARE, np.float32(1.0 / size))
    for step in range(len(results)):
        first, loss, is_refused = step * size, np.float64(0.0), False
        if get(entropy, 0, NUM_PARAMETERS):
            store(numbers, ENTROPY_COEF, math.exp(load(get(get(entropy, 0, PARAMETERS), 0, ADDRESS), 0)))
        clear_gradients(critics)
        for low in range(first, first + size, TILE):
            found = learn_values(tables, samples, low, min(TILE, first + size - low))
            loss, is_refused = loss + found[0], is_refused or found[1]
        results[step, HAS_STOPPED] = 1.0
        if is_refused:
            return
        call(get(functions, 0, OPTIMIZER), (critics, options, numbers))
        results[step, CRITIC_LOSS] = load(numbers, CRITIC_COEF) * loss / size
        results[step, COEF] = load(numbers, ENTROPY_COEF)
        if learns_policy[step] and step_policy(tables, samples, first, size, results, step):
            return
        results[step, HAS_STOPPED] = 0.0
        if follows[step]:
            follow(critics, groups + TARGETS * BYTES, numbers)
            if get(actor, 0, NUM_ENDS) == 1:
                follow(actor, groups + NEXT_ACTOR * BYTES, numbers)
