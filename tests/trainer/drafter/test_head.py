"""EAGLE-3 heads offline: their arithmetic, their format, and that they learn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specactor.config import DraftTrainingConfig
from specactor.config.train import HEAD_STEPS
from specactor.errors import ConfigError
from specactor.planning.memory import named_shape
from specactor.trainer.drafter import acceptance, command, head, head_training, init, losses
from specactor.trainer.drafter.buffer import RolloutLine, example_of
from specactor.trainer.drafter.train import DrafterTrainer
from tests.trainer.drafter import learn_rank
from tests.trainer.drafter.cases import VOCAB, write_rollouts
from tests.trainer.drafter.ranks import run_ranks
from tests.trainer.drafter.reference_head import ReferenceHead
from tests.trainer.drafter.test_command import said, sampled

PUBLISHED = {
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    *(f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
"""Names in published heads; those of a reduced vocabulary have d2t and t2d besides."""


@pytest.fixture
def rollouts(targets: dict[str, Path], tmp_path: Path) -> Path:
    write_rollouts(tmp_path / "r.jsonl", sampled(targets["moe"], 96))
    return tmp_path / "r.jsonl"


def made(target: Path, folder: Path, start: head.Eagle3Start | None = None) -> Path:
    """A head with weights that matter."""
    init.make_draft_model(target, folder, start or head.Eagle3Start())
    read = init.read_draft(folder, init.read_model(target))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        for parameter in read.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    init.write_model(read, folder, tokenizer=target)
    return folder


@pytest.mark.parametrize("vocab", [0, 20])
@pytest.mark.parametrize("name", ["moe", "dense", "tied"])
def test_every_step_equals_drafting_one_token_at_a_time(
    targets: dict[str, Path], rollouts: Path, tmp_path: Path, name: str, vocab: int
) -> None:
    folder = made(targets[name], tmp_path / "head", head.Eagle3Start(draft_vocab=vocab, rollouts=(rollouts,)))
    target = init.read_model(targets[name])
    ours, reference = init.read_draft(folder, target), ReferenceHead(folder, target)
    tokens = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features, _ = head.features_of(target, tokens, ours.layers)
        steps = [logits[0] for logits in ours(tokens, features, steps=4)]
    text = tokens[0].tolist()
    for end in range(2, 6):
        expected = torch.stack(reference.drafted(text[:end], text[end : end + 3]))
        got = torch.stack([steps[k][end - 1 + k] for k in range(4)])
        torch.testing.assert_close(got, expected[:, ours.token_ids], atol=1e-5, rtol=1e-5)
        assert (expected > -torch.inf).sum(1).tolist() == [vocab or VOCAB] * 4


def test_wrong_steps_are_noticed(targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair's own states of the step before, and not those of the pair before it."""
    folder = made(targets["dense"], tmp_path / "head")
    target = init.read_model(targets["dense"])
    ours, reference = init.read_draft(folder, target), ReferenceHead(folder, target)
    pad, size = torch.nn.functional.pad, target.config.hidden_size
    tokens = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(head.functional, "pad", lambda x, by: pad(x, (0, 0, 0, 1) if x.shape[-1] == size else by))
    with torch.no_grad():
        features, _ = head.features_of(target, tokens, ours.layers)
        second = list(ours(tokens, features, steps=2))[1][0]
    text = tokens[0].tolist()
    assert (second[4] - reference.drafted(text[:4], text[4:5])[1]).abs().max() > 1e-2


@pytest.mark.parametrize("vocab", [0, 20])
def test_the_published_format_is_written_and_read_again(
    targets: dict[str, Path], rollouts: Path, tmp_path: Path, vocab: int
) -> None:
    start = head.Eagle3Start(draft_vocab=vocab, rollouts=(rollouts,))
    folder, target = made(targets["moe"], tmp_path / "head", start), init.read_model(targets["moe"])
    read = init.read_draft(folder, target)
    init.write_model(read, tmp_path / "again", tokenizer=folder)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((folder / "config.json").read_bytes())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert config["draft_vocab_size"] == (vocab or VOCAB)
    assert (folder / "tokenizer.json").exists()
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        assert set(tensors.keys()) == PUBLISHED | ({"d2t", "t2d"} if vocab else set())
        if vocab:
            chosen = tensors.get_tensor("d2t") + torch.arange(vocab)
            assert torch.equal(tensors.get_tensor("t2d").nonzero()[:, 0], chosen)
            assert torch.equal(chosen, read.token_ids)


