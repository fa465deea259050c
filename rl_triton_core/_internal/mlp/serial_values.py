"""Gradient steps of DQN, QR-DQN, SAC, TQC and TD3 on MLPs, in loops that Numba compiles, beside those of `serial`.

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
LOG_PROB, LEARNED, BY, LOSSES, FIRST_INPUT = range(5)
"""Rows of scratch memory; behind the inputs are the derivatives by them."""
HUBER_DELTA, CRITIC_COEF, ENTROPY_COEF, TARGET_ENTROPY, TAU, KEPT, SHARE = range(7)
"""Numbers of an update; the share of a sample in a mean."""
QUANTILES, NUM_TARGETS = 3, 4  # of options, behind those of `serial`: how many a value has, or 0, and of what it learns
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


def find_targets(group, rewards, discounts, first, rows, targets, count, quantiles, numbers, size):
    """What critics of actions learn, a row of each: r + γ·(x − α·log π) of the smallest x that all targets return.

    NaN is the largest quantile, but no value is smaller.
    """
    log_probs, entropy_coef = rows + LOG_PROB * ROW, load(numbers, ENTROPY_COEF)
    _, _, width = find_end(group, 0)
    for i in range(size):
        for k in range(width * get(group, 0, NUM_ENDS)):
            values, _, _ = find_end(group, k // width)
            x, place = load(values + k % width * ROW, i), min(np.int64(k), count)
            while place > 0:  # behind those that are smaller
                before = load(targets + (place - 1) * ROW, i)
                if not (before > x or ((before != before and x == x) if quantiles else x != x)):
                    break
                if place < count:
                    store(targets + place * ROW, i, before)
                place -= 1
            if place < count:
                store(targets + place * ROW, i, x)
        for k in range(count):
            value = load(targets + k * ROW, i) - entropy_coef * load(log_probs, i)
            store(targets + k * ROW, i, rewards[first + i] + discounts[first + i] * value)


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


def find_errors(group, chosen, first, rows, targets, num_targets, quantiles, numbers, size):
    """The critics' loss, of values or their quantiles, added up, and its derivatives; whether an action is none."""
    learned, by, losses, count = rows + LEARNED * ROW, rows + BY * ROW, rows + LOSSES * ROW, max(quantiles, np.int64(1))
    delta, total = load(numbers, HUBER_DELTA), np.float64(0.0)
    share = load(numbers, CRITIC_COEF) * load(numbers, SHARE) / num_targets
    for k in range(count * get(group, 0, NUM_ENDS)):
        values, slopes, width = find_end(group, k // count)
        place, actions = k % count * (width // count), width // count
        above = np.float32((k % count + 0.5) / count if quantiles else 1.0)
        below = np.float32(1.0) - above if quantiles else above
        for i in range(size):
            own = np.int64(chosen[first + i, 0]) if actions > 1 else np.int64(0)
            if own < 0 or own >= actions:
                return total, True
            store(learned, i, load(values + (place + own) * ROW, i))
        fill(by, size, 0.0)
        fill(losses, size, 0.0)
        for j in range(num_targets):
            for i in range(size):
                error = load(targets + j * ROW, i) - load(learned, i)
                cut = delta if error > delta else (-delta if error < -delta else error)
                slope = (below if error < 0.0 else above) * cut
                add(by, i, slope + 0.0 * error if quantiles else slope)  # NaN of infinite errors, as in QR-DQN's
                add(losses, i, slope * (error - 0.5 * cut))
        for i in range(size):
            own = np.int64(chosen[first + i, 0]) if actions > 1 else np.int64(0)
            store(slopes + (place + own) * ROW, i, -share * load(by, i))
            total += load(losses, i)
    return total / num_targets, False


def judge_quantiles(group, numbers, size):
    """The mean of all quantiles, added up, and derivatives of the actor's loss by them."""
    total = np.float64(0.0)
    for k in range(get(group, 0, NUM_ENDS)):
        values, by, width = find_end(group, k)
        share = np.float32(1.0) / (width * get(group, 0, NUM_ENDS))
        for j in range(width):
            fill(by + j * ROW, size, -share * load(numbers, SHARE))
            for i in range(size):
                total += share * load(values + j * ROW, i)
    return total


def judge(group, rows, quantiles, numbers, size):
    """The actor's loss α·log π − min Q, added up, and its derivatives by values; the sum of log π."""
    share, entropy_coef = load(numbers, SHARE), load(numbers, ENTROPY_COEF)
    total = log_probs = np.float64(0.0)
    if quantiles:
        total = -judge_quantiles(group, numbers, size)
    for i in range(size if quantiles == 0 else 0):
        least, by, _ = find_end(group, 0)
        for k in range(1, get(group, 0, NUM_ENDS)):
            values, slopes, _ = find_end(group, k)
            if load(values, i) < load(least, i) or load(values, i) != load(values, i):
                least, by = values, slopes
        store(by, i, -share)
        total -= load(least, i)
    for i in range(size):
        log_probs += load(rows + LOG_PROB * ROW, i)
        total += entropy_coef * load(rows + LOG_PROB * ROW, i)
    return total, log_probs


# -- steps -------------------------------------------------------------------------------------------------------------


def learn_values(tables, samples, low, size):
    """Add the critics' gradients of a tile; its loss, 0, and whether the policy refuses its observations."""
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
    quantiles, count = np.int64(load_double(options, QUANTILES)), np.int64(load_double(options, NUM_TARGETS))
    learned = inputs + 2 * (width + (actions.shape[1] if get(actor, 0, NUM_ENDS) else 0)) * ROW
    if get(actor, 0, NUM_ENDS):
        find_targets(targets, rewards, discounts, low, rows, learned, count, quantiles, numbers, size)
    else:
        find_next_values(targets, rewards, discounts, low, learned, count, size)
    is_refused |= gather_rows(observations, low, inputs, size)
    if get(actor, 0, NUM_ENDS):
        gather_rows(actions, low, inputs + width * ROW, size)
    call(get(functions, 0, FORWARD), (functions, critics, size))
    clear_slopes(critics, size)
    loss, is_missing = find_errors(critics, actions, low, rows, learned, count, quantiles, numbers, size)
    call(get(functions, 0, BACKWARD), (functions, critics, size))
    return loss, np.float64(0.0), is_missing or (is_refused and get(actor, 0, NUM_ENDS) == 2)


def learn_policy(tables, samples, low, size):
    """Add the actor's gradients of a tile; its loss, the log-probabilities' sum, and whether the policy refuses it."""
    functions, groups, rows, options, numbers = tables
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
    loss, log_probs = judge(judges, rows, np.int64(load_double(options, QUANTILES)), numbers, size)
    call(get(functions, 0, BACKWARD), (functions, judges, size))
    clear_slopes(actor, size)
    find_policy_slopes(actor, noise, low, actions, by_inputs + width * ROW, numbers, size)
    call(get(functions, 0, BACKWARD), (functions, actor, size))
    return loss, log_probs, is_refused


def learn_tiles(tables, samples, first, end, of_actor, found, lane):
    """Sum up the gradients of some samples, the critics' or the actor's.

    Found are the sums of the loss and of log-probabilities, and whether the policy refuses an observation.
    """
    groups, numbers = tables[1], tables[4]
    entropy = groups + ENTROPY * BYTES
    if get(entropy, 0, NUM_PARAMETERS) and not of_actor:
        store(numbers, ENTROPY_COEF, math.exp(load(get(get(entropy, 0, PARAMETERS), 0, ADDRESS), 0)))
    clear_gradients(groups + (ACTOR if of_actor else CRITICS) * BYTES)
    loss, log_probs, is_refused = np.float64(0.0), np.float64(0.0), False
    for low in range(first, end, TILE):
        size = min(TILE, end - low)
        own = learn_policy(tables, samples, low, size) if of_actor else learn_values(tables, samples, low, size)
        loss, log_probs, is_refused = loss + own[0], log_probs + own[1], is_refused or own[2]
    found[lane, 0], found[lane, 1], found[lane, 2] = loss, log_probs, is_refused


def add_lane(group, other):
    """Add the gradients that another lane has found."""
    for k in range(get(group, 0, NUM_PARAMETERS)):
        x, y = get(get(group, 0, PARAMETERS), k, GRADIENT), get(get(other, 0, PARAMETERS), k, GRADIENT)
        for i in range(get(get(group, 0, PARAMETERS), k, SIZE) if x else 0):
            add(x, i, load(y, i))


def step_coefficient(tables, log_probs, results, step):
    """Update the entropy coefficient, if it is learned, by the mean of log-probabilities."""
    functions, groups, _, options, numbers = tables
    entropy = groups + ENTROPY * BYTES
    if get(entropy, 0, NUM_PARAMETERS):
        by, own = -np.float32(log_probs + load(numbers, TARGET_ENTROPY)), get(entropy, 0, PARAMETERS)
        results[step, COEF_LOSS] = load(get(own, 0, ADDRESS), 0) * by
        store(get(own, 0, GRADIENT), 0, by)
        call(get(functions, 0, OPTIMIZER), (entropy, options, numbers))


def finish(tables, other, size, of_actor, is_last, follows, found, results, step):
    """Make a step with the gradients of two lanes, unless the policy refuses an observation; whether it does.

    The other lane has its own groups, if their address is not 0. Behind the last part of a step, targets may follow.
    """
    functions, groups, _, options, numbers = tables
    place, loss = (ACTOR if of_actor else CRITICS) * BYTES, (found[0, 0] + found[1, 0]) / size
    results[step, HAS_STOPPED] = 1.0
    if found[0, 2] + found[1, 2] != 0.0:
        return True
    if other:
        add_lane(groups + place, other + place)
    call(get(functions, 0, OPTIMIZER), (groups + place, options, numbers))
    if of_actor:
        results[step, ACTOR_LOSS] = loss
        step_coefficient(tables, (found[0, 1] + found[1, 1]) / size, results, step)
    else:
        results[step, CRITIC_LOSS] = load(numbers, CRITIC_COEF) * loss
        results[step, COEF] = load(numbers, ENTROPY_COEF)
    results[step, HAS_STOPPED] = 0.0 if is_last else -1.0  # the critics' part is made
    if is_last and follows:
        follow(groups + CRITICS * BYTES, groups + TARGETS * BYTES, numbers)
        if get(groups + ACTOR * BYTES, 0, NUM_ENDS) == 1:
            follow(groups + ACTOR * BYTES, groups + NEXT_ACTOR * BYTES, numbers)
    return False


def run_steps(tables, samples, size, learns_policy, follows, found, results):
    """Make a gradient step with each minibatch, until the policy refuses one."""
    for step in range(len(results)):
        for part in range(2 if learns_policy[step] else 1):
            of_actor = part == 1
            learn_tiles(tables, samples, step * size, (step + 1) * size, of_actor, found, 0)
            if finish(tables, 0, size, of_actor, of_actor == learns_policy[step], follows[step], found, results, step):
                return
