"""Mutants of _internal/loss/reference.py."""

from mutation.mutant import Mutant

FILE = "_internal/loss/reference.py"

MUTANTS = [
    Mutant(
        "advantages of a sequence are the element's",
        "x[self.sequence] if per_sequence else x",
        "x",
        tests="test_rows_and_packed_rows",
        function="Minibatch.read_column",
    ),
    Mutant(
        "packed rows: sequences start one element early",
        "offsets[1:]",
        "offsets[1:] - 1",
        tests="test_rows_and_packed_rows",
        function="Minibatch.find_sequences",
    ),
    Mutant(
        "weights count as flags",
        "(streams.mask[:, None] if streams.mask.is_floating_point() else self.valid).double()",
        "self.valid.double()",
        tests="test_heads",
        function="Minibatch.__init__",
    ),
    Mutant(
        "a sequence's weight is forgotten",
        "self.mask_weight if scale is None else self.mask_weight * scale",
        "self.mask_weight",
        tests="test_rows_and_packed_rows",
        function="Minibatch.__init__",
    ),
    Mutant(
        "the normaliser is forgotten",
        "self.weight.sum() if normalizer is None else self.as_number(normalizer)",
        "self.weight.sum()",
        tests="test_rows_and_packed_rows",
        function="Minibatch.__init__",
    ),
    Mutant(
        "what stands in masked elements is read",
        "torch.where(self.valid, x.double(), 0)",
        "x.double()",
        tests="test_what_is_masked_leaves_no_trace and categorical",
        function="Minibatch.read_matrix",
    ),
    Mutant(
        "an action that there is not counts",
        "torch.where(self.in_range, log_prob, math.nan)",
        "log_prob",
        tests="test_an_action_that_there_is_not",
        function="Distribution.evaluate_policy",
    ),
    Mutant(
        "an action below 0 counts",
        "(action >= 0) & (action < size)",
        "action < size",
        tests="test_an_action_that_there_is_not",
        function="Distribution.__init__",
    ),
    Mutant(
        "all distributions read the first one's actions",
        "action[:, index : index + 1]",
        "action[:, :1]",
        tests="test_heads",
        function="Distribution.__init__",
    ),
    Mutant(
        "KL: without derivative",
        "slope + self.equations['multiply_or_zero'](by_kl, kl_slope)",
        "slope",
        tests="test_exact_kl and bernoulli",
        function="Distribution.compute_gradients",
    ),
    Mutant(
        "normalised by moments of all elements",
        "merge_moments(batch.mask_weight, ...)",
        "merge_moments(torch.ones_like(batch.mask_weight), ...)",
        tests="test_advantages_are_normalized",
        function="normalize_column",
    ),
    Mutant(
        "normalised: the mean stays",
        "(advantage - subtracted) * factor",
        "advantage * factor",
        tests="test_heads",
        function="normalize_column",
    ),
    Mutant(
        "gradients of a sum, not of a mean",
        "batch.weight * batch.equations['invert_or_zero'](batch.divisor)",
        "batch.weight",
        tests="test_heads",
        function="compute_loss",
    ),
    Mutant(
        "statistics without weights",
        "(torch.where(batch.valid, x, 0) * batch.weight).sum()",
        "torch.where(batch.valid, x, 0).sum()",
        tests="test_heads",
        function="compute_statistics",
    ),
    Mutant(
        "the least ratio is a masked one's",
        "torch.where(batch.valid, ratio, math.inf)",
        "ratio",
        tests="test_heads",
        function="compute_statistics",
    ),
    Mutant(
        "shared log sigma: the gradient of one element",
        "gradient.sum(0) if x.ndim == 1 else gradient",
        "gradient[0] if x.ndim == 1 else gradient",
        tests="test_heads",
        function="write_gradients",
    ),
]
