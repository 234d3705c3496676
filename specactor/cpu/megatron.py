"""The unmodified megatron-core wheel on a machine without a GPU: every change to its private names is here.

Call `install` before the first ``import megatron.core``. With a GPU it does nothing. It maps ``torch.cuda`` to the CPU
(`specactor.cpu.torch_cuda`), then closes the gaps of Megatron's paths without TransformerEngine:

- attention: packed sequences and context parallelism (`specactor.cpu.attention`), rotary embedding of packed sequences;
- mixture of experts: split sizes are converted only for CUDA tensors; a name is undefined without TransformerEngine;
- norms: refused under sequence parallelism, though only their gradients need to be marked;
- optimizer: torch's Adam keeps a step tensor per parameter, which a checkpoint load would share between all of them.

The changes are process-wide. In a process that ran `install`, transformers' own MoE models are not to be
trusted: compute references in another process.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from specactor.cpu import torch_cuda, torchvision_ops
from specactor.cpu.torch_cuda import replace

_state = {"installed": False}


def install() -> None:
    """Prepare this process for ``import megatron.core``; a second call, or a machine with a GPU, makes it a no-op."""
    if _state["installed"] or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("specactor.cpu.megatron.install must be called before megatron.core is imported")
    _state["installed"] = True
    torchvision_ops.install()
    torch_cuda.install()
    _import_core()
    _install_rng()
    _install_experts()
    _install_norm()
    _install_attention()
    _install_checkpoint()


def installed() -> bool:
    return _state["installed"]


def _import_core() -> None:
    """Without wandb, which Megatron's inference engine would log to: it takes a second."""
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
    """Megatron reads and writes the CUDA generator through two functions of its own."""
    module = _module("tensor_parallel.random")
    replace(module, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state())
    replace(module, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))


def _install_experts() -> None:
    module = _module("transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        replace(module, "te_general_gemm", None)

    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    replace(module, "maybe_move_tensor_to_cpu", to_numpy)
    replace(_module("transformer.moe.token_dispatcher"), "maybe_move_tensor_to_cpu", to_numpy)
    experts = importlib.import_module("specactor.cpu.experts")
    replace(_module("models.backends").LocalSpecProvider, "grouped_mlp_modules", experts.grouped_mlp_modules)


def _install_norm() -> None:
    """Torch norms under sequence parallelism: their gradients are summed over TP when the parameter is marked."""
    norms: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}

    def make(_: type, config: Any, hidden_size: int, eps: float = 1e-5, *__: Any, **___: Any) -> torch.nn.Module:
        if config.layernorm_zero_centered_gamma:
            raise NotImplementedError("zero-centred norm weights need TransformerEngine")
        norm: torch.nn.Module = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            replace(parameter, "sequence_parallel", config.sequence_parallel)
        return norm

    replace(_module("transformer.torch_norm").WrappedTorchNorm, "__new__", make)


def _install_attention() -> None:
    attention = importlib.import_module("specactor.cpu.attention")
    provider = _module("models.backends").LocalSpecProvider
    replace(provider, "core_attention", lambda self: attention.PackedAttention)
    replace(_module("models.common.embeddings.rope_utils"), "_apply_rotary_pos_emb_thd", attention.rotate_packed)


def _install_checkpoint() -> None:
    """Loading a checkpoint into torch's Adam (TransformerEngine's and apex's keep the step elsewhere)."""
    owner = _module("optimizer.distrib_optimizer").DistributedOptimizer
    set_states, load = owner._set_main_param_and_optimizer_states, owner.load_state_dict

    def set_states_but_step(self: Any, model_param: Any, tensors: Any) -> None:
        """The step is no tensor of the checkpoint: upstream looks for it there and fails."""
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
