"""An epoch of PPO or A2C on two MLPs, in loops that Numba compiles.

A minibatch is worked through in tiles of samples. In a tile, whatever there is of each sample is a row: products then
run along samples, however narrow a layer is. Rows and parameters are addresses, since Numba takes long to compile
slices of arrays. `compile` binds the equations of the loss. A function calls only those that are written before it.
"""

from __future__ import annotations

import math

import numpy as np

from rl_triton_core._internal.equations.compile import unbound
from rl_triton_core._internal.loss.equations import Coefficients
from rl_triton_core._internal.mlp.memory import (
    MOST,
    WIDTH,
    call,
    large_block,
    load,
    load_double,
    load_integer,
    narrow_block,
    small_block,
    store,
    transpose,
)

TILE = 128
"""Samples of a tile."""
ROW = 4 * TILE
"""Bytes of a row."""
COLUMNS = 10
"""Of a table of layers, of parameters or of groups."""
BYTES = 8 * COLUMNS
"""Of a row of such a table."""
INPUTS, OUTPUTS, ACTIVATION, WEIGHT, BIAS, SOURCE, SUMS, VALUES, SLOPES, BY_SOURCE = range(COLUMNS)
"""Of a layer: sizes, parameters, and addresses of its inputs' rows, of its own, and of derivatives; 0: not wanted."""
ADDRESS, GRADIENT, SIZE, STEP, FIRST_STATE, SECOND_STATE, THIRD_STATE, LAST_GRADIENT = range(8)
"""Of a parameter: its size, and addresses, 0 if it has none. The last gradient is that of the last step."""
LAYERS, NUM_LAYERS, KINKS, PARAMETERS, NUM_PARAMETERS, SETTING, ENDS, NUM_ENDS, SPARE = range(9)
"""Of a group of networks: tables of layers and parameters, which layers are the last of a network, spare memory."""
RATE, DECAY, KEPT, BETA, SECOND_BETA, EPS, MOMENTUM, IS_NESTEROV, RULE, SETTINGS = range(10)
"""Of a parameter: the settings of its optimizer, and how many there are."""
PRODUCT, FORWARD, BACKWARD, EVALUATION, OPTIMIZER = range(5)
"""Addresses of functions."""
ADAM, RMSPROP, RMSPROP_TF, SGD = range(4)
TANH, RELU, ELU, SILU, GELU, IDENTITY = range(6)
OLD, ADVANTAGE, TARGET, OLD_VALUE, LOG_PROB, HEAD_ENTROPY, HEAD_KL = range(7)
BY_LOG_PROB, BY_ENTROPY, BY_KL, TOTALS, FIRST_SUM = range(7, 12)
"""Rows of the loss. The last ones are the sums of each distribution, after them the actions and old outputs."""
PEAK, FIRST_KL_SUM, SECOND_KL_SUM, OLD_PEAK, NUM_SUMS = range(3, 8)
"""Rows of a distribution, behind its three sums."""
CLIP, VALUE_COEF, VALUE_CLIP, ENTROPY_COEF, SHARE, KL_COEF, LOG_STD_BOUND, NORM, NUM_NUMBERS = range(9)
"""Numbers of the loss, and the norm of the gradients."""
POLICY_LOSS, VALUE_LOSS, ENTROPY, CLIP_FRACTION, APPROX_KL, LOSS, KL, GRAD_NORM, HAS_STOPPED = range(9)
"""What is reported of a minibatch; the first seven are averages over its samples."""
MAX_NORM, CLIP_MODE, REPLACES_NAN, MAX_KL, NORMALIZES, IS_ON_POLICY = range(6)
"""Options of an update."""
GLOBAL_NORM, EACH_NORM, EACH_VALUE = range(3)
"""What of the gradients is bounded."""
MASKED_LOGIT, LARGEST = np.float32(-1e8), np.float32(3.4028234663852886e38)
IS_INDEXED = IS_BINARY = HAS_OLD = IS_WIDE = IS_GAUSSIAN = False
"""Whether actions are indices, or 0 and 1; whether there are old outputs; whether log σ is in a network's outputs."""

sums = readout = slopes = kl_sums = kl = kl_slopes = unbound
combine_terms = compute_terms = exp = exp_remainder = sigmoid = multiply_or_zero = sqrt = unbound

