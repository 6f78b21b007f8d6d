"""Hooks on modules of an accelerated model: losses and gradients of transformers with the same hooks.

Every kind of hook on every submodule of every family: on one rank, over a group or mesh, under FSDP2.
"""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hf_models import CONFIGS, Float64, are_lazy, assert_same, batch_of, model_of, step, whole_gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import fastmp
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Qwen3MoeConfig"):  # a version before the interface of experts
    pytest.skip(f"transformers {transformers.__version__} is too old", allow_module_level=True)


def halved(tensors):
    """Halve floating-point tensors, also in a tuple or dict; a hook of other outputs returns None."""
    if isinstance(tensors, torch.Tensor):
        return tensors * 0.5 if tensors.is_floating_point() else tensors
    if type(tensors) is tuple:
        return tuple(halved(each) for each in tensors)
    if type(tensors) is dict:
        return {name: halved(each) for name, each in tensors.items()}
    return tensors


def shape(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple):
        return tuple(shape(each) for each in value)
    if type(value) is dict:
        return {name: shape(each) for name, each in value.items() if isinstance(each, torch.Tensor)}
    return None


class Replaced:
    """A forward set on a module."""

    def __init__(self, module, seen):
        before = module.forward

        def forward(*args, **kwargs):
            seen.append(shape(args))
            return halved(before(*args, **kwargs))

        self.module, module.forward = module, forward

    def remove(self):
        del self.module.forward


def forward_hook(module, seen):
    def hook(_, args, output):
        seen.append((shape(args), shape(output)))
        return halved(output)

    return module.register_forward_hook(hook)


def forward_hook_with_kwargs(module, seen):
    def hook(_, args, kwargs, output):
        seen.append((shape(args), shape(kwargs), shape(output)))
        return halved(output)

    return module.register_forward_hook(hook, with_kwargs=True)


def pre_hook(module, seen):
    def hook(_, args):
        seen.append(shape(args))
        return halved(args)

    return module.register_forward_pre_hook(hook)


def pre_hook_with_kwargs(module, seen):
    def hook(_, args, kwargs):
        seen.append((shape(args), shape(kwargs)))
        hidden = {name: halved(value) for name, value in kwargs.items() if "hidden" in name}  # no masks
        return halved(args), {**kwargs, **hidden}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def backward_hook(module, seen):
    def hook(_, grad_inputs, grad_outputs):
        seen.append((shape(grad_inputs), shape(grad_outputs)))
        return halved(grad_inputs)

    return module.register_full_backward_hook(hook)


def backward_pre_hook(module, seen):
    def hook(_, grad_outputs):
        seen.append(shape(grad_outputs))
        return halved(grad_outputs)

    return module.register_full_backward_pre_hook(hook)


def global_hook(module, seen):
    def hook(called, args, output):
        if called is module:
            seen.append((shape(args), shape(output)))
            return halved(output)

    return register_module_forward_hook(hook)


def global_pre_hook(module, seen):
    def hook(called, args):
        if called is module:
            seen.append(shape(args))
            return halved(args)

    return register_module_forward_pre_hook(hook)


KINDS = {
    "forward": forward_hook,
    "forward kwargs": forward_hook_with_kwargs,
    "pre": pre_hook,
    "pre kwargs": pre_hook_with_kwargs,
    "backward": backward_hook,
    "backward pre": backward_pre_hook,
    "global": global_hook,
    "global pre": global_pre_hook,
    "replaced": Replaced,
}


@contextmanager
def hooked(kind, model, name, seen):
    handle = KINDS[kind](model.get_submodule(name), seen)
    try:
        yield
    finally:
        handle.remove()


def submodules(family):
    """Return the names of the modules of a model; of those that layers have in common, in one layer."""
    found = {}
    for name, module in model_of(family).named_modules():
        found.setdefault((re.sub(r"\d+", "", name), type(module)), name)
    return [name for name in found.values() if name]


def is_of_experts(name):
    """transformers calls the activation of experts once for each of them, fastmp once for all."""
    return name.endswith("experts.act_fn")


def assert_hooks_do_the_same(family, kind, names, **options):
    """Hook one submodule after the other of transformers' model and of the accelerated one."""
    theirs, ours = (model_of(family, torch.float64, **options) for _ in range(2))
    batch = batch_of(family)
    # a hook is there before `accelerate`, the others come after; a module with a forward of its own is kept
    with hooked("forward" if kind == "replaced" else kind, ours, names[0], []):
        fastmp.accelerate(ours)
    with Float64():
        for name in names:
            wanted, found = [], []
            with hooked(kind, theirs, name, wanted), hooked(kind, ours, name, found):
                expected = step(theirs, **batch)
                actual = step(ours, **batch)
            try:
                assert_same(actual, expected, 1e-9)
                logits = actual[0].logits
                torch.testing.assert_close(logits, expected[0].logits, rtol=0, atol=1e-9)
            except AssertionError as error:
                raise AssertionError(f"{kind} hook of {name}: {error}") from None
            assert found == wanted or is_of_experts(name), (name, found, wanted)
        assert are_lazy(ours(**batch).logits)  # without hooks the loss is fused again


