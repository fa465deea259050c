"""Mutants of _internal/fast_path.py."""

from mutation.mutant import Mutant

FILE = "_internal/fast_path.py"

MUTANTS = [
    Mutant(
        "fast path: numbers do not count",
        'conditions.append(f"({name} is {constant} or type({name}) is {kind} and {name} == {constant})")',
        'conditions.count(f"({name} is {constant} or type({name}) is {kind} and {name} == {constant})")',
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: types do not count",
        'f"({name} is {constant} or type({name}) is {kind} and {name} == {constant})"',
        'f"({name} is {constant} or {name} == {constant})"',
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: tensors are all alike",
        "[*conditions, f\"fits({', '.join(tensors)})\"]",
        "conditions",
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: a graph does not count",
        'conditions.append(f"graph() is {torch.is_grad_enabled()}")',
        'conditions.count(f"graph() is {torch.is_grad_enabled()}")',
        tests="fast_path and without_a_graph",
    ),
    Mutant(
        "fast path: strides do not count",
        "(x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad)",
        "(x.shape, x.dtype, x.device, grad and x.requires_grad)",
        tests="fast_path and what_is_alike",
    ),
    Mutant(
        "fast path: alignment does not count",
        'f"p{i} & 15 == {x.data_ptr() & 15}"',
        'f"p{i} == p{i}"',
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: one place or two",
        "first.setdefault(x.data_ptr(), i) != i",
        "False",
        tests="fast_path and in_place",
    ),
    Mutant(
        "fast path: overlap not looked for",
        "lines += overlap_guard(x, places, tensors.values())",
        "pass",
        tests="fast_path and overlap",
    ),
    Mutant(
        "fast path: the recorded pointers",
        "places[x.data_ptr()]",
        "str(x.data_ptr())",
        tests="fast_path and made_again",
        function="argument_source",
    ),
    Mutant(
        "fast path: prepared at the first call",
        "is_second_call(seen, hash(tuple(signature_of(*flatten_arguments(given)))))",
        "True or is_second_call(seen, hash(tuple(signature_of(*flatten_arguments(given)))))",
        tests="fast_path and second_call",
    ),
    Mutant(
        "fast path: any launcher will do",
        "len(taken) != 1 or not any(x is STREAM for x in taken[0])",
        "not taken",
        tests="fast_path and launcher_that",
    ),
    Mutant(
        "fast path: failures escape",
        """
            try:
                lines = launch_source(tensors, launches, results, names)
            except Exception:  # a copy took part, or Triton is not as it is known here
                lines = ["return SLOW_PATH"]
        """,
        """
            try:
                lines = launch_source(tensors, launches, results, names)
            except KeyError:  # a copy took part, or Triton is not as it is known here
                lines = ["return SLOW_PATH"]
        """,
        tests="fast_path and kernel_that",
    ),
]
