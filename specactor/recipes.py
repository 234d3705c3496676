"""A run is a recipe: a function that returns a `Config`, with dotted overrides.

    load(["quickstart", "--rollout.group-size", "16"])      a module of examples/
    load(["mine/recipe.py:small", "--seed", "1"])           a file, and optionally its function
    load(["runs/mine/config.json"])                         what a run ran with, as planned

Invariants: what is wrong is one `ConfigError` of one line; ``from_json(to_json(config)) == config``; no torch import.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import json
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import tyro

# The one contact with a private name of tyro, whose version is pinned: its public interface can only print a box.
from tyro import _errors as tyro_errors

from specactor.config import Config
from specactor.errors import ConfigError, did_you_mean
from specactor.parallel.failure import tell_launcher

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tree = TypeVar("Tree", bound="DataclassInstance")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
IMPORTS = "imports.json"  # in the folder of a run: from where its own functions and classes are imported
Scalar = str | int | float | bool
# Names in other systems, or their last parts, and the field that is meant.
USUAL_NAMES = {
    "lr": "train.learning_rate",
    "critic.optim.lr": "algorithm.critic.learning_rate",
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "vpp": "parallel.virtual_pipeline",
    "ep": "parallel.expert",
    "etp": "parallel.expert_tensor",
    "cp": "parallel.context",
    "n": "rollout.group_size",
    "val_kwargs.n": "eval.samples",
    "eval.n": "eval.samples",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_generations_per_prompt": "rollout.group_size",
    "train_batch_size": "rollout.prompts_per_step",
    "rollout_batch_size": "rollout.prompts_per_step",
    "max_response_length": "rollout.max_new_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_temperature": "rollout.temperature",
    "gpu_memory_utilization": "rollout.engine.memory_fraction",
    "sglang_mem_fraction_static": "rollout.engine.memory_fraction",
    "rollout_num_gpus_per_engine": "parallel.engine_tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "expert_model_parallel_size": "parallel.expert",
    "context_parallel_size": "parallel.context",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "loss_agg_mode": "algorithm.aggregation",
    "kl_loss_coef": "algorithm.kl_coef",
    "use_kl_loss": "algorithm.kl_coef",
    "use_tis": "algorithm.correction.level",
    "eps_clip": "algorithm.clip_low",
    "eps_clip_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "hf_checkpoint": "model.path",
    "train_files": "data.train",
    "val_files": "data.eval",
    "eval_prompt_data": "data.eval",
    "prompt_data": "data.train",
    "total_training_steps": "train.steps",
    "num_rollout": "train.steps",
    "save_freq": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "max_critic_ckpt_to_keep": "checkpoint.keep",
    "test_freq": "eval.every",
    "eval_interval": "eval.every",
    "experiment_name": "name",
    "tensor_model_parallel_size": "parallel.tensor",
    "max_tokens_per_gpu": "train.tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "train.tokens_per_microbatch",
    "num_steps_per_rollout": "train.updates_per_step",
    "lr_warmup_steps": "train.warmup_steps",
    "lr_warmup_iters": "train.warmup_steps",
    "lr_decay_style": "train.schedule",
    "clip_grad": "train.grad_clip",
    "optimizer_cpu_offload": "train.optimizer_state",
    "over_sampling_batch_size": "rollout.oversample",
    "n_samples_per_eval_prompt": "eval.samples",
    "resume_mode": "resume",
    "default_local_dir": "output_dir",
}
ROWS_NAME_IT = "Each row of data names its verifier, such as module:function."
AS_SAMPLED = "Evaluations are greedy with eval.samples 1; with more they sample as in training."
EVALUATED = "Evaluations are before and after RL, and every eval.every steps; eval.problems 0: none."
SHUFFLED = "Problems are shuffled in every epoch, unless data.order is source."
REFUSED = "A run with a prompt that is too long does not start, and names its row: remove or shorten it."
# Those of no field (section.*: any in that section of theirs), and what is there instead.
NO_SETTING = {
    "val_kwargs.*": AS_SAMPLED,
    "eval_temperature": AS_SAMPLED,
    "eval_top_p": AS_SAMPLED,
    "eval_top_k": AS_SAMPLED,
    "eval_max_response_len": "Evaluations have rollout.max_new_tokens, too.",
    "val_before_train": EVALUATED,
    "skip_eval_before_train": EVALUATED,
    "shuffle": SHUFFLED,
    "rollout_shuffle": SHUFFLED,
    "truncation": REFUSED,
    "filter_overlong_prompts": REFUSED,
    "custom_reward_function.*": ROWS_NAME_IT,
    "reward_model.*": f"There is no reward model. {ROWS_NAME_IT}",
    "critic.*": "A critic has the policy's shape and settings, but for algorithm.critic.learning_rate and its like.",
    "rollout.name": "Rollouts are SGLang's.",
    "rollout.mode": "Rollouts have one mode. That of drafting is rollout.speculation.mode.",
    "entropy_coeff": "There is no entropy bonus.",
    "entropy_coef": "There is no entropy bonus.",
    "max_prompt_length": "A prompt has what train.tokens_per_microbatch leaves beside rollout.max_new_tokens.",
    "rollout_max_prompt_len": "A prompt has what train.tokens_per_microbatch leaves beside rollout.max_new_tokens.",
    "global_batch_size": "A step's rollout.prompts_per_step groups are split into train.updates_per_step updates.",
    "train_global_batch_size": "train.updates_per_step updates have a step's rollout.prompts_per_step groups.",
    "ppo_mini_batch_size": "train.updates_per_step counts updates: rollout.prompts_per_step / ppo_mini_batch_size.",
    "micro_batch_size": "Sequences are packed: use --train.tokens-per-microbatch.",
    "ppo_micro_batch_size_per_gpu": "Sequences are packed: use --train.tokens-per-microbatch.",
    "use_dynamic_bsz": "Sequences are packed: use --train.tokens-per-microbatch.",
    "use_dynamic_batch_size": "Sequences are packed: use --train.tokens-per-microbatch.",
    "nnodes": "That is torchrun's --nnodes.",
    "n_gpus_per_node": "That is torchrun's --nproc-per-node.",
    "rm_type": "Each row of data names its verifier.",
    "custom_rm_path": ROWS_NAME_IT,
    "project_name": "Set WANDB_PROJECT.",
    "wandb_project": "Set WANDB_PROJECT.",
    "apply_chat_template": "Messages go through the model's chat template, a prompt is taken as it is.",
    "total_epochs": "A run has --train.steps steps, and goes through the data as often as they need.",
    "num_epoch": "A run has --train.steps steps, and goes through the data as often as they need.",
}


def recipes() -> dict[str, str]:
    """Return the first line of each recipe's docstring, without importing one."""
    found = {}
    for file in sorted(EXAMPLES.glob("*.py")):
        tree = ast.parse(file.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "recipe" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def usage(prog: str) -> str:
    known = recipes()
    width = max((len(name) for name in known), default=0)
    lines = [
        f"usage: {prog} RECIPE [--key.path value ...]",
        "",
        "RECIPE is a file.py[:function], the config.json of a run, or one of:",
    ]
    lines += [f"  {name:<{width}}  {line}" for name, line in known.items()]
    return "\n".join([*lines, "", f"Every setting of a recipe: {prog} RECIPE --help"])


def load(argv: Sequence[str], *, prog: str = "train_moe.py") -> Config:
    """Return a recipe's config. Raises ConfigError for an unknown recipe or key, or a bad value. ``--help`` prints and
    exits."""
    if argv and argv[0] in ("-h", "--help"):
        print(usage(prog))
        raise SystemExit(0)
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            f"RECIPE: got {argv[0] if argv else 'nothing'}, expected the name of a recipe.\n{usage(prog)}"
        )
    config = override(_build(argv[0]), argv[1:], prog=f"{prog} {argv[0]}")
    begun = Path(config.output_dir, config.name, "checkpoints").is_dir()  # it may go on, from one of its own
    if config.resume not in ("off", "auto") and not begun and not Path(config.resume).is_dir():
        raise ConfigError.at("resume", config.resume, "off, auto or the folder of a checkpoint", "Check the path.")
    return config


