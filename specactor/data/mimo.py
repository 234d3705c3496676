"""MiMo's config.json for transformers, which has no class of it: published folders bring code that nobody runs here."""

from __future__ import annotations

from transformers import AutoConfig, Qwen2Config


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """A Qwen2, with `num_nextn_predict_layers` MTP layers behind its last one."""

    model_type = "mimo"


def register() -> None:
    """Let `AutoConfig` read such folders, in this process."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
