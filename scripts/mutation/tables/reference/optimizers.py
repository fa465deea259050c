"""Mutants of _internal/optimizers.py."""

from mutation.mutant import Mutant

FILE = "_internal/optimizers.py"

MUTANTS = [
    Mutant(
        "optimizers: a step that loses one is not told",
        "before.invalidate()",
        "",
        tests="capture_optimizers and loses_its_optimizer",
    ),
    Mutant(
        "optimizers: checkpoints have tensors as learning rates",
        "self.show_numbers(groups)",
        "",
        function="PreparedOptimizer.show_settings",
        tests="capture_optimizers and step_changes",
    ),
    Mutant(
        "optimizers: step counts keep their type",
        'state["step"].to(self.device, torch.float32)',
        'state["step"].to(self.device)',
        tests="capture_optimizers and step_counts",
    ),
    Mutant(
        "optimizers: a scaler's infinite gradients are stepped by",
        "torch.maximum(self.stop, found_inf) if self.is_scaled else self.stop",
        "self.stop",
        tests="capture_optimizers and scaled_gradients",
    ),
    Mutant(
        "optimizers: a scaled step does not stop",
        "torch.maximum(self.stop, found_inf) if self.is_scaled else self.stop",
        "found_inf if self.is_scaled else self.stop",
        tests="capture_optimizers and are_stopped",
    ),
    Mutant(
        "optimizers: a scaler reads what it found",
        "optimizer._step_supports_amp_scaling = True",
        "",
        tests="capture_optimizers and scaled_gradients and not fused",
    ),
    Mutant(
        "optimizers: gradients of an optimizer without a switch stay scaled",
        "torch._foreach_div_(..., optimizer.grad_scale)",
        "",
        tests="capture_optimizers and scaled_gradients and rmsprop",
    ),
    Mutant(
        "optimizers: a scale is not put back",
        "scaler.load_state_dict(scale)",
        "",
        tests="capture_optimizers and scaled_gradients",
    ),
    Mutant(
        "optimizers: a scaler goes on from a step that failed",
        "scaler._per_optimizer_states.pop(id(self.optimizer), None)",
        "",
        tests="capture_optimizers and leaves_the_scaler",
    ),
    Mutant(
        "optimizers: settings of a scaler do not count",
        "describe_scaler(scaler) != settings",
        "False",
        tests="capture_optimizers and other_settings",
    ),
    Mutant(
        "optimizers: hooks that a scaler skips run",
        "self.skips_hooks and sum(map(len, list_step_hooks(self.optimizer))) > 2",
        "False",
        tests="capture_optimizers and scaler_skips",
    ),
    Mutant(
        "optimizers: marks of a scaler are lost",
        "vars(optimizer).update(before)",
        "",
        tests="capture_optimizers and scaled_gradients and fused",
    ),
    Mutant(
        "optimizers: a stopped step undoes hooks after it",
        "optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)",
        "",
        tests="capture_hooks and while_a_step_is_stopped",
    ),
    Mutant(
        "optimizers: betas that a scheduler sets are captured",
        '"max_momentum" in group and "step" in vars(optimizer)',
        "False",
        tests="capture_optimizers and betas_and_momentum",
    ),
    Mutant(
        "optimizers: a schedule that has ended counts",
        '"max_momentum" in group and "step" in vars(optimizer)',
        '"max_momentum" in group',
        tests="capture_optimizers and has_ended",
    ),
    Mutant(
        "optimizers: settings that are tensors are captured",
        "isinstance(value, Tensor)",
        "False",
        function="name_changing_setting",
        tests="capture_optimizers and are_tensors",
    ),
    Mutant(
        "optimizers: a replaced step does not count",
        'vars(optimizer).get("step")',
        "None",
        function="describe_settings",
        tests="capture_hooks and come_and_go and instance",
    ),
    Mutant(
        "optimizers: state of a capture that fails stays",
        "states.clear()\nstates.update(before)",
        "",
        tests="capture_faults and interrupt",
    ),
    Mutant(
        "optimizers: learning rates stay those of the capture",
        "rate.fill_(float(value))",
        "",
        tests="capture_faults and learning_rates_between",
    ),
    Mutant(
        "optimizers: momentum of a stopped step is not undone",
        "tensor.copy_(torch.where(optimizer.found_inf.bool(), before, tensor))",
        "",
        tests="capture and early_stop",
    ),
]
