"""The megatron-core wheel without TransformerEngine: every change to its private names is here, and process-wide.
References with transformers' own MoE models need another process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from specactor.cpu import gloo, torchvision_ops

CPU = torch.device("cpu")

_FACTORIES = (
    "tensor zeros ones empty full rand randn randint arange zeros_like ones_like empty_like full_like rand_like "
    "as_tensor linspace eye"
)
_METHODS = ["new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"]

_state = {"installed": False}


def install() -> None:
    """Prepare this process before the first ``import megatron.core``."""
    if _state["installed"]:
        return
    has_gpu = torch.cuda.is_available()
    if has_gpu and importlib.util.find_spec("transformer_engine") is not None:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("specactor.cpu.megatron.install must be called before megatron.core is imported")
    _state["installed"] = True
    if not has_gpu:
        torchvision_ops.install()
        install_torch()
    _import_core()
    if not has_gpu:
        _install_rng()
        _install_splits()
        _install_host_optimizer()
    # It compares the version of TransformerEngine, of which there is none here.
    replace(_module("optimizer.optimizer_config"), "is_te_min_version", lambda *_: False)
    _install_experts()
    _install_norm()
    _install_attention()
    _install_checkpoint()


def _import_core() -> None:
    """Import Megatron without wandb, which takes a second."""
    had_wandb = "wandb" in sys.modules
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
    try:
        _module("inference.contexts")
    finally:
        if not had_wandb:
            del sys.modules["wandb"]


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _install_rng() -> None:
    module = _module("tensor_parallel.random")
    replace(module, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state())
    replace(module, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))


def _install_splits() -> None:
    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    for module in ("moe_utils", "token_dispatcher"):
        replace(_module(f"transformer.moe.{module}"), "maybe_move_tensor_to_cpu", to_numpy)


def _install_host_optimizer() -> None:
    # The offloading optimizer copies CUDA tensors alone to the host, and fails when it looks for copies of others.
    owner = _module("optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
    divide = owner._get_sub_optimizer_param_groups

    def divide_as_on_a_device(self: Any, offload_fraction: float) -> Any:
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        with mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: id(tensor) in own)):
            return divide(self, offload_fraction)

    replace(owner, "_get_sub_optimizer_param_groups", divide_as_on_a_device)


def _install_experts() -> None:
    module = _module("transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):  # upstream uses it undefined
        replace(module, "te_general_gemm", None)
    experts = importlib.import_module("specactor.cpu.layers")
    replace(_module("models.backends").LocalSpecProvider, "grouped_mlp_modules", experts.grouped_mlp_modules)


def _install_norm() -> None:
    norms: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}

    def make(_: type, config: Any, hidden_size: int, eps: float = 1e-5, *__: Any, **___: Any) -> torch.nn.Module:
        if config.layernorm_zero_centered_gamma:
            raise NotImplementedError("zero-centred norm weights need TransformerEngine")
        norm: torch.nn.Module = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():  # so marked, their gradients are summed over TP
            replace(parameter, "sequence_parallel", config.sequence_parallel)
        return norm

    replace(_module("transformer.torch_norm").WrappedTorchNorm, "__new__", make)


def _install_attention() -> None:
    attention = importlib.import_module("specactor.cpu.layers")
    provider = _module("models.backends").LocalSpecProvider
    replace(provider, "core_attention", lambda self: attention.PackedAttention)
    replace(_module("models.common.embeddings.rope_utils"), "_apply_rotary_pos_emb_thd", attention.rotate_packed)


def _install_checkpoint() -> None:
    """Make checkpoints load into torch's Adam, which keeps the step in its state."""
    owner = _module("optimizer.distrib_optimizer").DistributedOptimizer
    set_states, load = owner._set_main_param_and_optimizer_states, owner.load_state_dict

    def set_states_but_step(self: Any, model_param: Any, tensors: Any) -> None:
        """Hide the step, which upstream looks for among the checkpoint's tensors."""
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        step = state.pop("step", None)
        set_states(self, model_param, tensors)
        if step is not None:
            state["step"] = step

    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        """Upstream gives all parameters one step tensor, which Adam then increments once per parameter."""
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    replace(owner, "_set_main_param_and_optimizer_states", set_states_but_step)
    replace(owner, "load_state_dict", load_with_own_steps)


