"""Mutants of capture.py."""

from mutation.mutant import Mutant

FILE = "capture.py"

MUTANTS = [
    Mutant(
        "captured steps: backward hooks of modules do not count",
        "part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks",
        "part._forward_pre_hooks, part._forward_hooks",
        tests="capture_hooks and come_and_go and backward",
    ),
    Mutant(
        "captured steps: hooks of parameters do not count",
        "x._backward_hooks, x._post_accumulate_grad_hooks",
        "(x._post_accumulate_grad_hooks,)",
        tests="capture_hooks and come_and_go and parameter",
    ),
    Mutant(
        "captured steps: hooks of all modules do not count",
        "[*GLOBAL_HOOKS]",
        "[]",
        function="list_hooks",
        tests="capture_hooks and come_and_go and all",
    ),
    Mutant(
        "captured steps: hooks of optimizers do not count",
        "kinds += list_step_hooks(optimizer)",
        "list_step_hooks(optimizer)",
        tests="capture_hooks and come_and_go and optimizer",
    ),
    Mutant(
        "captured steps: a forward of an instance does not count",
        '(x, x.training, x.__dict__.get("forward"))',
        "(x, x.training)",
        tests="capture_hooks and come_and_go and instance",
    ),
    Mutant(
        "captured steps: modes of dispatch are replayed",
        "torch._C._len_torch_dispatch_stack()",
        "False",
        tests="capture_hooks and contexts",
    ),
    Mutant(
        "captured steps: hooks of saved tensors are replayed",
        "torch._C._autograd._top_saved_tensors_default_hooks(False)",
        "None",
        tests="capture_hooks and contexts",
    ),
    Mutant(
        "captured steps: a default device is a mode as others",
        "not isinstance(mode, DeviceContext)",
        "True",
        tests="capture_hooks and default_device",
    ),
    Mutant(
        "captured steps: autocast does not count",
        'torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")',
        "False",
        tests="capture_hooks and autocast",
    ),
    Mutant(
        "captured steps: the type of autocast does not count",
        'torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")',
        'torch.is_autocast_enabled("cuda")',
        tests="capture_hooks and autocast",
    ),
    Mutant(
        "captured steps: frozen parameters do not count",
        "not x.requires_grad",
        "False",
        function="describe_mode",
        tests="capture_faults and what_changes and frozen",
    ),
    Mutant(
        "captured steps: strides of inputs do not count",
        "x.shape, x.stride(), x.dtype",
        "x.shape, x.dtype",
        tests="capture and laid_out",
    ),
    Mutant(
        "captured steps: integers as floats",
        "torch.int64 if isinstance(x, Integral) else torch.float32",
        "torch.float32",
        tests="capture and that_count",
    ),
    Mutant(
        "captured steps: a graph makes room one call early",
        "self.calls - oldest.last_call <= UNUSED_CALLS",
        "self.calls - oldest.last_call < UNUSED_CALLS",
        tests="capture and how_long",
    ),
    Mutant(
        "captured steps: what stands against a capture is looked for once",
        "self.reason or self.find_obstacle()",
        "self.reason",
        function="CapturedStep.find_graph",
        tests="capture_optimizers and betas_and_momentum",
    ),
    Mutant(
        "captured steps: errors that are none of PyTorch's end training",
        "try:\n    ...\nexcept Exception as error:\n    ...\nexcept BaseException:\n    ...",
        "try:\n    ...\nexcept RuntimeError as error:\n    ...\nexcept BaseException:\n    ...",
        tests="capture_faults and fails_at_any_place",
    ),
    Mutant(
        "captured steps: an interrupt leaves an optimizer prepared",
        "self.reset()\nraise",
        "raise",
        function="CapturedStep.capture_or_fail",
        tests="capture_faults and interrupt",
    ),
    Mutant(
        "captured steps: an error of the step ends captures",
        'self.reason = ""',
        "",
        function="CapturedStep.fall_back",
        tests="capture_faults and step_itself",
    ),
    Mutant(
        "captured steps: parameters of a capture that fails stay",
        "tensor.copy_(copy)",
        "",
        function="CapturedStep.unchanged",
        tests="capture_faults and interrupt",
    ),
    Mutant(
        "captured steps: random numbers of a capture are lost",
        "self.graphs.restore_random_state(random)",
        "",
        tests="capture and no_trace",
    ),
    Mutant(
        "captured steps: gradients of a capture that fails stay",
        "x.grad = gradient if gradient is None or value is None else gradient.copy_(value)",
        "",
        tests="capture_faults and interrupt",
    ),
    Mutant(
        "captured steps: gradients that were there are not looked for",
        "refuse_accumulation(list_carried())",
        "refuse_accumulation([])",
        tests="capture_faults and accumulate",
    ),
    Mutant(
        "captured steps: gradients stay those of another graph",
        "parameter.grad = gradient",
        "",
        tests="capture_faults and last_step",
    ),
    Mutant(
        "captured steps: copies of a learning rate are not put back",
        "(*self.tensors(), self.stop, *rates)",
        "(*self.tensors(), self.stop)",
        tests="capture_optimizers and step_changes",
    ),
]
