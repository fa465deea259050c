"""What only a GPU can show: graphs, streams, no synchronisation, a second device, more than 2**31 elements."""

from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from cases import Call, How, check, random_case, same_bits

from rl_triton_core import FinalValues, available_backends, compute_gae
from rl_triton_core.testing import assert_close, random_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = SimpleNamespace(backend="triton", device="cuda", interpreted=False)
FORMS = {
    "dense": {},
    "scalar, masked": {"bootstrap_values": 0.5, "valid": 0.9},
    "edge": {"truncated": None, "bootstrap_values": np.arange(64.0)},
    "next_values": {"bootstrap_values": None, "next_values": np.ones((64, 128)), "gamma": np.full((64, 128), 0.9)},
}


def cuda_call(form="dense", time_dim=-1):
    return Call(random_case(64, 128, **FORMS[form]), "cuda", How(time_dim=time_dim))


def outputs(call):
    return tuple(torch.full_like(call.kwargs["rewards"], torch.nan) for _ in range(2))


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("form", FORMS)
def test_no_synchronisation(form, time_dim):
    call = cuda_call(form, time_dim)
    want, out = call("triton"), outputs(call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in (None, out):
            got = call("triton", out=given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))


def test_final_values_on_the_device_do_not_synchronise():
    call = cuda_call()
    env, time = torch.nonzero(call.kwargs["truncated"], as_tuple=True)
    value, edge = torch.ones(len(env), device="cuda"), torch.zeros(64, device="cuda")
    want = call("triton", bootstrap_values=FinalValues(env, time, value, edge))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = call("triton", bootstrap_values=FinalValues(env, time, value, edge))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(got.advantages, want.advantages) and got.advantages.isfinite().all()


def test_no_synchronisation_with_gradients():
    call = cuda_call()
    for _ in range(2):  # the first one compiles
        call.kwargs["values"] = call.kwargs["values"].detach().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call("triton").advantages.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert call.kwargs["values"].grad.isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded", "padded_transposed", "expanded"])
@pytest.mark.parametrize("time_dim", [-1, 0])
def test_strided_views_are_read_in_place(layout, time_dim):
    """With `out`, a call takes no memory worth mentioning: nothing is copied."""
    case = random_case(1024, 512, valid=0.9)
    case.rewards[:] = case.rewards[:, :1]
    call = Call(case, "cuda", How(time_dim=time_dim, layouts=(layout,)))
    out = outputs(call)
    call("triton", out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call("triton", out=out)
    assert torch.cuda.max_memory_allocated() - before < 2**18  # an input takes 2**21 bytes, its flags 2**19


@pytest.mark.parametrize("form", FORMS)
def test_graph_capture(form):
    """The replay reads what stands in the inputs then, and writes where the capture wrote."""
    call, out = cuda_call(form), outputs(cuda_call(form))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call("triton", out=out)
        call("triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call("triton", out=out)
        fresh = call("triton")
    for seed in (1, 2):
        other = random_case(64, 128, seed=seed)
        call.kwargs["rewards"].copy_(torch.as_tensor(other.rewards))
        if "terminated" in call.kwargs:
            call.kwargs["terminated"].copy_(torch.as_tensor(other.terminated))
        for x in (*out, *fresh):
            x.fill_(torch.nan)
        graph.replay()
        for replayed in (out, fresh):
            assert all(same_bits(x, y) for x, y in zip(replayed, call("triton"), strict=True))


def test_a_stream_of_its_own():
    """Inputs that are filled late on a side stream: work put on another stream would read what was there before."""
    call, want = cuda_call(), cuda_call()("triton")
    rewards = torch.full_like(call.kwargs["rewards"], torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        rewards.copy_(call.kwargs["rewards"])
        got = call("triton", rewards=rewards)
    stream.synchronize()
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))


def test_a_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    call, want = Call(random_case(64, 128), "cuda:1"), cuda_call()("triton")
    assert torch.cuda.current_device() == 0
    got = call("triton")
    assert torch.cuda.current_device() == 0 and got.advantages.device == torch.device("cuda:1")
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="cuda:0"):
        call("triton", values=call.kwargs["values"].to("cuda:0"))


def test_every_backend_that_is_listed_works_on_the_device():
    rollout = random_rollout(5, 33, device="cuda")._asdict()
    want = compute_gae(**{name: x.cpu() for name, x in rollout.items()}, backend="reference")
    assert "triton" in available_backends("cuda")
    for name in available_backends("cuda"):
        assert_close(compute_gae(**rollout, backend=name).advantages, want.advantages, name=name)
    assert same_bits(compute_gae(**rollout).returns, compute_gae(**rollout, backend="triton").returns)


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_with_inductor(grad):
    torch._dynamo.reset()
    call = cuda_call("scalar, masked")
    leaves = [call.kwargs[name].requires_grad_(grad) for name in ("rewards", "values")]

    def function(rewards, values):
        return call("triton", rewards=rewards + 1, values=values).advantages * 2

    results = []
    for one in (function, torch.compile(function, fullgraph=True)):
        advantages = one(*leaves)
        results.append([advantages, *(torch.autograd.grad(advantages.sum(), leaves) if grad else [])])
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("time_dim", [-1, 0])
def test_a_million_steps(time_dim):
    case = random_case(3, 1_000_003, term=1e-4, trunc=1e-4, gamma=0.999, lambda_=1.0)
    check(case, GPU, How(time_dim=time_dim))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_envs", "num_steps", "time_dim"), [(65_537, 32_769, -1), (65_537, 32_769, 0), (3, 800_000_011, -1)]
)
def test_more_than_2_to_the_31_elements(num_envs, num_steps, time_dim, much_memory):
    """A few windows at the start, in the middle and at the end are checked, each from one done step to another."""
    assert num_envs * num_steps > 2**31
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("not enough memory on the device")
    shape = (num_envs, num_steps) if time_dim == -1 else (num_steps, num_envs)
    generator = torch.Generator("cuda").manual_seed(0)
    rewards, values = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in range(2)
    )
    terminated = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 100, generator=generator) == 0
    out = tuple(torch.full(shape, torch.nan, device="cuda") for _ in range(2))
    compute_gae(rewards, values, terminated, bootstrap_values=0.5, time_dim=time_dim, out=out, backend="triton")

    def cut(x, n, start, stop):
        row = x[n] if time_dim == -1 else x[:, n]
        return row[start:stop].double().cpu().numpy()[None]

    length = 5000
    for n in (0, num_envs // 2, num_envs - 1):
        for start in (0, num_steps // 2, num_steps - length):
            window = n, start, start + length
            r, v, term = (cut(x, *window) for x in (rewards, values, terminated))
            bootstrap = np.full(r.shape, np.nan)
            keep = length if start + length == num_steps else np.flatnonzero(term[0])[-1] + 1
            bootstrap[0, -1] = 0.5
            want = oracles.gae(r, v, term, bootstrap=bootstrap)
            for x, expected in zip(out, want, strict=True):
                assert_close(cut(x, *window)[:, :keep], expected[:, :keep], rtol=1e-6)