SOME = [
    ("llama", ("lm_head", "model.layers.1.mlp.act_fn", "model.norm")),
    ("qwen3_moe", ("model.layers.1.mlp.experts.act_fn", "lm_head", "model")),
    ("bert", ("cls.predictions", "cls.predictions.decoder", "bert")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "names"), SOME, ids=[family for family, _ in SOME])
def test_hooks_of_some_modules(family, names, kind):
    assert_hooks_do_the_same(family, kind, names)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_hooks_of_every_module(family, kind):
    assert_hooks_do_the_same(family, kind, submodules(family))


def test_a_gate_set_on_a_module_of_experts_is_called():
    theirs, ours = (model_of("qwen3_moe", torch.float64) for _ in range(2))
    fastmp.accelerate(ours)
    theirs.set_experts_implementation("batched_mm")  # its loop over experts has the usual gate only
    for model in (theirs, ours):
        model.model.layers[1].mlp.experts._apply_gate = lambda pairs: pairs.chunk(2, -1)[0].tanh()
    with Float64():
        assert_same(step(ours, **batch_of("qwen3_moe")), step(theirs, **batch_of("qwen3_moe")), 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("first", ["accelerate", "lora"])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "replaced"])
def test_hooks_inside_of_lora(kind, first):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = {"target_modules": ["gate_proj", "up_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    models = []
    for ours in (False, True):
        model = model_of("qwen3_moe", torch.float64)
        if ours and first == "accelerate":
            fastmp.accelerate(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
        model.double()
        if ours and first == "lora":
            fastmp.accelerate(model)
        models.append(model)
    theirs, ours = models
    names = [name for name, _ in theirs.named_modules() if name.endswith(("act_fn", "lm_head", "gate_proj"))]
    assert len(names) >= 4
    for name in names:
        with hooked(kind, theirs, name, []), hooked(kind, ours, name, []), Float64():
            assert_same(*(step(model, **batch_of("qwen3_moe")) for model in (ours, theirs)), 1e-8)


def assert_group_does_the_same(family, kinds, names, **options):
    batch, wanted = batch_of(family), {}
    theirs = model_of(family, torch.float64, **options)
    with Float64():
        for kind in kinds:
            for name in names:
                seen = []
                with hooked(kind, theirs, name, seen):
                    output, grads = step(theirs, **batch)
                    wanted[kind, name] = (output.loss.item(), grads, seen)

    def run(rank, world_size):
        model = model_of(family, torch.float64, **options)
        fastmp.accelerate(model, group=dist.group.WORLD)
        for (kind, name), (loss, grads, calls) in wanted.items():
            found = []
            model.zero_grad()
            with Float64(), hooked(kind, model, name, found):
                output = model(**batch)
                output.loss.backward()
            assert abs(output.loss.item() - loss) <= 1e-9 * loss, (kind, name)
            whole = whole_gradients(model, dist.group.WORLD)
            assert whole.keys() == grads.keys()
            largest = max(grad.abs().max() for grad in grads.values())
            for parameter, grad in grads.items():
                assert (whole[parameter] - grad).abs().max() <= 1e-9 * largest, (kind, name, parameter)
            # attention weights, which eager attention returns beside its output, are of this rank's heads
            other = is_of_experts(name) or name.endswith(".self_attn")
            assert found == calls or other, (kind, name, found, calls)
        model.zero_grad()
        assert model(**batch).logits is None  # the loss is fused again

    run_ranks(run, 2, timeout=250)


def test_hooks_over_a_group_get_full_tensors():
    names = ["lm_head", "model.layers.1.mlp.experts.act_fn", "model.layers.0.mlp.act_fn"]
    names += [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_norm", "o_proj")]
    assert_group_does_the_same("qwen3_moe", ["forward", "backward"], names)


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
def test_hooks_of_every_module_over_a_group(family):
    assert_group_does_the_same(family, KINDS, submodules(family))


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model.lm_head)  # its weight is gathered in its own call
    return fully_shard(model)


def over_mesh(model):
    fastmp.accelerate(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep")))


def under_fsdp2(model):
    fastmp.accelerate(model)
    sharded(model)


def assert_ranks_do_the_same(family, prepare, kinds, names):
    """Each rank has its own batch; transformers' model is under FSDP2."""

    def run(rank, world_size):
        theirs, ours = (
            model_of(family, torch.float64, output_router_logits=False, use_cache=False) for _ in range(2)
        )
        sharded(theirs)
        prepare(ours)
        batch = {name: tensor[rank::world_size] for name, tensor in batch_of(family, 4).items()}
        for kind in kinds:
            for name in names:
                results = []
                for model in (theirs, ours):
                    model.zero_grad()
                    with Float64(), hooked(kind, model, name, []):
                        output = model(**batch)
                        output.loss.backward()
                    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
                    results.append((output, grads))
                try:
                    assert_same(results[1], results[0], 1e-9)
                except AssertionError as error:
                    raise AssertionError(f"{kind} hook of {name}: {error}") from None
        with Float64():
            logits = ours(**batch).logits
        assert are_lazy(logits)  # the hooks of FSDP2 keep the loss fused
        if isinstance(logits.weight, DTensor):  # of a head that is gathered in its own call
            with hooked("forward", ours, "lm_head", []), pytest.raises(RuntimeError, match="hooks were reg"):
                logits.sum()

    run_ranks(run, 2, timeout=250)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "prepare"),
    [
        ("llama", under_fsdp2),
        ("qwen3_moe", over_mesh),
        ("deepseek_v3", over_mesh),
    ],
)
def test_hooks_under_fsdp2_and_over_a_mesh(family, prepare):
    kinds = ("forward", "pre kwargs", "backward", "global pre", "replaced")
    assert_ranks_do_the_same(family, prepare, kinds, submodules(family))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["forward", "pre", "replaced"])
def test_hooks_compile_in_one_graph(kind):
    batch = batch_of("llama")
    theirs, ours = (model_of("llama", use_cache=False, num_hidden_layers=1) for _ in range(2))
    fastmp.accelerate(ours)
    for name in ("lm_head", "model.layers.0.mlp.act_fn"):
        for model in (theirs, ours):
            KINDS[kind](model.get_submodule(name), [])
    torch._dynamo.reset()
    ours.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(ours, **batch), step(theirs, **batch), 1e-5)