def replace(owner: object, name: str, value: object) -> None:
    """Every change to a foreign module goes through here."""
    setattr(owner, name, value)


def install_torch() -> None:
    """Map ``torch.cuda`` to the CPU, before a library that uses it is imported."""
    importlib.import_module("torch._dynamo")  # it lists torch's functions when imported: before they are wrapped
    replace(torch, "compile", lambda model=None, **_: model if model is not None else (lambda fn: fn))
    _install_state()
    _install_devices()
    _install_gloo()
    gloo.share_device()


class Stream:
    """The CPU is synchronous: a stream orders nothing."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = object.__hash__

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    """An event has always happened; two of them measure time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time_s = 0.0

    def record(self, *_: Any) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.time_s - self.time_s)


class TypeName(str):
    """``Tensor.type()``: 'torch.FloatTensor' that also equals 'torch.cuda.FloatTensor', which optimizers look for."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or self.replace("torch.", "torch.cuda.", 1).__eq__(other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _nothing(*_: Any, **__: Any) -> None: ...


def _install_state() -> None:
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache"):
        replace(cuda, name, _nothing)
    replace(cuda, "current_device", lambda: CPU)
    replace(cuda, "device_count", lambda: 1)
    replace(cuda, "Stream", Stream)
    replace(cuda, "Event", Event)
    for name in ("current_stream", "default_stream"):
        replace(cuda, name, lambda *_: Stream())
    replace(cuda, "stream", lambda _=None: contextlib.nullcontext())
    for name in ("manual_seed", "manual_seed_all"):
        replace(cuda, name, torch.default_generator.manual_seed)
    for module in (cuda, cuda.random):
        replace(module, "get_rng_state", lambda device=None: torch.get_rng_state())
        replace(module, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replace(cuda, name, lambda *_: 0)
    for name in ("range_push", "range_pop"):
        replace(cuda.nvtx, name, _nothing)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _install_devices() -> None:
    tensor = torch.Tensor
    for name in _FACTORIES.split():
        replace(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        replace(tensor, name, _on_cpu(getattr(tensor, name)))
    move: Callable[..., torch.Tensor] = tensor.to
    type_of: Callable[..., Any] = tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return move(self, *args, **{name: CPU if _is_cuda(value) else value for name, value in kwargs.items()})

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        return type_of(self, *args, **kwargs) if args or kwargs else TypeName(type_of(self))

    def itself(self: Any, *_: Any, **__: Any) -> Any:
        return self

    replace(tensor, "to", to)
    replace(tensor, "type", type_name)
    replace(tensor, "cuda", itself)
    replace(tensor, "pin_memory", itself)
    replace(tensor, "record_stream", _nothing)
    replace(torch.nn.Module, "cuda", itself)


def _install_gloo() -> None:
    # gloo refuses an uneven all_gather, and scatters a strided view as if it were contiguous, without an error.
    all_gather, scatter, barrier = dist.all_gather, dist.scatter, dist.barrier

    @functools.wraps(all_gather)
    def gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({tuple(output.shape) for output in outputs}) == 1:
            return all_gather(outputs, mine, group=group, async_op=async_op)
        if async_op:
            raise NotImplementedError("all_gather of unequal parts on gloo: async_op is not supported")
        rows = max(output.shape[0] for output in outputs)
        padded = [mine.new_empty((rows, *mine.shape[1:])) for _ in outputs]
        own = mine.new_zeros((rows, *mine.shape[1:]))
        own[: mine.shape[0]] = mine
        all_gather(padded, own, group=group)
        for output, part in zip(outputs, padded, strict=True):
            output.copy_(part[: output.shape[0]])
        return None

    def contiguous_scatter(output: torch.Tensor, parts: list[torch.Tensor] | None = None, *a: Any, **k: Any) -> Any:
        parts = k.pop("scatter_list", parts)
        return scatter(output, [part.contiguous() for part in parts] if parts else None, *a, **k)

    replace(dist, "all_gather", gather)
    replace(dist, "scatter", contiguous_scatter)
    replace(dist, "barrier", lambda group=None, async_op=False, device_ids=None: barrier(group, async_op))