def test_it_drafts_the_most_frequent_tokens(targets: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    write_rollouts(file, [RolloutLine(prompt_ids=[30, 30, 30], token_ids=[7, 9, 9, 5, 7])])
    init.make_draft_model(targets["moe"], tmp_path / "head", head.Eagle3Start(draft_vocab=4, rollouts=(file,)))
    assert init.read_draft(tmp_path / "head", init.read_model(targets["moe"])).token_ids.tolist() == [0, 5, 7, 9]


def test_names_of_other_writers_and_an_embedding_of_its_own(targets: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, target = made(targets["moe"], tmp_path / "head"), init.read_model(targets["moe"])
    before = init.read_draft(folder, target)
    weights = load_file(folder / "model.safetensors")
    renamed = {f"model.{name.replace('midlayer', 'layers.0')}": w for name, w in weights.items()}
    renamed["model.embed_tokens.weight"] = target.get_input_embeddings().weight.detach() + 1
    save_file(renamed, folder / "model.safetensors")
    after = init.read_draft(folder, target)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert torch.equal(after.embedding, before.embedding + 1)
    init.write_model(after, folder, tokenizer=targets["moe"])
    assert torch.equal(init.read_draft(folder, target).embedding, after.embedding)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type linear"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type linear"),
        ({"norm_output": True}, "norm_output"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"eagle_config": {"use_aux_hidden_state": True}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "eagle_aux_hidden_state_layer_ids"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1], "use_aux_hidden_state": False}},
            "use_aux_hidden_state",
        ),
    ],
)
def test_a_head_that_computes_something_else_is_refused(
    targets: dict[str, Path], tmp_path: Path, fields: dict[str, object], named: str
) -> None:
    folder = made(targets["dense"], tmp_path / "head")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=named):
        init.read_draft(folder, init.read_model(targets["dense"]))


def test_init_train_eval(targets: dict[str, Path], rollouts: Path, tmp_path: Path) -> None:
    both = ["--target", str(targets["moe"]), "--rollouts", str(rollouts)]
    first, then = str(tmp_path / "first"), str(tmp_path / "then")
    said(["init", "--target", str(targets["moe"]), "--out", first, "start:eagle3-start"])
    evaluate = ["eval", *both, "--window", "4", "--threads", "1"]
    before = said([*evaluate, "--draft", first])
    train = ["train", *both, "--draft", first, "--out", then, "--updates", "30", "--threads", "1"]
    settings = ["--distillation.learning-rate", "0.02", "--distillation.tokens-per-update", "512"]
    assert "30 updates" in said([*train, *settings])
    after = said([*evaluate, "--draft", then])
    overlaps = [float(text.partition("at most ")[2].split()[0]) for text in (before, after)]
    assert overlaps[1] > overlaps[0] + 0.03, (before, after)
    assert head.is_head(Path(then))


def test_its_loss_is_the_distance_from_the_target(targets: dict[str, Path], rollouts: Path, tmp_path: Path) -> None:
    """Of every step, at the places of a response that it reaches."""
    target = init.read_model(targets["moe"])
    model = init.read_draft(made(targets["moe"], tmp_path / "head"), target)
    examples = [replace(example_of(line), temperature=0.7) for line in sampled(targets["moe"], 3)]
    trainer = head_training.HeadTrainer(DraftTrainingConfig(), model, seed=0, target=target)
    assert isinstance(trainer, DrafterTrainer)
    batch = losses.build(examples, torch.device("cpu"))
    loss, sums = trainer._loss(batch)
    reference = ReferenceHead(tmp_path / "head", target)
    expected, first = 0.0, 0.0
    weights = [0.8**k for k in range(HEAD_STEPS)]
    for example in examples:
        text = example.token_ids.tolist()
        with torch.no_grad():
            logp = (target(input_ids=torch.tensor([text])).logits[0] / 0.7).log_softmax(-1)
        for end in range(example.prompt_len + 1, len(text)):
            drafts = reference.drafted(text[:end], text[end : end + HEAD_STEPS - 1])
            for k, logits in enumerate(drafts[: len(text) - end]):
                p = logp[end - 1 + k]
                kl = float((p.exp() * (p - (logits / 0.7).log_softmax(-1))).sum())
                expected += kl * weights[k] / sum(weights)
                first += kl if k == 0 else 0.0
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert float(sums[1]) == pytest.approx(first, rel=1e-4)
    assert sums[3:].tolist() == [sum(e.response_len - 1 for e in examples), sum(e.response_len for e in examples)]