def load_or_exit(argv: Sequence[str], *, prog: str = "train_moe.py", quiet: bool = False) -> Config:
    """Exit with 2 on a ConfigError; with `quiet` after rank 0: torchrun ends all at the first exit."""
    try:
        return load(argv, prog=prog)
    except ConfigError as error:
        if quiet:
            time.sleep(3.0)  # rank 0 is still saying what is wrong
        else:
            print(f"error: {error}", file=sys.stderr, flush=True)
            tell_launcher(f"error: {error}")
        raise SystemExit(2) from None


def override(config: Config, argv: Sequence[str], *, prog: str = "train_moe.py") -> Config:
    """Return `config` with ``--key.path value`` pairs applied; in keys '-' and '_' mean the same."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_key_values)
    with one_line_errors(argv, lambda token: _unknown_key(token, config)):
        found = tyro.cli(
            Config,
            prog=prog,
            args=list(argv),
            default=config,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            registry=registry,
        )
    _refuse_unread(found, [word.partition("=")[0] for word in argv])
    return found


def _refuse_unread(config: Config, words: Sequence[str]) -> None:
    """Raise ConfigError for what nothing reads. A recipe may say it: ppo without its critic, or with a user's file."""
    critic = next((word for word in words if word.replace("_", "-").startswith("--algorithm.critic.")), "")
    if critic and config.algorithm.advantage != "gae":
        raise ConfigError(
            f"{critic}: given with algorithm.advantage = {config.algorithm.advantage}, which has no critic. Leave it "
            "out, or use --algorithm.advantage gae."
        )
    if "--data.params" in words and config.data.params and not config.data.has_task:
        raise ConfigError.at(
            "data.params", config.data.params, "none without a task", "Files and functions take none: leave it out."
        )


