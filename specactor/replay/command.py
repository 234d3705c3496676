"""The commands ``specactor replay`` and ``specactor diff``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch
from rich import markup
from rich.console import Console

from specactor import __version__
from specactor.config import Config
from specactor.config.rollout import SAME_BITS, guarantee
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.errors import ConfigError, DataError
from specactor.metrics import read_metrics
from specactor.recipes import EXAMPLES, from_json, imports_of
from specactor.replay import records
from specactor.replay.audit import noise_of
from specactor.replay.compare import Finding, Noise, first_difference
from specactor.replay.records import SampleRecord, StepRecord
from specactor.report import PAGE, POLICY, STYLE, Rows, table
from specactor.run_folder import Replay, RunFolder

TRAIN = EXAMPLES.parent / "launch" / "train_moe.py"


def replay(argv: list[str], console: Console) -> int:
    """Run steps of a run again, and return the exit code, as `cli.replay` says."""
    options, overrides = _parser().parse_known_args(argv)
    source = _run(options.run).resolve()
    recorded, config = records.read(records.file_of(source, options.step)), config_of(source)
    what = Replay(step=options.step, alone=(*options.group, *options.sample))
    check(what, config, recorded)
    if "--model.path" not in overrides:
        check_model(config)
    start = _checkpoint_before(source, options.step)
    imports = imports_of(source)
    for folder in (folder for folder in imports if not Path(folder).is_dir()):
        told = "is gone. If the run imported functions or classes of yours from it, put it back, or them on PYTHONPATH."
        console.print(f"{folder}: {told}", soft_wrap=True, markup=False)
    target = RunFolder(root=source.with_name(f"{source.name}.replay-{options.step:06}"))
    if target.root.exists() and not target.replay.exists():
        raise ConfigError.at("replay", target.root, "no folder, or that of a replay", "Move it away.")
    shutil.rmtree(target.root, ignore_errors=True)
    target.root.mkdir()
    target.replay.write_text(json.dumps(asdict(what)))
    with suppress(FileNotFoundError):  # older runs have none
        shutil.copy(RunFolder(root=source).base, target.base)
    first, was = 1 if start is None else _step_of(start) + 1, _ranks(source)
    nproc = options.nproc or was
    console.print(_plan(source, what, first), soft_wrap=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(nproc), str(TRAIN), str(source / "config.json")),
        *("--name", target.root.name, "--output-dir", str(source.parent), "--resume", str(start or "off")),
        *("--checkpoint.every", "0", "--tracking.wandb", "off", "--tracking.record", "full"),
        *("--rollout.audit", "off", *overrides),  # which would end it at the fault that is looked for
    ]
    where = os.pathsep.join([*imports, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": where}
    code = subprocess.run(command, env=variables, check=False).returncode
    if code:
        raise DataError(f"replay: torchrun ended with {code}, expected 0. What it said stands above.")
    promise = _guarantee(config) + ("" if nproc == was else f"; {nproc} ranks train as {was} did but for rounding")
    return _say(source, target.root, console, promise=promise)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specactor replay", add_help=False, allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--group", nargs="+", default=[])
    parser.add_argument("--sample", nargs="+", default=[])
    parser.add_argument("--nproc", type=int)
    return parser


def diff(argv: list[str], console: Console) -> int:
    """Compare two runs, and return the exit code, as `cli.diff` says."""
    parser = argparse.ArgumentParser(prog="specactor diff", add_help=False, allow_abbrev=False)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    return _say(_run(options.a), _run(options.b), console, out=options.out)


def _run(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError.at("RUN", str(folder), "the folder of a run, for example runs/quickstart", "No such run.")
    return folder


def check(what: Replay, config: Config, recorded: StepRecord) -> None:
    oversample = config.rollout.oversample
    if oversample > 1 and config.algorithm.dynamic_sampling == "off":  # else the first in the order of the data count
        raise ConfigError.at("rollout.oversample", oversample, "1", "Which groups are complete first is up to chance.")
    if not recorded.samples:
        raise ConfigError.at("--step", what.step, "a step that sampled", "Step 0 has weights alone.")
    if not what.alone:
        return
    if config.algorithm.dynamic_sampling != "off":
        raise ConfigError.at(
            "--group and --sample", what.alone, "none with algorithm.dynamic_sampling", "Replay the whole step."
        )
    known = {f"{s.group}.{s.sample}" for s in recorded.samples}
    groups = sorted({s.group for s in recorded.samples})
    for name in what.alone:
        if name not in known and name not in map(str, groups):
            raise ConfigError.at(
                "--group and --sample",
                name,
                f"a group of {groups[0]}..{groups[-1]}, or a response of one, as {groups[0]}.0",
                "The step recorded no other.",
            )


def config_of(run: Path) -> Config:
    """Read a run's config. Raises DataError where this version cannot."""
    try:
        return from_json(json.loads((run / "config.json").read_text()))
    except (OSError, ValueError) as error:
        wrote = {of.libraries.get("specactor") for step in records.steps_of(run)[-1:] for of in _read(run, [step])}
        told = f", written by specactor {wrote.pop()}; this is {__version__}" if wrote else ""
        raise DataError(
            f"{run}: got no config.json that can be read ({error}){told}. "
            "Give the folder of a run, to the version that wrote it."
        ) from error


