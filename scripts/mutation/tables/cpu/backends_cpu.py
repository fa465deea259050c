"""Mutants of _internal/scan/cpu.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/cpu.py"

MUTANTS = [
    Mutant(
        "nothing works",
        "walk(tuple([x.data_ptr() for x in call.tensors]), untrace(numbers))",
        "pass",
        tests="test_literal_numbers",
    ),
    Mutant(
        "strides ignored",
        "lane != 1",
        "False",
        tests="test_one_argument_with_strides",
    ),
    Mutant(
        "what is constant in time stays strided",
        "make_lanes_contiguous(x, self.problem.time_dim)",
        "x",
        tests="test_bootstrap_values_per_environment_leave",
    ),
    Mutant(
        "flags of float32 and others are read as float32",
        "all(x is None or x.dtype == torch.float32 for x in flags)",
        "any(x is not None and x.dtype == torch.float32 for x in flags)",
        tests="test_flags_of_different_types",
    ),
    Mutant(
        "nothing is recorded",
        "problem.cu_seqlens is None",
        "False",
        tests="fast_path and repeated_calls and cpu",
    ),
    Mutant(
        "offsets are not checked anew",
        "problem.cu_seqlens is None",
        "True",
        tests="test_offsets_are_checked",
    ),
    Mutant(
        "every number is recorded anew",
        "walk(tuple([x.data_ptr() for x in call.tensors]), untrace(numbers))",
        "walk(tuple([x.data_ptr() for x in call.tensors]), numbers)",
        tests="fast_path and repeated_calls and cpu",
    ),
    Mutant(
        "last chunk dropped",
        "[(0, groups, low, high) for low, high in pairwise(edges) if low < high]",
        "[(0, groups, low, high) for low, high in list(pairwise(edges))[:-1] if low < high]",
        tests="several_threads and prefix",
    ),
    Mutant(
        "small rollouts are split",
        "problem.like.numel() // MIN_ELEMENTS_PER_CHUNK",
        "problem.like.numel()",
        tests="test_a_small_rollout",
    ),
    Mutant(
        "a chunk for each thread",
        "CHUNKS_PER_THREAD * get_num_threads()",
        "get_num_threads()",
        tests="test_a_large_rollout",
    ),
    Mutant(
        "one name for all in the disk cache",
        "f'{recurrence.name}_{hash_variant(recurrence, variant)}'",
        "'loop'",
        tests="different_processes",
    ),
]
