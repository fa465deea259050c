"""What a launch by Triton calls in the end, which the fast path calls without Triton's own way there.

In what order Triton's launcher wants its arguments is asked of the Triton that is installed: a compiled kernel's own
``kernel[grid]`` is run with a launcher that only listens, then the launcher with a last function that does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.launch.recording import (
    CURRENT_STREAM,
    RECORDER,
    RecordedLaunch,
    ResolvedLaunch,
    UnknownLauncherError,
    record_launch,
)


class PrivateName(NamedTuple):
    """A name that its package does not document, which something leans on."""

    name: str
    purpose: str


PRIVATE_NAMES = (
    PrivateName("torch._C._dynamo.guards.TensorGuards", "fast path: compares tensors with those of an earlier call"),
    PrivateName("torch._C._cuda_getDevice", "fast path: finds the current device"),
    PrivateName("torch._C._functorch.peek_interpreter_stack", "every call: finds transformations of torch.func"),
    PrivateName("torch.autograd.forward_ad._current_level", "every call: finds derivatives in forward mode"),
    PrivateName("torch.autograd.forward_ad._set_fwd_grad_enabled", "forward mode: lets derivatives have such"),
    PrivateName("torch._C._functorch.is_legacy_batchedtensor", "gradients: finds a batch of them"),
    PrivateName("torch._assert_async", "checks of values without waiting for the device"),
    PrivateName("torch._C._autograd._get_current_graph_task_keep_graph", "losses: whether gradients are needed again"),
    PrivateName("torch.autograd.Function._backward_cls", "losses: tells a loss from other tensors"),
    PrivateName("torch.Tensor._base", "losses of tokens: whether logits are a view of a parameter"),
    PrivateName("torch.Tensor._version", "captured steps: whether a tensor was written"),
    PrivateName("torch._C._cuda_endAllocateToPool", "captured steps: ends a capture that failed"),
    PrivateName("torch._C._cuda_releasePool", "captured steps: ends a capture that failed"),
    PrivateName("torch._C._warn_on_accumulate_grad_stream_mismatch", "captured steps: reads a switch of advice"),
    PrivateName("torch._foreach_copy_", "captured steps: copies inputs"),
    PrivateName("torch.utils._pytree", "captured steps: finds tensors among arguments"),
    PrivateName("torch.nn.Module._modules", "captured steps: lists modules"),
    PrivateName("torch.nn.Module._parameters", "captured steps: lists parameters"),
    PrivateName("torch.nn.Module._buffers", "captured steps: lists buffers, and keeps them in place"),
    PrivateName("torch.nn.Module._forward_hooks", "captured steps: notices hooks"),
    PrivateName("torch.nn.Module._forward_pre_hooks", "captured steps: notices hooks"),
    PrivateName("torch.nn.Module._backward_hooks", "captured steps: notices hooks"),
    PrivateName("torch.nn.Module._backward_pre_hooks", "captured steps: notices hooks"),
    PrivateName("torch.Tensor._backward_hooks", "captured steps: notices hooks"),
    PrivateName("torch.Tensor._post_accumulate_grad_hooks", "captured steps: notices hooks"),
    PrivateName("torch.nn.modules.module._global_forward_hooks", "captured steps: notices hooks"),
    PrivateName("torch.nn.modules.module._global_forward_pre_hooks", "captured steps: notices hooks"),
    PrivateName("torch.nn.modules.module._global_backward_hooks", "captured steps: notices hooks"),
    PrivateName("torch.nn.modules.module._global_backward_pre_hooks", "captured steps: notices hooks"),
    PrivateName("torch.optim.optimizer._global_optimizer_pre_hooks", "captured steps: notices hooks"),
    PrivateName("torch.optim.optimizer._global_optimizer_post_hooks", "captured steps: notices hooks"),
    PrivateName("torch._C._autograd._top_saved_tensors_default_hooks", "captured steps: notices hooks"),
    PrivateName("torch.overrides._get_current_function_mode_stack", "captured steps: finds modes of torch functions"),
    PrivateName("torch.utils._device.DeviceContext", "captured steps: tells a default device from these"),
    PrivateName("torch._C._len_torch_dispatch_stack", "every call: finds modes of dispatch"),
    PrivateName("torch._C._is_tracing", "every call: finds torch.jit.trace"),
    PrivateName("torch._C._get_dispatch_mode", "every call: finds fake tensors and tracing"),
    PrivateName("torch._C._TorchDispatchModeKey", "every call: finds fake tensors and tracing"),
    PrivateName("torch._foreach_div_", "captured steps: unscales gradients"),
    PrivateName("torch.optim.Optimizer._optimizer_step_pre_hooks", "captured steps: notices hooks, and orders them"),
    PrivateName("torch.optim.Optimizer._optimizer_step_post_hooks", "captured steps: notices hooks, and orders them"),
    PrivateName("torch._is_all_true", "adapters: looks for NaN"),
    PrivateName("torch._foreach_norm", "adapters: clips gradients"),
    PrivateName("torch._foreach_mul_", "adapters: clips gradients"),
    PrivateName("torch._foreach_add_", "adapters: moves target networks"),
    PrivateName("triton.runtime.driver.active", "fast path: finds the current stream"),
    PrivateName("triton.knobs.runtime.launch_enter_hook", "fast path: shows whether a profiler listens to launches"),
    PrivateName("triton.knobs.runtime.launch_exit_hook", "fast path: is left out of launches"),
    PrivateName("triton.compiler.compiler.CompiledKernel.__getitem__", "fast path: launches a compiled kernel"),
    PrivateName("triton.compiler.compiler.CompiledKernel.run", "fast path: holds its launcher"),
    PrivateName("triton.compiler.compiler.CompiledKernel._init_handles", "fast path: loads it"),
    PrivateName("triton.compiler.compiler.CompiledKernel.function", "fast path: is what a launch takes"),
    PrivateName("triton.compiler.compiler.CompiledKernel.packed_metadata", "fast path: is what a launch takes"),
    PrivateName("triton.backends.nvidia.driver.CudaLauncher.__call__", "fast path: passes the launch to the driver"),
    PrivateName("triton.runtime.jit.JITFunction.warmup", "compiles a kernel without a launch"),
    PrivateName("triton.runtime.interpreter.InterpretedFunction", "is the type of an interpreted kernel"),
    PrivateName("numba.core.compiler.CompileResult._reduce", "cpu backend: writes compiled code"),
    PrivateName("numba.core.compiler.CompileResult._rebuild", "cpu backend: reads compiled code"),
    PrivateName("numba.core.dispatcher.Dispatcher._cache", "cpu backend: keeps compiled code"),
    PrivateName("numba.core.ccallback.CFunc._cache", "compiled updates: keeps compiled code"),
    PrivateName("numba.core.cgutils._StructProxy._getvalue", "cpu backend: passes arguments"),
)
"""All private names of PyTorch, Triton and Numba that the core and the adapters use."""


def record_kernel(kernel: Any, grid: tuple[int, int], arguments: Sequence[Any], scratch: torch.Tensor | None) -> None:
    """Record the launch of a compiled kernel, if this thread records. One that is interpreted is None."""
    if RECORDER.launches is not None and kernel is not None:
        resolve = partial(resolve_launch, kernel, grid, arguments, current_device())
        record_launch(RecordedLaunch(resolve, scratch))


def resolve_launch(kernel: Any, grid: tuple[int, int], arguments: Sequence[Any], device: int) -> ResolvedLaunch:
    """Find out what a launch on a device calls in the end, and with which arguments; without hooks."""
    try:
        launcher, given = kernel.run, capture_launcher_arguments(kernel, grid, arguments)
        if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 0):
            return ResolvedLaunch(launcher, given, stream_getter(device))
        listening = copy.copy(launcher)
        listening.launch, calls = make_listener()
        listening(*given)
        return ResolvedLaunch(launcher.launch, single_call(calls), stream_getter(device))
    except Exception as error:
        raise UnknownLauncherError(
            f"got Triton {find_version()}, whose launcher is not known ({type(error).__name__}: {error}), expected one "
            "like those of Triton 3.6 to 3.9; calls take the host several times as long. Install one of those, or set "
            "RL_TRITON_FAST_PATH=0 in the environment to do without the fast path"
        ) from error


def find_version() -> str:
    """Triton's version."""
    import triton

    return str(getattr(triton, "__version__", "unknown"))