@pytest.mark.parametrize("first", ["accelerate", "hooks"])
def test_hooks_of_the_accelerate_library_count(first):
    """They set `forward`, which moves weights and inputs: transformers' own head and loss run."""
    library = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    names = ["lm_head", "model", "model.layers.0.mlp.act_fn", "model.layers.1.mlp"]

    def align(model, name):
        hook = library.hooks.AlignDevicesHook("cpu", io_same_device=True)
        library.hooks.add_hook_to_module(model.get_submodule(name), hook)

    for hooked_names in (*([name] for name in names), names):
        theirs, ours = (model_of("llama", torch.float64) for _ in range(2))
        if first == "accelerate":
            fastmp.accelerate(ours)
        for name in hooked_names:
            align(theirs, name)
            align(ours, name)
        if first == "hooks":
            fastmp.accelerate(ours)
        with Float64():
            expected, actual = (step(model, **batch_of("llama")) for model in (theirs, ours))
        assert_same(actual, expected, 1e-9)
        assert are_lazy(actual[0].logits) == ({"lm_head", "model"}.isdisjoint(hooked_names))
        library.hooks.remove_hook_from_module(ours, recurse=True)
        is_kept = first == "hooks" and "lm_head" in hooked_names  # as its table says
        assert are_lazy(ours(**batch_of("llama")).logits) != is_kept


@pytest.mark.parametrize("removed", [False, True], ids=["hooked", "removed"])
def test_restore_under_hooks_of_the_accelerate_library(removed):
    """They keep the bound `forward` of the class that a module had; `restore` gives them the original one."""
    hooks = pytest.importorskip("accelerate.hooks", reason="Accelerate is not installed")
    theirs, ours = (model_of("llama", torch.float64) for _ in range(2))
    fastmp.accelerate(ours)
    for module in list(ours.modules()):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    if removed:
        hooks.remove_hook_from_module(ours, recurse=True)
    fastmp.restore(ours)
    assert_same(*(step(model, **batch_of("llama")) for model in (ours, theirs)), 0.0)


@pytest.mark.parametrize("first", ["accelerate", "hooks"])
def test_offloaded_weights_are_moved_for_the_call_of_their_module(first):
    library = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    theirs, ours = (model_of("llama", torch.float64) for _ in range(2))
    if first == "accelerate":
        fastmp.accelerate(ours)
    library.cpu_offload(ours, torch.device("cpu"))
    if first == "hooks":
        fastmp.accelerate(ours)
    assert all(parameter.is_meta for parameter in ours.parameters())
    with Float64():
        expected, actual = (model(**batch_of("llama")) for model in (theirs, ours))
    assert not are_lazy(actual.logits)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-9)