def test_states_that_were_computed_once_teach_as_the_target_beside_it(
    targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = init.read_model(targets["moe"])
    settings = DraftTrainingConfig(top_k=target.config.vocab_size, tokens_per_update=8192, learning_rate=1e-2)
    examples = [replace(example_of(line), temperature=0.7) for line in sampled(targets["moe"], 8)]

    def learned() -> list[float]:
        model = init.read_draft(folder, target)
        return list(command.learn(target, model, examples, settings, seed=0, limit_s=1e9, updates=6).losses)

    folder = made(targets["moe"], tmp_path / "head")
    once = learned()
    monkeypatch.setattr(command, "MAX_BYTES", 0)
    beside = learned()
    assert beside[-1] < 0.9 * beside[0]
    # states have three digits; a head that reads a layer too early begins further off
    assert once == pytest.approx(beside, rel=3e-3)


@pytest.mark.parametrize("tokens", [512, 1], ids=["shared", "of one example, which one rank has"])
def test_two_ranks_make_the_head_that_one_makes(
    targets: dict[str, Path], rollouts: Path, tmp_path: Path, tokens: int
) -> None:
    files = (targets["moe"], made(targets["moe"], tmp_path / "head"), rollouts)
    run_ranks("learn_rank", 2, tmp_path / "store", *files, tmp_path, tokens)
    first, second = (json.loads((tmp_path / f"learned{rank}.json").read_text()) for rank in range(2))
    losses_alone = learn_rank.learned(*files, tokens)
    assert first == second == pytest.approx(losses_alone, rel=1e-4)
    if tokens > 1:
        assert losses_alone[-1] < 0.99 * losses_alone[0], "it learns"


def test_by_depth_a_verify_ends_where_that_depth_disagrees() -> None:
    import numpy as np

    agrees = np.array([[0, 0], [1, 0], [1, 1], [1, 0], [1, 1]], dtype=np.bool_)
    # 0 | 1 and no further, with the token after | 3, and the last at the second depth
    assert acceptance.accept_length([agrees], window=4) == pytest.approx(5 / 3)
    assert acceptance.accept_length([agrees], window=1) == pytest.approx(5 / 3)


def test_what_does_not_fit_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    folder = made(targets["moe"], tmp_path / "head")
    with pytest.raises(ConfigError, match=r"start.draft_vocab: got 5, expected 0, or > 0 with rollouts"):
        head.Eagle3Start(draft_vocab=5)
    small = init.read_model(targets["dense"])
    small.config.hidden_size = 16
    with pytest.raises(ConfigError, match="a head of a target with 32 hidden sizes"):
        init.read_draft(folder, small)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    with pytest.raises(ConfigError, match="an EAGLE-3 head of one layer without biases"):
        init.read_draft(folder, init.read_model(targets["moe"]))
    assert command.parse(["init", "--target", "a", "--out", "b", "start:eagle3-start"]).start == head.Eagle3Start()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(2, [-1, 0]), (3, [-1, 0, 1]), (4, [0, 1, 2]), (7, [1, 2, 3]), (36, [1, 17, 32])]
)
def test_a_head_reads_low_middle_and_high_layers(num_layers: int, expected: list[int]) -> None:
    assert head.layers_read(num_layers) == expected


@pytest.mark.parametrize("vocab", [0, 20])
def test_plans_count_its_weights(targets: dict[str, Path], rollouts: Path, tmp_path: Path, vocab: int) -> None:
    start = head.Eagle3Start(draft_vocab=vocab, rollouts=(rollouts,))
    init.make_draft_model(targets["moe"], tmp_path / "head", start)
    read, shape = (
        init.read_draft(tmp_path / "head", init.read_model(targets["moe"])),
        named_shape(str(tmp_path / "head")),
    )
    assert shape.params == sum(p.numel() for p in read.parameters() if p.dim() == 2)
    assert shape.reads == read.fc.in_features