# -- memory ------------------------------------------------------------------------------------------------------------


def get(table, row, column):
    """An entry of a table of layers, parameters or groups."""
    return load_integer(table, row * COLUMNS + column)


def add(x, i, number):
    """Add to a number in memory."""
    store(x, i, load(x, i) + number)


def round_up(size):
    """The numbers of whole vectors."""
    return WIDTH * ((size + WIDTH - 1) // WIDTH)


def fill(x, size, number):
    """Fill memory with a number."""
    for j in range(size):
        store(x, j, number)


# -- products ----------------------------------------------------------------------------------------------------------


def dot(x, y, size):
    """The sum of products."""
    total = 0.0
    for j in range(size):
        total += load(x, j) * load(y, j)
    return total


def add_product(a, row, column, b, b_stride, c, c_stride, m, n, columns, spare):
    """Add a·b to c, [m, n]·[n, columns]; strides are those of a's numbers, and of rows in bytes.

    There is spare memory for four vectors: of c, nothing is touched behind its columns.
    """
    i = np.int64(0)
    while i < m:
        is_whole, j = np.int64(m - i >= 4), np.int64(0)
        num_rows, own, c_step = 1 + 3 * is_whole, is_whole * row, is_whole * c_stride  # one is all four of a block
        while j < columns:
            left, x, y, z, z_stride = columns - j, a + 4 * i * row, b + 4 * j, c + i * c_stride + 4 * j, c_step
            if left < WIDTH:
                z, z_stride = spare, np.int64(4 * WIDTH)
                fill(spare, 4 * WIDTH, 0.0)
            vectors = MOST if left >= MOST * WIDTH else (2 if left >= 2 * WIDTH else 1)
            if vectors == MOST:
                large_block(x, own, column, y, b_stride, z, z_stride, n)
            elif vectors == 2:
                small_block(x, own, column, y, b_stride, z, z_stride, n)
            else:
                narrow_block(x, own, column, y, b_stride, z, z_stride, n)
            for r in range(num_rows if left < WIDTH else 0):
                for k in range(left):
                    add(c + (i + r) * c_stride, j + k, load(spare + 4 * r * WIDTH, k))
            j += vectors * WIDTH
        i += num_rows


def add_gradient(functions, by, source, gradient, outputs, inputs, size, spare):
    """Add by·sourceᵀ to a gradient, [outputs, size]·[size, inputs], in spare memory for what is transposed."""
    stride = 4 * round_up(inputs)
    for j in range(0, inputs, WIDTH):  # in whole vectors, of what is behind as well
        for i in range(0, size, WIDTH):
            transpose(source + j * ROW + 4 * i, ROW, spare + i * stride + 4 * j, stride)
    product = by, TILE, 1, spare, stride, gradient, 4 * inputs, outputs, size, inputs, spare + size * stride
    call(get(functions, 0, PRODUCT), product)


# -- activations -------------------------------------------------------------------------------------------------------


def tanh(x):
    """The hyperbolic tangent: a quotient of polynomials (as in Eigen), and 1 where nothing is left of its slope."""
    above, below = x > 8.66, x < -8.66
    x = 7.9053111 if x > 7.9053111 else (-7.9053111 if x < -7.9053111 else x)
    s = x * x
    p = s * (s * (s * -2.76076847742355e-16 + 2.00018790482477e-13) - 8.60467152213735e-11) + 5.12229709037114e-08
    p = s * (s * (s * p + 1.48572235717979e-05) + 6.37261928875436e-04) + 4.89352455891786e-03
    q = s * (s * (s * 1.19825839466702e-06 + 1.18534705686654e-04) + 2.26843463243900e-03) + 4.89352518554385e-03
    y = 1.0 if above else x * p / q
    return -1.0 if below else y


def activate(kind, slope, x, y, size):
    """Apply an activation to a row."""
    if kind == TANH:
        for i in range(size):
            store(y, i, tanh(load(x, i)))
    elif kind == RELU:
        for i in range(size):
            store(y, i, slope * load(x, i) if load(x, i) < 0.0 else load(x, i))
    elif kind == ELU:
        for i in range(size):
            below = load(x, i) if load(x, i) < 0.0 else 0.0
            store(y, i, slope * (exp_remainder(below) + below) if load(x, i) < 0.0 else load(x, i))
    elif kind == SILU:
        for i in range(size):
            store(y, i, load(x, i) * sigmoid(load(x, i)))
    else:
        for i in range(size):
            store(y, i, load(x, i) * (0.5 + 0.5 * math.erf(load(x, i) * 0.70710678)))


def multiply_slopes(kind, slope, x, y, by, size):
    """Multiply derivatives by the activation's results by its own."""
    if kind == TANH:
        for i in range(size):
            store(by, i, load(by, i) * (1.0 - load(y, i) * load(y, i)))
    elif kind == RELU:
        for i in range(size):
            below = slope * load(by, i) if slope != 0.0 else 0.0  # of ReLU 0 for NaN, too, as in PyTorch
            store(by, i, below if load(x, i) <= 0.0 else load(by, i))
    elif kind == ELU:
        for i in range(size):
            store(by, i, load(by, i) * (1.0 if load(x, i) > 0.0 else load(y, i) + slope))
    elif kind == SILU:
        for i in range(size):
            s = sigmoid(load(x, i))
            store(by, i, load(by, i) * s * (1.0 + load(x, i) * (1.0 - s)))
    else:
        for i in range(size):
            z = load(x, i)
            density = 0.39894228 * exp(-0.5 * z * z)
            store(by, i, load(by, i) * (0.5 + 0.5 * math.erf(z * 0.70710678) + z * density))


# -- networks ----------------------------------------------------------------------------------------------------------


def find_end(group, k):
    """The rows of what a network of a group returns, of derivatives by it, and how many there are."""
    layers, end = get(group, 0, LAYERS), load_integer(get(group, 0, ENDS), k)
    return get(layers, end, VALUES), get(layers, end, SLOPES), get(layers, end, OUTPUTS)


def run_forward(functions, group, size):
    """Take a tile through a group of networks."""
    layers, kinks, parameters = get(group, 0, LAYERS), get(group, 0, KINKS), get(group, 0, PARAMETERS)
    for k in range(get(group, 0, NUM_LAYERS)):
        inputs, outputs, kind = get(layers, k, INPUTS), get(layers, k, OUTPUTS), get(layers, k, ACTIVATION)
        weight, bias = get(layers, k, WEIGHT), get(layers, k, BIAS)
        sums, values = get(layers, k, SUMS), get(layers, k, VALUES)
        matrix, whole = get(parameters, weight, ADDRESS), round_up(size)
        for r in range(outputs):
            fill(sums + r * ROW, whole, load(get(parameters, bias, ADDRESS), r) if bias >= 0 else 0.0)
        product = matrix, inputs, 1, get(layers, k, SOURCE), ROW, sums, ROW, outputs, inputs, whole, 0
        call(get(functions, 0, PRODUCT), product)
        for r in range(outputs if kind != IDENTITY else 0):
            activate(kind, load(kinks, k), sums + r * ROW, values + r * ROW, size)


def run_backward(functions, group, size):
    """Add the gradients of a tile, from derivatives by the outputs of the last layers."""
    layers, kinks, parameters = get(group, 0, LAYERS), get(group, 0, KINKS), get(group, 0, PARAMETERS)
    spare = get(group, 0, SPARE)
    for k in range(get(group, 0, NUM_LAYERS) - 1, -1, -1):
        inputs, outputs, kind = get(layers, k, INPUTS), get(layers, k, OUTPUTS), get(layers, k, ACTIVATION)
        weight, bias = get(layers, k, WEIGHT), get(layers, k, BIAS)
        by, source, by_source = get(layers, k, SLOPES), get(layers, k, SOURCE), get(layers, k, BY_SOURCE)
        for r in range(outputs if kind != IDENTITY else 0):
            own = get(layers, k, SUMS) + r * ROW, get(layers, k, VALUES) + r * ROW
            multiply_slopes(kind, load(kinks, k), own[0], own[1], by + r * ROW, size)
        if get(parameters, weight, GRADIENT):
            add_gradient(functions, by, source, get(parameters, weight, GRADIENT), outputs, inputs, size, spare)
        by_bias = get(parameters, bias, GRADIENT) if bias >= 0 else 0
        for r in range(outputs if by_bias else 0):
            total = 0.0
            for i in range(size):
                total += load(by + r * ROW, i)
            add(by_bias, r, total)
        if by_source:
            matrix, whole = get(parameters, weight, ADDRESS), round_up(size)
            product = matrix, 1, inputs, by, ROW, by_source, ROW, inputs, outputs, whole, 0
            call(get(functions, 0, PRODUCT), product)


def clear_slopes(group, size):
    """Forget the derivatives of a tile."""
    for k in range(get(group, 0, NUM_LAYERS)):
        for r in range(get(get(group, 0, LAYERS), k, OUTPUTS)):
            fill(get(get(group, 0, LAYERS), k, SLOPES) + r * ROW, round_up(size), 0.0)


def clear_gradients(group):
    """Forget the gradients of a minibatch."""
    for k in range(get(group, 0, NUM_PARAMETERS)):
        gradient = get(get(group, 0, PARAMETERS), k, GRADIENT)
        fill(gradient, get(get(group, 0, PARAMETERS), k, SIZE) if gradient else 0, 0.0)


# -- the loss ----------------------------------------------------------------------------------------------------------


def find_actions(rows, num_parts):
    """The address of the actions."""
    return rows + (FIRST_SUM + NUM_SUMS * num_parts) * ROW


def choose_action(actions, j, i):
    """The action in a dimension, or whether it is this one."""
    if IS_INDEXED:
        return 1.0 if load(actions, i) == j else 0.0
    return load(actions + j * ROW, i)


def has_actions(actions, width, i):
    """Whether a distribution has a sample's actions: indices below its width, or 0 and 1, or any numbers."""
    if IS_INDEXED:
        return load(actions, i) >= 0.0 and load(actions, i) < width
    for j in range(width if IS_BINARY else 0):
        if load(actions + j * ROW, i) != 0.0 and load(actions + j * ROW, i) != 1.0:
            return False
    return True


def find_log_std(y, j, i, bound):
    """The logarithm of a deviation, at most as large as the bound."""
    own = load(y + j * ROW, i) if IS_WIDE else load(y, j)
    return bound if own > bound else (-bound if own < -bound else own)


def find_peaks(x, peaks, width, size):
    """The largest logit of each sample."""
    for i in range(size):
        store(peaks, i, load(x, i))
    for j in range(1, width):
        for i in range(size):
            logit = load(x + j * ROW, i)
            store(peaks, i, logit if logit > load(peaks, i) else load(peaks, i))


def add_sums(x, y, actions, j, bound, state, size):
    """Add what a head sums over the actions."""
    for i in range(size):
        s = sums(load(x, i), find_log_std(y, j, i, bound), choose_action(actions, j, i), load(state + PEAK * ROW, i))
        add(state, i, s[0])
        add(state + ROW, i, s[1])
        add(state + 2 * ROW, i, s[2])


def add_kl_sums(x, y, old, old_y, j, bound, state, size):
    """Add what a head's divergence from the old policy sums over the actions."""
    for i in range(size):
        peaks = load(state + PEAK * ROW, i), load(state + OLD_PEAK * ROW, i)
        s = kl_sums(load(x, i), find_log_std(y, j, i, bound), load(old, i), load(old_y, i), peaks[0], peaks[1])
        add(state + FIRST_KL_SUM * ROW, i, s[0])
        add(state + SECOND_KL_SUM * ROW, i, s[1])


def load_sums(state, i):
    """The sums of a sample's distribution."""
    return load(state, i), load(state + ROW, i), load(state + 2 * ROW, i)


def load_kl_sums(state, i):
    """Those of its divergence from the old one."""
    return load(state + FIRST_KL_SUM * ROW, i), load(state + SECOND_KL_SUM * ROW, i)


def evaluate_heads(x, y, old, rows, widths, num_parts, numbers, size):
    """Log-probability, entropy and divergence of each sample, over distributions side by side, and their sums."""
    log_probs, entropies, kls = rows + LOG_PROB * ROW, rows + HEAD_ENTROPY * ROW, rows + HEAD_KL * ROW
    bound, state, actions = load(numbers, LOG_STD_BOUND), rows + FIRST_SUM * ROW, find_actions(rows, num_parts)
    for results in (log_probs, entropies, kls):
        fill(results, size, 0.0)
    for part in range(num_parts):
        width = load_integer(widths, part)
        for k in range(NUM_SUMS):
            fill(state + k * ROW, size, 0.0)
        if IS_INDEXED:
            find_peaks(x, state + PEAK * ROW, width, size)
        if IS_INDEXED and HAS_OLD:
            find_peaks(old, state + OLD_PEAK * ROW, width, size)
        for j in range(width):
            add_sums(x + j * ROW, y, actions, j, bound, state, size)
            if HAS_OLD:
                own = old + j * ROW
                add_kl_sums(x + j * ROW, y, own, own + width * ROW if IS_GAUSSIAN else own, j, bound, state, size)
        for i in range(size):
            log_prob, entropy = readout(load_sums(state, i))
            add(log_probs, i, log_prob if has_actions(actions, width, i) else math.nan)
            add(entropies, i, entropy)
            if HAS_OLD:
                add(kls, i, kl(load_sums(state, i), load_kl_sums(state, i)))
        x, old, state, actions = x + width * ROW, old + width * ROW, state + NUM_SUMS * ROW, actions + ROW


def evaluate_terms(rows, values, by_values, numbers, is_on_policy, size):
    """Add up the terms of each sample; derivatives by log-probability, entropy and value."""
    clip, value_coef, value_clip = load(numbers, CLIP), load(numbers, VALUE_COEF), load(numbers, VALUE_CLIP)
    entropy_coef, kl_coef = load(numbers, ENTROPY_COEF), load(numbers, KL_COEF)
    share, inf = load(numbers, SHARE), np.float32(math.inf)
    coefficients = Coefficients(clip, clip, inf, value_coef, value_clip, 1.0, 1.0, entropy_coef, kl_coef, inf, inf)
    policies = value_losses = entropies = kls = approx_kls = clips = np.float64(0.0)
    for i in range(size):
        log_prob, advantage = load(rows + LOG_PROB * ROW, i), load(rows + ADVANTAGE * ROW, i)
        old = log_prob if is_on_policy else load(rows + OLD * ROW, i)
        policy = log_prob, load(rows + HEAD_ENTROPY * ROW, i), load(rows + HEAD_KL * ROW, i)
        target, old_value = load(rows + TARGET * ROW, i), load(rows + OLD_VALUE * ROW, i)
        terms, by_policy, by_value = compute_terms(
            policy, old, advantage, 0.0, load(values, i), target, old_value, coefficients
        )
        policies += -multiply_or_zero(advantage, log_prob) if is_on_policy else terms[0]
        value_losses += terms[1]
        entropies += terms[2]
        kls += terms[3]
        approx_kls += terms[4]
        clips += terms[6]
        store(rows + BY_LOG_PROB * ROW, i, share * by_policy[0])
        store(rows + BY_ENTROPY * ROW, i, share * by_policy[1])
        store(rows + BY_KL * ROW, i, share * by_policy[2])
        store(by_values, i, share * by_value)
    loss = combine_terms(policies, value_losses, entropies, kls, coefficients)
    for k, total in enumerate((policies, value_losses, entropies, clips, approx_kls, loss, kls)):
        store(rows + TOTALS * ROW, k, np.float32(total))


def find_slopes(x, y, old, rows, widths, num_parts, by_x, by_y, numbers, size):
    """Derivatives by what the actor returns, and add those by what all samples share."""
    bound, state, actions = load(numbers, LOG_STD_BOUND), rows + FIRST_SUM * ROW, find_actions(rows, num_parts)
    for part in range(num_parts):
        width = load_integer(widths, part)
        for j in range(width):
            total = 0.0
            for i in range(size):
                own, action, peak = load_sums(state, i), choose_action(actions, j, i), load(state + PEAK * ROW, i)
                by_log_prob, by_entropy = load(rows + BY_LOG_PROB * ROW, i), load(rows + BY_ENTROPY * ROW, i)
                mean, log_std = load(x, i), find_log_std(y, j, i, bound)
                by_own, by_log_std = slopes(mean, log_std, action, peak, own, by_log_prob, by_entropy)
                if HAS_OLD:
                    old_y = load(old + width * ROW, i) if IS_GAUSSIAN else 0.0
                    peaks, kl_total = (peak, load(state + OLD_PEAK * ROW, i)), load_kl_sums(state, i)
                    by = kl_slopes(mean, log_std, load(old, i), old_y, peaks[0], peaks[1], own, kl_total)
                    by_kl = load(rows + BY_KL * ROW, i)
                    by_own += multiply_or_zero(by_kl, by[0])
                    by_log_std += multiply_or_zero(by_kl, by[1])
                store(by_x, i, by_own)
                if IS_WIDE:
                    is_free = log_std == load(y + j * ROW, i)
                    store(by_x + width * ROW, i, by_log_std if is_free else 0.0)
                total += by_log_std
            if by_y and find_log_std(y, j, 0, bound) == load(y, j):
                add(by_y, j, total)
            x, old, by_x = x + ROW, old + ROW, by_x + ROW
        state, actions = state + NUM_SUMS * ROW, actions + ROW


def evaluate_loss(x, y, old, values, rows, widths, num_parts, by_x, by_y, by_values, numbers, is_on_policy, size):
    """The terms of the loss of a tile, added up, and its derivatives by what the networks return."""
    evaluate_heads(x, y, old, rows, widths, num_parts, numbers, size)
    evaluate_terms(rows, values, by_values, numbers, is_on_policy, size)
    find_slopes(x, y, old, rows, widths, num_parts, by_x, by_y, numbers, size)


# -- optimizers --------------------------------------------------------------------------------------------------------


def load_setting(setting, column):
    """A setting in float32."""
    return np.float32(load_double(setting, column))


def bound_square(square, replaces_nan):
    """The square of a norm by which gradients are clipped: of one that is NaN 0, of an infinite one that of 1e9."""
    if not replaces_nan:
        return square
    return np.float64(0.0) if square != square else min(square, np.float64(1e18))


def clip_gradient(gradient, size, mode, most, factor):
    """Scale a gradient by a factor or so that its norm is at most a bound, or bound its elements."""
    if mode == EACH_VALUE:
        for i in range(size):
            x = load(gradient, i)
            store(gradient, i, most if x > most else (-most if x < -most else x))
    elif factor < 1.0 or factor != factor:
        for i in range(size):
            store(gradient, i, factor * load(gradient, i))


def clip_gradients(parameters, num_parameters, options, numbers):
    """Clip all gradients, and perhaps replace what is not finite, as `torch.nan_to_num` does."""
    most, mode = load_setting(options, MAX_NORM), load_double(options, CLIP_MODE)
    replaces_nan, squares, known = load_double(options, REPLACES_NAN) != 0.0, np.float64(0.0), np.float64(0.0)
    for k in range(num_parameters):
        gradient = get(parameters, k, GRADIENT)
        square = np.float64(dot(gradient, gradient, get(parameters, k, SIZE) if gradient else 0))
        squares += square
        known += bound_square(square, replaces_nan)
    factor = np.float32(most / (math.sqrt(known) + 1e-6))
    for k in range(num_parameters):
        gradient = get(parameters, k, GRADIENT)
        size = get(parameters, k, SIZE) if gradient else 0
        if mode == EACH_NORM:
            factor = np.float32(most / math.sqrt(bound_square(np.float64(dot(gradient, gradient, size)), replaces_nan)))
        clip_gradient(gradient, size, mode, most, factor)
        for i in range(size if replaces_nan and not math.isfinite(squares) else 0):
            x = load(gradient, i)
            store(gradient, i, 0.0 if x != x else (LARGEST if x > LARGEST else (-LARGEST if x < -LARGEST else x)))
    store(numbers, NORM, np.float32(math.sqrt(squares)))


def find_memory(parameter):
    """Size and addresses of a parameter, its gradient and its states."""
    p, g, size = get(parameter, 0, ADDRESS), get(parameter, 0, GRADIENT), get(parameter, 0, SIZE)
    return size, p, g, get(parameter, 0, FIRST_STATE), get(parameter, 0, SECOND_STATE), get(parameter, 0, THIRD_STATE)


def step_adam(parameter, setting):
    """Adam (Kingma and Ba 2015), or AdamW."""
    size, p, g, mean, square, _ = find_memory(parameter)
    step, beta = np.float64(load(get(parameter, 0, STEP), 0)), load_double(setting, BETA)
    second_beta = load_double(setting, SECOND_BETA)
    rate = np.float32(load_double(setting, RATE) / (1.0 - beta**step))
    correction = np.float32(1.0 / sqrt(1.0 - second_beta**step))
    decay, kept, eps = load_setting(setting, DECAY), load_setting(setting, KEPT), load_setting(setting, EPS)
    share, second, second_share = np.float32(1.0 - beta), np.float32(second_beta), np.float32(1.0 - second_beta)
    for i in range(size):
        gradient = load(g, i) + (decay * load(p, i) if decay != 0.0 else 0.0)
        first = load(mean, i) + share * (gradient - load(mean, i))
        squared = second * load(square, i) + second_share * gradient * gradient
        store(mean, i, first)
        store(square, i, squared)
        store(p, i, kept * load(p, i) - rate * (first / (sqrt(squared) * correction + eps)))


def step_rmsprop(parameter, setting):
    """RMSprop; TensorFlow's has ε under the root."""
    size, p, g, square, moved, mean = find_memory(parameter)
    decay, rate, momentum = load_setting(setting, DECAY), load_setting(setting, RATE), load_setting(setting, MOMENTUM)
    alpha, share = load_setting(setting, BETA), np.float32(1.0 - load_double(setting, BETA))
    eps, is_inside = load_setting(setting, EPS), load_double(setting, RULE) == RMSPROP_TF
    for i in range(size):
        gradient = load(g, i) + (decay * load(p, i) if decay != 0.0 else 0.0)
        squared = alpha * load(square, i) + share * gradient * gradient
        store(square, i, squared)
        if mean:
            add(mean, i, share * (gradient - load(mean, i)))
            squared -= load(mean, i) * load(mean, i)
        change = gradient / (sqrt(squared + eps) if is_inside else sqrt(squared) + eps)
        if moved:
            change += momentum * load(moved, i)
            store(moved, i, change)
        add(p, i, -rate * change)


def step_sgd(parameter, setting):
    """Gradient descent, perhaps with (Nesterov's) momentum."""
    size, p, g, _, moved, _ = find_memory(parameter)
    decay, rate, momentum = load_setting(setting, DECAY), load_setting(setting, RATE), load_setting(setting, MOMENTUM)
    is_nesterov = load_double(setting, IS_NESTEROV) != 0.0
    for i in range(size):
        change = load(g, i) + (decay * load(p, i) if decay != 0.0 else 0.0)
        if moved:
            kept = momentum * load(moved, i) + change
            store(moved, i, kept)
            change = change + momentum * kept if is_nesterov else kept
        add(p, i, -rate * change)


def step_optimizer(group, options, numbers):
    """Clip all gradients, and update what has one."""
    clip_gradients(get(group, 0, PARAMETERS), get(group, 0, NUM_PARAMETERS), options, numbers)
    for k in range(get(group, 0, NUM_PARAMETERS)):
        parameter, setting = get(group, 0, PARAMETERS) + k * BYTES, get(group, 0, SETTING) + k * 8 * SETTINGS
        if get(parameter, 0, GRADIENT):
            for i in range(get(parameter, 0, SIZE)):
                store(get(parameter, 0, LAST_GRADIENT), i, load(get(parameter, 0, GRADIENT), i))
            if get(parameter, 0, STEP):
                add(get(parameter, 0, STEP), 0, 1.0)
            rule = load_double(setting, RULE)
            if rule == ADAM:
                step_adam(parameter, setting)
            elif rule == SGD:
                step_sgd(parameter, setting)
            else:
                step_rmsprop(parameter, setting)


# -- an epoch ----------------------------------------------------------------------------------------------------------


def find_scaling(advantages, order, first, end):
    """What to subtract from the advantages of a minibatch, and what to multiply the difference with."""
    total = squares = np.float64(0.0)
    pivot = np.float64(advantages[order[first]])
    for i in range(first, end):
        total += advantages[order[i]] - pivot
    shift = total / (end - first)
    for i in range(first, end):
        deviation = advantages[order[i]] - pivot - shift
        squares += deviation * deviation
    return pivot + shift, 1.0 / (math.sqrt(squares / (end - first - 1)) + 1e-8)


def gather_tile(rollout, order, low, size, scaling, features, rows, actions):
    """Read the samples of a tile, one per column."""
    observed, chosen, advantages, returns, old_log_probs, old_values, _, old_outputs = rollout
    for i in range(size):
        index = order[low + i]
        for j in range(observed.shape[1]):
            store(features + j * ROW, i, observed[index, j])
        for j in range(chosen.shape[1]):
            store(actions + j * ROW, i, chosen[index, j])
        for j in range(old_outputs.shape[1]):
            store(actions + (chosen.shape[1] + j) * ROW, i, old_outputs[index, j])
        store(rows + OLD * ROW, i, old_log_probs[index] if len(old_log_probs) else 0.0)
        store(rows + ADVANTAGE * ROW, i, np.float32((advantages[index] - scaling[0]) * scaling[1]))
        store(rows + TARGET * ROW, i, returns[index])
        store(rows + OLD_VALUE * ROW, i, old_values[index] if len(old_values) else 0.0)


def mask_logits(x, masks, order, low, size):
    """Add a large negative number to the logits of what is not allowed."""
    for j in range(masks.shape[1]):
        for i in range(size):
            add(x + j * ROW, i, 0.0 if masks[order[low + i], j] else MASKED_LOGIT)


def add_gradients(tables, rollout, order, low, size, scaling, is_on_policy):
    """Add the gradients of a tile; its terms are in the first of its rows."""
    functions, group, rows, widths, num_parts, shared, numbers = tables
    actions = find_actions(rows, num_parts)
    gather_tile(rollout, order, low, size, scaling, get(get(group, 0, LAYERS), 0, SOURCE), rows, actions)
    call(get(functions, 0, FORWARD), (functions, group, size))
    x, by_x, _ = find_end(group, 0)
    values, by_values, _ = find_end(group, 1)
    y, by_y, old = x + load_integer(widths, 0) * ROW, 0, actions + rollout[1].shape[1] * ROW
    if shared >= 0:
        y, by_y = get(get(group, 0, PARAMETERS), shared, ADDRESS), get(get(group, 0, PARAMETERS), shared, GRADIENT)
    mask_logits(x, rollout[6], order, low, size)
    clear_slopes(group, size)
    evaluation = x, y, old, values, rows, widths, num_parts, by_x, by_y, by_values, numbers, is_on_policy, size
    call(get(functions, 0, EVALUATION), evaluation)
    call(get(functions, 0, BACKWARD), (functions, group, size))


def report(totals, count, options, results, row):
    """Write what is logged of a minibatch, and whether the update stops before its step."""
    for k in range(len(totals)):
        results[row, k] = totals[k] / count
    results[row, GRAD_NORM] = math.nan
    distance, is_nan_kept = np.float32(results[row, APPROX_KL]), load_double(options, REPLACES_NAN) == 0.0
    stops = is_nan_kept if distance != distance else distance > load_setting(options, MAX_KL)
    results[row, HAS_STOPPED] = 1.0 if stops else 0.0


def run_epoch(tables, options, rollout, order, ends, totals, results):
    """Make all steps of an epoch, until one is not to be made."""
    functions, group, rows, numbers = tables[0], tables[1], tables[2], tables[6]
    normalizes, is_on_policy = load_double(options, NORMALIZES) != 0, np.int64(load_double(options, IS_ON_POLICY))
    end = np.int64(0)
    for row in range(len(results)):
        first, end = end, ends[row]
        clear_gradients(group)
        for k in range(len(totals)):
            totals[k] = 0.0
        scaling = np.float64(0.0), np.float64(1.0)
        if normalizes and end - first > 1:
            scaling = find_scaling(rollout[2], order, first, end)
        store(numbers, SHARE, np.float32(1.0 / (end - first)))
        for low in range(first, end, TILE):
            add_gradients(tables, rollout, order, low, min(TILE, end - low), scaling, is_on_policy)
            for k in range(len(totals)):
                totals[k] += load(rows + TOTALS * ROW, k)
        report(totals, end - first, options, results, row)
        if results[row, HAS_STOPPED] != 0.0:
            return
        call(get(functions, 0, OPTIMIZER), (group, options, numbers))
        results[row, GRAD_NORM] = load(numbers, NORM)