def check_model(config: Config) -> None:
    if config.model.tiny is None and not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError.at(
            "model.path", config.model.path, "the model's folder", "Put it back, or name its copy with --model.path."
        )


def _checkpoint_before(run: Path, step: int) -> Path | None:
    found = [path for path in (run / "checkpoints").glob("step-[0-9]*") if path.suffix != ".tmp"]
    return max((path for path in found if _step_of(path) < step), key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _ranks(run: Path) -> int:
    return max((len(records.read(records.file_of(run, step)).weights) for step in records.steps_of(run)[:2]), default=1)


def _plan(run: Path, what: Replay, first: int) -> str:
    seconds = [
        sum(float(value) for name, value in line.items() if name.startswith("time/") and value is not None)
        for line in read_metrics(run)
        if first <= int(str(line["step"])) <= what.step
    ]
    steps = f"steps {first} to {what.step}" if first < what.step else f"step {first}"
    start = "the start, with its warm-up" if first == 1 else f"the checkpoint of step {first - 1}"
    alone = f", of step {what.step} {', '.join(what.alone)} alone" if what.alone else ""
    if first == 1 and what.step > 1:
        start += ", since no checkpoint before it is kept (--checkpoint.keep and --checkpoint.every keep more)"
    return f"{steps} from {start}{alone}; {sum(seconds):.0f} s in the run, and the start of the engines"


def _guarantee(config: Config) -> str:
    gpu = torch.cuda.is_available()
    _, promise = guarantee(config.rollout.engine, gpu=gpu, dtype=config.model.dtype)
    if promise == SAME_BITS:
        return "same bits (float32 on CPUs), on any number of engines, with or without speculation"
    return "same law; where two tokens score within rounding of each other, the other one may be emitted"


def _say(a: Path, b: Path, console: Console, *, promise: str = "", out: Path | None = None) -> int:
    """Print where two runs differ first, and write a page of it."""
    shared = sorted({*records.steps_of(a)} & {*records.steps_of(b)})
    if not shared:
        raise DataError(
            f"{a}, {b}: got records of no common step, expected at least one. "
            "Runs keep them with tracking.record sampled or full."
        )
    ours, theirs = (_read(run, shared) for run in (a, b))
    config = config_of(a)
    noise = noise_of(config.rollout)
    found = first_difference(ours, theirs, noise=noise)
    if promise:
        console.print(f"guarantee: {promise}", soft_wrap=True)
    file = out or b / "diff.html"
    if found is None:
        if out is None:
            file.unlink(missing_ok=True)  # of an earlier comparison
        places = [{(s.group, s.sample) for s in record.samples} for record in theirs]
        console.print(
            f"equal: steps {shared[0]} to {shared[-1]}, {sum(map(len, places))} responses: prompts, seeds, tokens, "
            "log-probabilities, scores, rewards, data state, and where they were learned from, advantages, losses, "
            "weights and optimizer",
            soft_wrap=True,
        )
        return 0
    _print(found, console)
    page = diff_page(found, (a.name, b.name), text_of(config), noise)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{file}: cannot be written ({error.strerror}). specactor diff {a} {b} --out FILE puts the page elsewhere."
        ) from error
    console.print(f"page: {file}", soft_wrap=True, markup=False)
    return 1  # the exit code where two runs differ