def capture_launcher_arguments(kernel: Any, grid: tuple[int, int], arguments: Sequence[Any]) -> Sequence[Any]:
    """With what Triton calls the launcher of a compiled kernel, as its own way to launch one shows; without hooks."""
    run, calls = make_listener()
    listening = SimpleNamespace(
        run=run,
        function=kernel.function,
        packed_metadata=kernel.packed_metadata,
        launch_metadata=lambda *_: None,
        _init_handles=lambda: None,
    )
    type(kernel).__getitem__(listening, (*grid, 1))(*arguments, stream=CURRENT_STREAM)
    return [None if any(x is hook for hook in launch_hooks()) else x for x in single_call(calls)]


def make_listener() -> tuple[Callable[..., None], list[tuple[Any, ...]]]:
    """A function that does nothing, and the arguments of its calls."""
    calls: list[tuple[Any, ...]] = []
    return lambda *given: calls.append(given), calls


def single_call(calls: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The arguments of the only call, among which there is the stream."""
    if len(calls) != 1 or not any(x is CURRENT_STREAM for x in calls[0]):
        raise ValueError("got a launcher that is not known, expected one that makes one call with the stream")
    return calls[0]


def launch_hooks() -> tuple[Any, Any]:
    """What Triton calls before and after every launch, which does nothing where there is no profiler."""
    from triton import knobs

    return knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def current_device() -> int:
    """The index of the current device."""
    from triton.runtime import driver

    return int(driver.active.get_current_device())


@cache
def stream_getter(index: int) -> Callable[[], Any]:
    """A function that returns a device's current stream; None if another is current, or a profiler wants to know."""
    from triton import knobs
    from triton.runtime import driver

    runtime, stream_of = knobs.runtime, driver.active.get_current_stream
    get_device = getattr(torch._C, "_cuda_getDevice", driver.active.get_current_device)
    chain = runtime.launch_enter_hook
    hooks = getattr(chain, "calls", ())

    def get_stream() -> Any:
        hook = runtime.launch_enter_hook
        if hooks or (hook is not chain and hook) or get_device() != index:
            return None
        return stream_of(index)

    return get_stream
