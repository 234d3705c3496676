"""A character tokenizer and a tiny model, made once for all tests of the data."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from specactor.config import TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer

SHAPE = TinyModelConfig(num_layers=1, hidden_size=32, expert_size=16)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_char_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of `SHAPE` with seed 0."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(SHAPE, 0, folder)
    return folder