def _read(run: Path, steps: Sequence[int]) -> list[StepRecord]:
    return [records.read(records.file_of(run, step)) for step in steps]


def _print(found: Finding, console: Console) -> None:
    evidence = (f"  {text}" for text in found.evidence)
    for text in (f"differ at step {found.step}: {found.where}", f"cause: {found.cause}", *evidence):
        console.print(markup.escape(text), soft_wrap=True)


MARK = "mark { background: #f4c7c3; } .after { color: #8a93a0; } pre { margin: .3rem 0; }"

Text = Callable[[Sequence[int]], str]  # token ids -> what they say


def text_of(config: Config) -> Text:
    """Return the run's decoding of token ids; as numbers where its tokenizer is gone."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(config.model.path)
        if config.model.tiny is not None:
            folder = Path(scratch)
            make_char_tokenizer(folder)
        try:
            tokenizer = load_tokenizer(folder)
        except ConfigError:
            return lambda ids: "".join(f"{token} " for token in ids)
    return lambda ids: str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))


def diff_page(found: Finding, names: tuple[str, str], text: Text, noise: Noise | None) -> str:
    title = f"{names[0]} and {names[1]}: step {found.step}"
    facts = table("Where they differ", [("step", str(found.step)), ("where", found.where), ("cause", found.cause)])
    evidence = "".join(f"<p>{escape(line)}</p>" for line in found.evidence)
    cards = f'{facts}<div class="card"><b>Evidence</b>{evidence}</div>'
    if found.pair is not None:
        cards += _responses(found, names, text, noise)
    body = f'<header><h1>{escape(title)}</h1></header>\n<div class="grid">{cards}</div>'
    return PAGE.format(policy=POLICY, title=escape(title), style=STYLE + MARK, body=body)


def _responses(found: Finding, names: tuple[str, str], text: Text, noise: Noise | None) -> str:
    assert found.pair is not None
    kept = next((s for s in found.pair if s.whole), None)
    if kept is None:
        return '<div class="card wide">Neither run kept the response whole; tracking.record full keeps all.</div>'
    prompt = escape(text(kept.prompt_ids.tolist()))
    cards = f'<div class="card wide"><b>Prompt</b> <small>{kept.prompt_len} tokens</small><pre>{prompt}</pre></div>'
    for name, sample in zip(names, found.pair, strict=True):
        about = f"{sample.num_tokens} tokens, score {sample.score:g}, advantage {sample.advantage:+.3f}"
        shown = _marked(sample, found.token, text) if sample.whole else "not kept whole"
        cards += f'<div class="card"><b>{escape(name)}</b> <small>{about}</small><pre>{shown}</pre></div>'
    if found.token is not None:
        cards += table("Tokens around the place", _around(found.pair, found.token, names, text, noise))
    return cards


def _marked(sample: SampleRecord, at: int | None, text: Text) -> str:
    ids = sample.token_ids.tolist()
    if at is None:
        return escape(text(ids))
    before, token, after = (escape(text(part)) for part in (ids[:at], ids[at : at + 1], ids[at + 1 :]))
    return f'{before}<mark>{token or "(end)"}</mark><span class="after">{after}</span>'


def _around(
    pair: tuple[SampleRecord, SampleRecord], at: int, names: tuple[str, str], text: Text, noise: Noise | None
) -> Rows:
    rows: Rows = [("token", *(f"{name}: {what}" for name in names for what in ("text", "log-prob", "with noise")))]
    for i in range(max(0, at - 6), at + 7):
        cells: list[str] = []
        for sample in pair:
            if i >= len(sample.token_ids):
                cells += ["-", "-", "-"]
                continue
            token, logprob = int(sample.token_ids[i]), float(sample.logprob_values[i])
            drawn = "-" if noise is None else f"{logprob + noise(sample.seed, sample.prompt_len + i, token):+.4f}"
            cells += [f"{text([token])!r} ({token})", f"{logprob:.6f}", drawn]
        rows.append((f"{i}{' differs' if i == at else ''}", *cells))
    return rows
