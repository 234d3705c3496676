"""Wrong settings: each is one line with the rule, the value and the way out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.measure import measure_settings
from specactor.config.rollout import BY_ROWS, BY_SIZE, NOT_EXTRA, ONE_ATTENTION, ONE_BATCH, ONE_PLACE
from specactor.config.train import gap_bound
from specactor.errors import ConfigError
from specactor.parallel.layout import longest_prompt
from specactor.recipes import from_json, load, recipes, to_json

SETTINGS = 95
"""Settings of a run, as `make measure` counts them."""
WRONG: list[tuple[str, str]] = [
    *(
        (f"--{name.replace('_', '-')} inf", f"{name}: got inf, expected a finite number. See --help for its meaning.")
        for name in [
            "train.learning_rate",
            "train.weight_decay",
            "train.grad_clip",
            "rollout.temperature",
            "algorithm.kl_coef",
            "algorithm.clip_high",
            "distillation.learning_rate",
        ]
    ),
    (
        "--warmup.learning-rates 1e-3 inf",
        "warmup.learning_rates: got inf, expected a finite number. See --help for its meaning.",
    ),
    ("--train.max-logprob-gap nan", "train.max_logprob_gap: got nan, expected > 0. Use inf for no bound."),
    (
        "--resume auto --resume continue",
        "resume: got 'continue', expected off, auto or the folder of a checkpoint. Check the path.",
    ),
    ("--resume continue", "resume: got 'continue', expected off, auto or the folder of a checkpoint. Check the path."),
    ("--name a\0b", "name: got 'a\\x00b', expected a text without NUL characters. Leave them out."),
    ("--output-dir=", "output_dir: got '', expected a folder. Use . for the one where the run starts."),
    ("--train.lr 1", "unknown setting --train.lr. Did you mean --train.learning-rate?"),
    ("--rollout.grup_size 4", "unknown setting --rollout.grup-size. Did you mean --rollout.group-size?"),
    ("--wandb off", "unknown setting --wandb. Did you mean --tracking.wandb?"),
    ("--parallel.tp 2", "unknown setting --parallel.tp. Did you mean --parallel.tensor?"),
    ("--steps 3", "unknown setting --steps. Did you mean --warmup.steps or --train.steps?"),
    ("--zzz 3", "unknown setting --zzz. See --help."),
    (
        "actor_rollout_ref.rollout.n=8",
        "command line: got 'actor_rollout_ref.rollout.n=8', expected --key.path value. Did you mean "
        "--rollout.group-size 8?",
    ),
    (
        "+trainer.nnodes=2",
        "command line: got '+trainer.nnodes=2', expected --key.path value. That is torchrun's --nnodes.",
    ),
    (
        "trainer.max_actor_ckpt_to_keep=3",
        "command line: got 'trainer.max_actor_ckpt_to_keep=3', expected --key.path value. Did you mean "
        "--checkpoint.keep 3?",
    ),
    (
        "trainer.steps=3",
        "command line: got 'trainer.steps=3', expected --key.path value. Did you mean --warmup.steps 3 or "
        "--train.steps 3?",
    ),
    ("trainer.odd=1", "command line: got 'trainer.odd=1', expected --key.path value. See --help."),
    ("--eval.temperature 0.6", "unknown setting --eval.temperature. See --help."),
    ("--checkpoint.kepp 3", "unknown setting --checkpoint.kepp. Did you mean --checkpoint.keep?"),
    ("seed 3", "command line: got 'seed', expected --key.path value. Put two dashes before a key, one value after it."),
    (
        "--data.params.max_n 3",
        "unknown setting --data.params.max_n. Write --data.params max_n=VALUE, all pairs after one --data.params.",
    ),
    (
        "--data.params 3",
        "data.params: got '3', expected [KEY=VALUE ...]. Its meaning: train_moe.py quickstart_plain --help",
    ),
    (
        "--rollout.group-size many",
        "rollout.group_size: got 'many', expected INT. Its meaning: train_moe.py quickstart_plain --help",
    ),
    ("--seed", "seed: got no value, expected INT. Its meaning: train_moe.py quickstart_plain --help"),
    (
        "--model.dtype float16",
        "model.dtype: got 'float16', expected one of float32, bfloat16. Its meaning: "
        "train_moe.py quickstart_plain --help",
    ),
    (
        "--rollout.group-size 1",
        "rollout.group_size: got 1, expected >= 2 with algorithm.advantage = grpo. "
        "Advantages compare the responses of a group.",
    ),
    (
        "--rollout.temperature 0",
        "rollout.temperature: got 0.0, expected > 0. Reinforcement learning needs samples; 1.0 is the policy itself.",
    ),
    (
        "--rollout.max-new-tokens 512",
        "rollout.max_new_tokens: got 512, expected < the model's context length 512. "
        "Shorten the responses, or give the folder of a model with --model.path.",
    ),
    (
        "--train.tokens-per-microbatch 64",
        "train.tokens_per_microbatch: got 64, expected > rollout.max_new_tokens / parallel.context = 64 / 1. "
        "One micro-batch must hold the longest prompt and response: raise it, or parallel.context.",
    ),
    (
        "--train.updates-per-step 3",
        "train.updates_per_step: got 3, expected a divisor of rollout.prompts_per_step = 16. "
        "Groups are never split between updates.",
    ),
    (
        "--algorithm.overlong-buffer 64",
        "algorithm.overlong_buffer: got 64, expected < rollout.max_new_tokens = 64. Shorten the buffer.",
    ),
    ("--rollout.json-schema {}", "unknown setting --rollout.json-schema. See --help."),
    (
        "--rollout.engine.extra-args enable-dp-attention=true",
        "rollout.engine.extra_args: got 'enable_dp_attention', expected another argument. All ranks of an engine must "
        "hold the same batch. Use more engines: parallel.engines.",
    ),
    (
        "--rollout.engine.extra-args tp_size=4",
        "rollout.engine.extra_args: got 'tp_size', expected another argument. Use parallel.engine_tensor.",
    ),
    (
        "--rollout.engine.extra-args mem_fraction_static=0.9",
        "rollout.engine.extra_args: got 'mem_fraction_static', expected another argument. "
        "Use rollout.engine.memory_fraction.",
    ),
    *(
        (
            f"--rollout.engine.extra-args {word}",
            f"rollout.engine.extra_args: got '{word.partition('=')[0]}', expected another argument. "
            "Engines hold the trainer's weights as they are, in model.dtype.",
        )
        for word in ("quantization=fp8", "enable_lora=true")
    ),
    (
        "--rollout.engine.extra-args attention_backend=flashinfer",
        "rollout.engine.extra_args: got 'attention_backend=flashinfer', expected another backend. It splits a row's "
        "keys in CUDA graphs otherwise than without. Leave it out, or use triton.",
    ),
    (
        "--rollout.engine.extra-args moe_runner_backend=flashinfer_trtllm",
        "rollout.engine.extra_args: got 'moe_runner_backend', expected another argument. On GPUs it is triton: others "
        "choose tiles by the number of rows, or permute weights.",
    ),
    *(
        (
            f"--rollout.engine.extra-args {name}=true",
            f"rollout.engine.extra_args: got '{name}', expected another argument. {way}",
        )
        for way, names in {
            BY_ROWS: (
                *("enable_fp32_lm_head", "bf16_gemm_backend", "enable_torch_compile", "enable_mixed_chunk"),
                *("enable_two_batch_overlap", "enable_single_batch_overlap"),
            ),
            BY_SIZE: (
                *("enable_symm_mem", "enable_mscclpp", "enable_fused_moe_sum_all_reduce"),
                "enable_attn_tp_input_scattered",
            ),
            ONE_ATTENTION: ("decode_attention_backend", "prefill_attention_backend"),
            ONE_BATCH: ("dp_size", "attn_dp_size", "enable_dp_attention"),
            ONE_PLACE: ("enable_eplb", "ep_num_redundant_experts", "init_expert_location"),
            NOT_EXTRA["moe_a2a_backend"]: ("moe_a2a_backend",),
        }.items()
        for name in names
    ),
    (
        "--data.params max_n=99,min_n=1",
        "data.params: got 'max_n=99,min_n=1', expected [KEY=VALUE ...]. Separate pairs by blanks.",
    ),
    (
        "--rollout.engine.extra-args speculative_algorithm=EAGLE",
        "rollout.engine.extra_args: got ['speculative_algorithm'], expected no speculative_* argument. SGLang's own "
        "speculation does not keep the text: on a GPU it accepts drafts by coins that plain decoding does not toss, on "
        "a CPU it takes the likeliest token at any temperature. Use rollout.speculation.",
    ),
    (
        "--rollout.speculation.drafters suffix EAGLE3 nextn",
        "rollout.speculation.drafters: got ['EAGLE3', 'nextn'], expected suffix, previous, mtp, model, "
        "decoupled, or package.module:Class. SGLang's own speculation does not keep the text: on a GPU it accepts "
        "drafts by coins that plain decoding does not toss, on a CPU it takes the likeliest token at any temperature. "
        "A draft model, or an EAGLE-3 head, is used with the drafter model.",
    ),
    (
        "--rollout.speculation.mode decoupled --parallel.drafters 1",
        "rollout.speculation.draft_model: got (), expected a folder, since decoupled is among the drafters. Name a "
        "model, or take decoupled out of rollout.speculation.drafters and mode.",
    ),
    (
        "--rollout.speculation.mode decoupled --rollout.speculation.draft-model x",
        "parallel.drafters: got 0, expected >= 1, since decoupled is among the drafters. With parallel.engines >= 2 it "
        "may be 0: then an engine that has run dry lends its device.",
    ),
    (
        "--rollout.speculation.mode coupled --rollout.speculation.drafters model model:3 "
        "--rollout.speculation.draft-model x y",
        "rollout.speculation.drafters: got ('model', 'model:3'), expected model for the first of 2 in "
        "rollout.speculation.draft_model, model:2 for the second. Name a draft model for model:3, or take it out.",
    ),
    (
        "--rollout.speculation.mode coupled --rollout.speculation.drafters model:1 --rollout.speculation.draft-model x",
        "rollout.speculation.drafters: got ('model:1',), expected model for the first of 1 in "
        "rollout.speculation.draft_model, model:2 for the second. Name a draft model for model:1, or take it out.",
    ),
    (
        "--rollout.speculation.draft-model x ./x",
        "rollout.speculation.draft_model: got ('x', './x'), expected every folder once. Remove the second one.",
    ),
    (
        "--rollout.speculation.draft-model x warm-up",
        "rollout.speculation.draft_model: got ('x', 'warm-up'), expected warm-up and warm-up-head as the first alone. "
        "Put it there.",
    ),
    (
        "--rollout.speculation.mode coupled --rollout.speculation.drafters decoupled:2 "
        "--rollout.speculation.draft-model x y",
        "rollout.speculation.drafters: got ('decoupled:2',), expected no decoupled in rollout.speculation.mode "
        "coupled. Use mode decoupled, or auto.",
    ),
    (
        "--rollout.speculation.mode decoupled --rollout.speculation.drafters decoupled decoupled:2 "
        "--rollout.speculation.draft-model x y --parallel.drafters 1",
        "parallel.drafters: got 1, expected >= 2, one for each of decoupled, decoupled:2. Engines that have run dry "
        "lend their devices to the first draft model alone.",
    ),
    (
        "--rollout.speculation.mode auto --rollout.speculation.drafters decoupled:2 --rollout.speculation.draft-model "
        "x y --parallel.engines 2",
        "parallel.drafters: got 0, expected >= 1, one for each of decoupled:2. Engines that have run dry lend their "
        "devices to the first draft model alone.",
    ),
    (
        "--parallel.drafters 2",
        "parallel.drafters: got 2, expected 0, since nothing is drafted in them. Set it together with mode decoupled, "
        "or decoupled among the drafters, of rollout.speculation.",
    ),
    (
        "--parallel.drafter-hosts 1",
        "parallel.drafter_hosts: got (1,), expected its default with parallel.drafters 0. Leave it out, or set "
        "parallel.drafters.",
    ),
    ("--parallel.drafters -1", "parallel.drafters: got -1, expected >= 0. Use 0 for none."),
    (
        "--parallel.drafter-hosts 1 1",
        "parallel.drafter_hosts: got (1, 1), expected numbers of hosts from 0 on, every one once. Leave it out to give "
        "each host drafters of its own.",
    ),
    (
        "--rollout.speculation.mode coupled --rollout.speculation.drafters decoupled",
        "rollout.speculation.drafters: got ('decoupled',), expected no decoupled in rollout.speculation.mode coupled. "
        "Use mode decoupled, or auto.",
    ),
    *(
        (f"--algorithm.critic.{words}", f"algorithm.critic.{message}")
        for words, message in [
            ("learning-rate 0", "learning_rate: got 0.0, expected > 0. Use for example 1e-5."),
            ("learning-rate inf", "learning_rate: got inf, expected a finite number. See --help for its meaning."),
            ("warmup-steps -1", "warmup_steps: got -1, expected >= 0. Use 0 for none."),
            (
                "level sequence",
                "level: got 'sequence', expected one of token, turn. Its meaning: train_moe.py quickstart_plain --help",
            ),
            ("gamma 0", "gamma: got 0.0, expected in (0, 1]. Use 1 where only the reward counts."),
            ("gamma 1.1", "gamma: got 1.1, expected in (0, 1]. Use 1 where only the reward counts."),
            ("gae-lambda -0.1", "gae_lambda: got -0.1, expected in [0, 1]. Use for example 1 or 0.95."),
            ("value-clip 0", "value_clip: got 0.0, expected > 0 or None. Use None to switch it off."),
            ("value-clip nan", "value_clip: got nan, expected > 0 or None. Use None to switch it off."),
        ]
    ),
    (
        "--rollout.group-size 1 --algorithm.advantage gae --algorithm.dynamic-sampling unequal",
        "rollout.group_size: got 1, expected >= 2 with algorithm.dynamic_sampling. Rewards of a group are compared, "
        "and of one they are all equal.",
    ),
    (
        "--train.routing-replay maybe",
        "train.routing_replay: got 'maybe', expected one of off, r3. Its meaning: train_moe.py quickstart_plain --help",
    ),
    (
        "--algorithm.correction.bounds 0 0.5",
        "algorithm.correction.bounds: got (0.0, 0.5), expected 0 <= lowest <= 1 <= highest, not both 1. A ratio of 1 "
        "is agreement: use for example 0 2, or 0.5 2.",
    ),
    (
        "--algorithm.correction.bounds -1 2",
        "algorithm.correction.bounds: got (-1.0, 2.0), expected 0 <= lowest <= 1 <= highest, not both 1. A ratio of 1 "
        "is agreement: use for example 0 2, or 0.5 2.",
    ),
    (
        "--algorithm.correction.bounds 0 inf",
        "algorithm.correction.bounds: got inf, expected a finite number. See --help for its meaning.",
    ),
    (
        "--algorithm.correction.level batch",
        "algorithm.correction.level: got 'batch', expected one of off, token, sequence, geometric. Its meaning: "
        "train_moe.py quickstart_plain --help",
    ),
    (
        "--algorithm.correction.action clip",
        "algorithm.correction.action: got 'clip', expected one of truncate, mask, reject. Its meaning: train_moe.py "
        "quickstart_plain --help",
    ),
    (
        "--rollout.partial True",
        "rollout.partial: got True, expected False with rollout.oversample = 1. Set rollout.oversample to more than 1: "
        "else a step waits for all of its responses, and nothing is left.",
    ),
    (
        "--rollout.oversample 0.5",
        "rollout.oversample: got 0.5, expected in [1, 10]. Use 1 for all groups that are asked for, or for example "
        "1.25.",
    ),
    (
        "--rollout.oversample 1.5 --rollout.partial True --algorithm.dynamic-sampling unequal",
        "rollout.partial: got True, expected False with algorithm.dynamic_sampling. The same groups are kept whenever "
        "a step is run: none goes on in the next.",
    ),
    (
        "--rollout.oversample 1.5 --rollout.partial True --algorithm.correction.level off",
        "algorithm.correction.level: got 'off', expected another with rollout.partial. Tokens of older policies need "
        "importance sampling: set it, for example to token.",
    ),
    (
        "--warmup.steps 550",
        "warmup.learning_rates: got (0.003, 0.001), expected one per stage (1 in warmup.steps). "
        "Give both lists the same length.",
    ),
    (
        "--warmup.solver solve",
        "warmup.solver: got 'solve', expected module:function, with at least one stage in warmup.steps. "
        "Write the import path with a colon, or leave it empty to skip the warm-up.",
    ),
    (
        "--data.train x.jsonl",
        "data.eval: got (), expected a file with held-out problems, with eval.problems 256. Give one, or use "
        "eval.problems 0.",
    ),
    (
        "--data.train x.jsonl --data.eval x.jsonl",
        "data.eval: got ('x.jsonl',), expected files other than data.train. Held-out problems must not be trained on.",
    ),
    (
        "--data.train=",
        "data.train: got '', expected a .jsonl or .parquet file, or the name of a reasoning-gym task. Give one.",
    ),
    (
        "--data.params size=10000001",
        "data.params.size: got 10000001, expected 1..10000000. Problems beyond these are held out.",
    ),
    (
        "--data.params size=0",
        "data.params.size: got 0, expected 1..10000000. Problems beyond these are held out.",
    ),
    *(
        (
            f"--data.prompt-template {template}",
            f"data.prompt_template: got '{template}', expected a text with {{prompt}}, or the {{name}} of a task's "
            "metadata or of a column. Put {prompt} where the problem's text belongs, and write {{ and }} for braces.",
        )
        for template in ("Q:", "{prompt", "{prompt.__class__}")
    ),
    (
        "--eval.problems 10000001",
        "eval.problems: got 10000001, expected <= 10000000. Use fewer.",
    ),
    (
        "--eval.problems 0 --eval.every 5",
        "eval.every: got 5, expected 0 with eval.problems 0. Nothing would be evaluated: leave it out, or set "
        "eval.problems.",
    ),
    (
        "--rollout.engine.max-total-tokens 64",
        "rollout.engine.max_total_tokens: got 64, expected > rollout.max_new_tokens = 64. "
        "The KV cache must hold at least one whole response: enlarge it, or use None.",
    ),
    ("--model.path=", "model.path: got '', expected the folder of a model, or tiny. Give it with --model.path."),
    (
        "--parallel.virtual-pipeline 2",
        "parallel.virtual_pipeline: got 2, expected >= 2, with parallel.pipeline >= 2. "
        "Leave it out, or use pipeline parallelism.",
    ),
    (
        "--parallel.tensor 0",
        "parallel.tensor: got 0, expected >= 1. Use 1 to switch this kind of parallelism off.",
    ),
    (
        "--name a/b",
        "name: got 'a/b', expected a folder name without '/', and not '.' or '..'. "
        "Put the folder above it in --output-dir.",
    ),
    (
        "--weights-sync.bucket-bytes 10",
        "weights_sync.bucket_bytes: got 10, expected >= 65536. Use at least 64 KiB.",
    ),
    (
        "--distillation.refresh -1",
        "distillation.refresh: got -1.0, expected a share from 0 to 1, or more with max_updates. Use for example 0.03, "
        "or 0 for none.",
    ),
    (
        "--distillation.refresh 1.5",
        "distillation.refresh: got 1.5, expected a share from 0 to 1, or more with max_updates. Use for example 0.03, "
        "or 0 for none.",
    ),
    (
        "--algorithm.critic.gae-lambda 0.9",
        "--algorithm.critic.gae-lambda: given with algorithm.advantage = grpo, which has no critic. Leave it out, or "
        "use --algorithm.advantage gae.",
    ),
    (
        "--rollout.environment-timeout-s 0",
        "rollout.environment_timeout_s: got 0.0, expected > 0. Give environments time to answer.",
    ),
    ("--data.mix a.jsonl 0", "data.mix.a.jsonl: got 0.0, expected > 0. Leave the set out, or give it a weight."),
    (
        "--data.mix count_bits 1",
        "data.mix: got 'count_bits', expected other sets than train and eval. Drop it.",
    ),
    ("--eval.samples 0", "eval.samples: got 0, expected >= 1. Use 1 for greedy responses."),
    (
        "--data.eval c.jsonl a/x.jsonl b/x.jsonl",
        "data.eval: got ('c.jsonl', 'a/x.jsonl', 'b/x.jsonl'), expected sets with names of their own. The name of a "
        "further set is that of its file, function or task, other than train and eval. Rename one, or name it first.",
    ),
    (
        "--data.eval c.jsonl math/train.jsonl",
        "data.eval: got ('c.jsonl', 'math/train.jsonl'), expected sets with names of their own. The name of a further "
        "set is that of its file, function or task, other than train and eval. Rename one, or name it first.",
    ),
    (
        "--algorithm.loss ppo",
        "algorithm.loss: got 'ppo', expected one of ppo_clip, gspo, cispo, or module:function. See --help for each.",
    ),
    (
        "--train.optimizer-state host",
        "train.optimizer_state: got 'host', expected float32 with model.dtype = float32. In float32 the main weights "
        "are the model's own, which neither round nor leave the device.",
    ),
    (
        "--train.adam-betas 0.9 1.0",
        "train.adam_betas: got (0.9, 1.0), expected in [0, 1) each. Use for example 0.9 0.95.",
    ),
]


def test_a_setting_comes_or_goes_on_purpose() -> None:
    """Each is a cost that every reader pays: a recipe, a benchmark or a documented need must use it."""
    counted = measure_settings()["settings"]
    assert counted == SETTINGS, (
        f"a run has {counted} settings, the test says {SETTINGS}. For a new one, name the recipe, the benchmark or the "
        "page of docs/ that needs it, or write a constant beside the code; then change SETTINGS."
    )


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words.replace(" ", "_") for words, _ in WRONG])
def test_a_wrong_setting_is_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["quickstart_plain", *words.split()])
    assert str(caught.value) == message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("recipe", "words", "learns"),
    [
        ("qwen3_30b_a3b", "", True),
        ("qwen3_30b_a3b_node", "--rollout.speculation.mode off", False),
        ("qwen3_8b", "--rollout.speculation.drafters suffix", False),
        ("qwen3_8b", "--rollout.speculation.drafters model:2 --rollout.speculation.draft-model x y", False),
        ("qwen3_8b", "--rollout.speculation.mode decoupled --parallel.drafters 1", True),
        ("qwen3_8b", "--distillation.refresh 0", False),
        ("quickstart_plain", "--distillation.refresh 0.03", False),
    ],
)
def test_what_drafts_no_more_is_not_refreshed_either(recipe: str, words: str, learns: bool) -> None:
    """One setting turns speculation off, in a recipe that refreshes its draft model and in the replay of its run."""
    config = load([recipe, *words.split()])
    assert config.drafter_learns == learns
    assert from_json(to_json(config)) == config


def test_a_run_says_what_its_settings_do_in_silence() -> None:
    plain = ("quickstart_plain", "--rollout.stop", "###")
    assert load([*plain, "--rollout.speculation.mode", "off"]).notes(gpu=True) == []
    drafting = load([*plain, "--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "suffix"])
    assert drafting.notes(gpu=False) == [], "there nothing overlaps anyway"
    assert [note.partition(" ")[2][:12] for note in drafting.notes(gpu=True)] == ["rollout.stop"]
    unused = ("--rollout.speculation.draft-model", "DRAFT", "--distillation.refresh", "0.03")
    found = load([*plain, *unused, "--rollout.speculation.mode", "auto"]).notes(gpu=False)
    assert [note.partition(":")[0] for note in found] == ["The draft model DRAFT is not used", "Nothing is refreshed"]


def test_a_run_says_what_is_unused_without_speculation() -> None:
    """In one line, since to compare on and off is usual; and nothing of a recipe that ships so."""
    off = ("--rollout.speculation.mode", "off")
    assert load(["quickstart", *off]).notes(gpu=False) == [
        "With rollout.speculation.mode off these are unused: drafters, window, draft_model."
    ]
    assert load(["qwen3_8b", *off]).notes(gpu=True) == [
        "With rollout.speculation.mode off these are unused: drafters, draft_model, distillation.refresh."
    ]
    [told] = load(["grpo", "--rollout.speculation.cost-table", "costs.json"]).notes(gpu=False)
    assert told == "With rollout.speculation.mode off these are unused: cost_table."
    for name in recipes():
        config = load([name])
        assert config.rollout.speculation.mode != "off" or config.notes(gpu=True) == [], name


def test_the_bound_of_the_agreement_follows_from_the_dtype() -> None:
    for words, bound in (("", 1e-4), ("--model.dtype bfloat16", math.inf)):
        config = load(["grpo", *words.split()])
        assert gap_bound(config.train.max_logprob_gap, config.model.dtype) == bound
    assert gap_bound(0.5, "bfloat16") == 0.5


def test_a_recipe_may_say_of_its_critic_what_nobody_reads() -> None:
    """A setting of the command line that nothing reads is an error; those of a recipe come with it."""
    without = load(["ppo", "--algorithm.advantage", "grpo"])
    assert without.algorithm.critic == load(["ppo"]).algorithm.critic
    assert load(["ppo", "--algorithm.critic.gamma=0.9"]).algorithm.critic.gamma == 0.9
    with pytest.raises(ConfigError, match=r"^--algorithm.critic.gamma: given with algorithm.advantage = rloo"):
        load(["ppo", "--algorithm.critic.gamma=0.9", "--algorithm.advantage", "rloo"])


def test_parameters_that_no_task_has_are_refused_where_they_are_given() -> None:
    """A file was read whole with ``size=100``. Those of a recipe are of its task, in whose place a file is given."""
    files = ["grpo", "--data.train", "a.jsonl", "--data.eval", "b.jsonl"]
    assert load(files).data.train_source.params == {}
    assert load([*files, "--data.params"]).data.params == {}
    for own in ([], ["--data.mix", "mine:rows", "0.5"]):
        with pytest.raises(
            ConfigError, match=r"^data.params: got \{'size': 100\}, expected none without a task. Files"
        ):
            load([*files, *own, "--data.params", "size=100"])
    assert (
        load([*files, "--data.mix", "count_bits", "0.5", "--data.params", "size=100"]).data.mixed_sources[0].size == 100
    )


def float_names(tree: object, name: str = "") -> list[str]:
    """Dotted paths of all settings that take a float, but for such in mappings."""
    found = []
    for field in dataclasses.fields(tree):  # type: ignore[arg-type]
        value, path = getattr(tree, field.name), f"{name}.{field.name}".removeprefix(".")
        found += float_names(value, path) if dataclasses.is_dataclass(value) else []
        found += [path] if field.type == "float" else []
    return found


@pytest.mark.parametrize("name", float_names(load(["quickstart"])))
def test_no_setting_takes_what_is_no_number(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: got nan, expected "):
        load(["quickstart", f"--{name.replace('_', '-')}", "nan"])


def test_values_in_mappings_are_looked_at() -> None:
    config = load(["quickstart"])
    params = dict(config.data.params) | {"max_n": float("inf")}
    data = dataclasses.replace(config.data, params=params)
    with pytest.raises(ConfigError, match=r"data.params.max_n: got inf, expected a finite number"):
        dataclasses.replace(config, data=data)


def test_a_folder_that_exists_can_be_resumed_from(tmp_path: Path) -> None:
    assert load(["quickstart", "--resume", str(tmp_path)]).resume == str(tmp_path)
    assert load(["quickstart", "--resume", "auto", "--train.max-logprob-gap", "inf"]).resume == "auto"


def test_context_parallelism_makes_room_for_longer_responses() -> None:
    """As the recipe says: a micro-batch is spread over its ranks."""
    longer = ["qwen3_30b_a3b", "--rollout.max-new-tokens", "32768", "--parallel.context"]
    config = load([*longer, "4"])
    assert longest_prompt(config, 40_960) == min(40_960 - 2, 4 * 16_384 - 32) - 32_768
    with pytest.raises(
        ConfigError, match=r"got 16384, expected > rollout.max_new_tokens / parallel.context = 32768 / 2"
    ):
        load([*longer, "2"])
