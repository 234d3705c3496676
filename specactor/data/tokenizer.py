"""A tokenizer with one token per character, and the loading of any model's.

Invariants: printable ASCII decodes to itself (``<eos>`` is five characters); others are ``<unk>``; nothing is added
around a text.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config

from specactor.errors import ConfigError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3
CHARACTERS = ("\n", *(chr(code) for code in range(0x20, 0x7F)))
VOCAB_SIZE = -(-(len(SPECIAL_TOKENS) + len(CHARACTERS)) // 8) * 8  # 100 tokens, filled up to 104: TP divides it


def make_char_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    used = len(SPECIAL_TOKENS) + len(CHARACTERS)
    reserved = tuple(f"<reserved_{i}>" for i in range(VOCAB_SIZE - used))
    ids = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS, *reserved))}
    characters = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>", fuse_unk=False))
    characters.decoder = decoders.Fuse()
    special = [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *reserved)]
    characters.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(folder))


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """A Qwen2 with MTP layers. transformers has no such class, and that of published folders is not run."""

    model_type = "mimo"


def register_mimo() -> None:
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer; nothing is downloaded, no code of the folder is run. Raises ConfigError for none, or
    one without end-of-sequence token."""
    register_mimo()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError.at(
            "model.path",
            str(folder),
            "a folder with a tokenizer in Hugging Face format",
            f"Copy tokenizer.json and tokenizer_config.json there. transformers says: {reason}",
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError.at(
            "model.path",
            str(folder),
            "a tokenizer with an end-of-sequence token",
            "Set eos_token in its tokenizer_config.json.",
        )
    return tokenizer


def joins_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text is the bytes, or texts, of its tokens, one after the other."""
    return type(tokenizer.backend_tokenizer.decoder).__name__ in ("ByteLevel", "Fuse")