def to_json(config: Config) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(config)))  # tuples become lists
    return plain


def from_json(plain: Mapping[str, Any]) -> Config:
    """Return the config that `to_json` was given. Raises ConfigError for unknown keys, wrong types and invalid
    settings."""
    try:
        config = _whole(msgspec.convert(plain, Config))
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"config: {error}. Correct the file, or start from a recipe.") from None
    _refuse_unknown(plain, to_json(config), "")
    return config


def keep_imports(run: Path) -> None:
    """Write down from where this process imports what is not installed."""
    installed = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    known = (*installed, EXAMPLES.parent / "launch")
    folders = [Path(place).absolute() for place in sys.path if Path(place).is_dir()]
    own = [str(f) for f in folders if f != EXAMPLES.parent and not any(f.is_relative_to(place) for place in known)]
    run.mkdir(parents=True, exist_ok=True)
    (run / IMPORTS).write_text(json.dumps(own))


def imports_of(run: Path) -> list[str]:
    return list(json.loads((run / IMPORTS).read_text())) if (run / IMPORTS).exists() else []


def _whole(tree: Tree) -> Tree:
    """Set every field on its object: msgspec leaves defaults to the class, unseen by its encoder."""
    changed: dict[str, Any] = {}
    for item in fields(tree):
        part = getattr(tree, item.name)
        if is_dataclass(part) and not isinstance(part, type):
            changed[item.name] = _whole(part)
    return replace(tree, **changed)


