from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from specactor.data.tokenizer import CHARACTERS, SPECIAL_TOKENS, VOCAB_SIZE, load_tokenizer
from specactor.errors import ConfigError

texts = st.text(alphabet=CHARACTERS, max_size=200)


@given(text=texts | st.sampled_from(["<eos>", "a<pad>b", "<reserved_0>", "  x .  , n't", " ", ""]))
def test_every_printable_text_comes_back_one_token_per_character(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert all(len(SPECIAL_TOKENS) <= i < 100 for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_characters_are_those_of_python_s_table() -> None:
    visible = set(string.ascii_letters + string.digits + string.punctuation + " \n")
    assert set(CHARACTERS) == visible
    assert len(CHARACTERS) == len(visible)


def test_ids_of_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    named = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert named == (0, 1, 2, 3)
    assert len(tokenizer) == VOCAB_SIZE == 104
    assert VOCAB_SIZE % 8 == 0


def test_every_id_decodes_and_special_ones_can_be_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    every = list(range(VOCAB_SIZE))
    assert tokenizer.decode(every, skip_special_tokens=True) == "".join(CHARACTERS)
    assert tokenizer.decode(every).startswith("<pad><bos><eos><unk>\n !")
    assert tokenizer.decode(every).endswith("~<reserved_0><reserved_1><reserved_2><reserved_3>")


def test_other_characters_are_unknown_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("aéß") == [tokenizer.encode("a")[0], 3, 3]


def test_a_model_folder_gives_the_same_tokenizer(tiny_model: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    loaded = load_tokenizer(tiny_model)
    text = "7 + 4 <eos>\n=#"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path: got '.*', expected a folder with a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="expected a tokenizer with an end-of-sequence token"):
        load_tokenizer(tmp_path)
