"""The test bed in one process: when it refuses, what "cuda" means afterwards, and its stand-in for FusedAdam."""

import pytest
import torch

import testbed
from testbed import tiers
from testbed.adam import FusedAdam
from testbed.device import names_cuda

testbed.enable()


@pytest.fixture
def visible_gpu(monkeypatch):
    monkeypatch.setattr(testbed, "_enabled", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv(testbed.ASK_FOR_TESTBED, raising=False)


@pytest.mark.usefixtures("visible_gpu")
def test_enable_refuses_where_torch_sees_a_gpu_and_says_what_works():
    with pytest.raises(RuntimeError, match=r"sees 3 GPU\(s\).*CUDA_VISIBLE_DEVICES.*MEGATRON_DOBB_TESTBED=1"):
        testbed.enable()


@pytest.mark.usefixtures("visible_gpu")
def test_a_refused_enable_leaves_torch_as_it_was(monkeypatch):
    monkeypatch.setattr(testbed.device, "patch", lambda: pytest.fail("torch was patched"))
    with pytest.raises(RuntimeError):
        testbed.enable()


@pytest.mark.usefixtures("visible_gpu")
def test_enable_accepts_a_gpu_when_asked(monkeypatch):
    patched = []
    monkeypatch.setattr(testbed.device, "patch", lambda: patched.append("device"))
    monkeypatch.setattr(testbed.megatron, "patch", lambda: patched.append("megatron"))
    monkeypatch.setenv(testbed.ASK_FOR_TESTBED, "1")
    testbed.enable()
    testbed.enable()
    assert patched == ["device", "megatron"]


def test_cuda_is_the_cpu():
    for device in ("cuda", "cuda:0", 0, torch.device("cuda", 0)):
        assert names_cuda(device)
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.ones(2).new_full((2,), 1.0, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
    for device in ("cpu", "meta", torch.device("meta"), None, True):
        assert not names_cuda(device)
    assert torch.zeros(2, device="meta").to(torch.float64).device.type == "meta"
    assert torch.nn.Linear(2, 2).cuda().weight.type() == "torch.cuda.FloatTensor"
    assert not torch.cuda.is_available()


def test_seeds_and_states_of_the_gpu_generator_are_the_cpus():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_torch_compile_still_compiles_and_megatrons_fused_functions_do_not():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: x.sin() + torch.zeros(3), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin())
    assert len(graphs) == 1

    from megatron.core.fusions.fused_bias_gelu import bias_gelu

    assert not hasattr(bias_gelu, "_torchdynamo_orig_callable")


@pytest.mark.parametrize(("decoupled", "torch_adam"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_computes_what_torchs_adam_computes(decoupled, torch_adam):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    optimizers = [FusedAdam([ours], adam_w_mode=decoupled, **settings), torch_adam([theirs], **settings)]
    for _ in range(20):
        gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert optimizers[0].param_groups[0]["step"] == 20


# The quick tier.


def test_pairwise_shows_every_pair_of_values_that_some_case_has():
    cases = [(a, b, c) for a in range(3) for b in range(2) for c in range(3) if a != c]
    chosen = tiers.pairwise(cases, lambda case: case)
    assert len(chosen) < len(cases)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in cases}


def test_what_is_not_chosen_is_marked_and_what_is_no_case_cannot_be_chosen():
    first, second, third = tiers.quick(["a", "b", ("c", 1)], ["a"])
    assert first == "a"
    assert [(case.values, [mark.name for mark in case.marks]) for case in (second, third)] == [
        (("b",), ["full"]),
        (("c", 1), ["full"]),
    ]
    with pytest.raises(ValueError, match="'d' is chosen"):
        tiers.quick(["a", "b"], ["d"])