def _refuse_unknown(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> None:
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(key, known, "Remove it.", prefix=prefix)
            raise ConfigError(f"config: unknown key {prefix}{key}. {hint}")
        if isinstance(value, Mapping) and isinstance(known[key], Mapping):
            _refuse_unknown(value, known[key], f"{prefix}{key}.")


def _build(name: str) -> Config:
    if name.endswith(".json"):
        return _read_json(Path(name))
    where, _, function_name = name.partition(":")
    module = _module(where)
    function: Callable[[], Config] | None = getattr(module, function_name or "recipe", None)
    if function is None:
        raise ConfigError.at(
            "RECIPE",
            name,
            f"a function {function_name or 'recipe'}() -> Config in {module.__file__}",
            "Name it after a colon.",
        )
    config = function()
    if not isinstance(config, Config):
        raise ConfigError.at(
            "RECIPE", name, f"a function that returns a Config, not {type(config).__name__}", "Correct it."
        )
    return config


def _read_json(file: Path) -> Config:
    _importable(EXAMPLES.parent)
    _importable(Path.cwd())  # a run's own verifiers and drafters were found from where it was started
    try:
        return from_json(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError.at("RECIPE", file, "the config.json of a run", f"It cannot be read: {error}.") from None


def _module(where: str) -> ModuleType:
    """Import a recipe. Its folder, and after all others the one where the run starts, stay on the path for
    ``module:function`` settings: engines' processes have the latter, too, and verifiers' the whole path."""
    _importable(EXAMPLES.parent)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a file there may be named like a library
    if not where.endswith(".py"):
        known = recipes()
        if where in known:
            return importlib.import_module(f"examples.{where}")
        hint = did_you_mean(where, known, "Or give a file.py[:function].")
        raise ConfigError.at("RECIPE", where, f"one of {', '.join(known)}", hint)
    file = Path(where).resolve()
    if not file.is_file():
        raise ConfigError.at("RECIPE", where, "a file that exists", "Check the path.")
    if file.parent == EXAMPLES:
        return importlib.import_module(f"examples.{file.stem}")
    _importable(file.parent)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _key_values(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Read ``--data.params max_n=9999 lazy=true``, which replaces the recipe's whole dict."""
    if info.type != dict[str, Scalar]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=_parse_pairs,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{key}={_show(item)}" for key, item in value.items()],
    )


def _parse_pairs(words: list[str]) -> dict[str, Scalar]:
    pairs: dict[str, Scalar] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise ValueError(f"{word!r} is not KEY=VALUE")
        if re.search(r",\s*[A-Za-z_]\w*=", text):
            raise ValueError(f"{word!r} has several pairs")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = {"True": True, "False": False}.get(text, text)
        pairs[key] = value if isinstance(value, Scalar) else text
    return pairs


def _show(value: Scalar) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def one_line_errors(argv: Sequence[str], unknown: Callable[[str], str]) -> Iterator[None]:

    def reject(event: tyro_errors.ParseErrorEvent) -> NoReturn:
        raise ConfigError(_one_line(event, argv, unknown))

    with tyro_errors.on_parse_error(reject):
        yield


def _one_line(event: tyro_errors.ParseErrorEvent, argv: Sequence[str], unknown: Callable[[str], str]) -> str:
    if isinstance(event, tyro_errors.UnrecognizedArgs):
        return unknown(event.tokens[0])
    if isinstance(event, tyro_errors.MissingArgs):
        missing = [one.arg.lowered.name_or_flags[-1] for one in event.missing_arguments]
        return f"got no {', '.join(missing)}, expected a value. Its meaning: {event.prog} --help"
    argument = getattr(event, "argument", None)
    if argument is None:  # a ConfigError of the tree itself
        return event.message if isinstance(event, tyro_errors.InstantiationFailure) else str(event)
    choices = event.choices if isinstance(event, tyro_errors.InvalidChoice) else ()
    expected = f"one of {', '.join(choices)}" if choices else argument.lowered.metavar
    flag = argument.lowered.name_or_flags[-1]
    key = flag.removeprefix("--").replace("-", "_")
    pairs = "KEY=VALUE" in expected and "," in _given(flag, argv)
    remedy = "Separate pairs by blanks." if pairs else f"Its meaning: {event.prog} --help"
    return f"{key}: got {_given(flag, argv)}, expected {expected}. {remedy}"


def _given(flag: str, argv: Sequence[str]) -> str:
    value = _value_of(flag, argv)
    return "no value" if value is None or value.startswith("--") else repr(value)


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    for word, following in zip(argv, [*argv, None][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag.replace("_", "-"):
            return value if equals else following
    return None


def _unknown_key(token: str, config: Config) -> str:
    if not token.startswith("--"):
        key, equals, value = token.lstrip("+~").partition("=")  # as Hydra has it, and verl
        remedy = _meaning(key, config, f" {value}") if equals else "Put two dashes before a key, one value after it."
        return f"command line: got {token!r}, expected --key.path value. {remedy}"
    key = token.partition("=")[0].removeprefix("--").replace("-", "_")
    owner = next((name for name in _keys(config) if key.startswith(f"{name}.")), None)
    if owner:
        flag = "--" + owner.replace("_", "-")
        return (
            f"unknown setting {token}. Write {flag} {key.removeprefix(owner + '.')}=VALUE, all pairs after one {flag}."
        )
    return f"unknown setting --{key.replace('_', '-')}. {_meaning(key, config)}"


def _meaning(key: str, config: Config, value: str = "") -> str:
    """Return what to do in place of setting the unknown `key`."""
    parts, known = key.split("."), _keys(config)
    above = key.rpartition(".")[0]
    is_ours = any(name.startswith(f"{above}.") for name in known)
    for at in range(len(parts)):  # the longest end first: verl's n is of samples or of an evaluation's
        end = ".".join(parts[at:])
        usual = USUAL_NAMES.get(end, "")
        beside = f"{above}.{usual.rpartition('.')[2]}"
        if usual and (beside in known or "eval" not in parts or "eval" in usual.split(".")):
            return _suggestion([beside if beside in known else usual], value)
        section = f"{parts[at]}.*" if at < len(parts) - 1 and not is_ours else ""
        if told := NO_SETTING.get(end) or NO_SETTING.get(section):
            return told
    return _suggestion(_nearest_keys(key, config), value)


def _suggestion(names: Sequence[str], value: str) -> str:
    return f"Did you mean {' or '.join('--' + n.replace('_', '-') + value for n in names)}?" if names else "See --help."


def _nearest_keys(key: str, config: Config) -> list[str]:
    """Return at most two fields of `config` that are named like `key`: one that looks like it in its own section, or
    very much like it in another. Names of evaluations are not of training's settings."""
    above, _, last = key.rpartition(".")
    known = _keys(config)
    if {"eval", "val"} & {*re.split(r"[._]", key)}:
        known = [name for name in known if "eval" in name.split(".")]
    beside = [name for name in known if name.rpartition(".")[0] == above != ""]
    for names, cutoff in ((beside, 0.6), (known, 0.75)):
        near = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in names], n=1, cutoff=cutoff)
        if near:
            return [name for name in names if name.rpartition(".")[2] in near][:2]
    return []


def _keys(tree: DataclassInstance, prefix: str = "") -> list[str]:
    found: list[str] = []
    for item in fields(tree):
        value = getattr(tree, item.name)
        path = prefix + item.name
        found += _keys(value, f"{path}.") if is_dataclass(value) and not isinstance(value, type) else [path]
    return found
