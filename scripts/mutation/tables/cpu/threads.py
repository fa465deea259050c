"""Mutants of _internal/launch/threads.py."""

from mutation.mutant import Mutant

FILE = "_internal/launch/threads.py"

MUTANTS = [
    Mutant(
        "all processors by default",
        "os.environ.get('RL_TRITON_NUM_THREADS', '1')",
        "os.environ.get('RL_TRITON_NUM_THREADS', '2')",
        tests="test_one_thread_unless",
    ),
    Mutant(
        "recorded calls keep their number of threads",
        """
            Setting.num_threads = check_num_threads(...)
            forget_plans()
        """,
        """
            Setting.num_threads = check_num_threads(...)
        """,
        tests="test_the_number_of_threads_counts",
    ),
    Mutant(
        "no helpers",
        "min(get_num_threads(), len(remaining)) - 1",
        "0",
        tests="test_a_thread_that_is_held_up",
    ),
    Mutant(
        "threads that have not begun are waited for",
        "not job.cancel()",
        "True",
        tests="test_threads_that_have_not_begun",
    ),
    Mutant(
        "errors of threads are lost",
        "job.result()",
        "job.exception()",
        tests="test_an_error_in_another_thread",
    ),
    Mutant(
        "no threads is a number of threads",
        "number < 1",
        "number < 0",
        tests="test_a_number_of_threads",
    ),
]
