"""A training run: data, steps, evaluation, checkpoints and what is written at the end."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rpfunc import random, tree
from rpfunc.batch import Batch
from rpfunc.errors import CheckpointError
from rpfunc.model import accumulator_dtype
from rpfunc.objectives import sft
from rpfunc.plan import Plan
from rpfunc.runtime import Cpu
from rpfunc.runtime.state import State
from rpfunc.schedule.timeline import Timeline
from rpfunc.stream.value import value
from rpfunc.train import checkpoint
from rpfunc.train.data import held_out_batch, read_bytes, split_held_out, to_tokens, training_batch
from rpfunc.train.folder import RunFolder, read_options
from rpfunc.train.options import TrainOptions, build_optimizer, learning_rate
from rpfunc.train.start import Start, read_start
from rpfunc.train.steps import StepResult, train_steps

Report = Callable[[Mapping[str, Any]], None]
"""Gets each line of the metrics as it is written."""

HELD_OUT = "held_out_bits_per_byte"

DRAWN_STEPS = 3
"""How many of the last steps the timeline shows."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the state, the metrics' held-out bits per byte by step, the last steps' timeline."""

    state: State
    held_out: dict[int, float]
    timeline: Timeline
    interrupted: bool


@dataclass(frozen=True)
class Setting:
    """What the options mean: everything a run needs that does not change."""

    options: TrainOptions
    start: Start
    text: Tensor
    held_out: Batch
    notes: dict[str, str]
    bits_per_nat: float
    """What a loss, in nats per token, is multiplied by to be in bits per byte: of the whole text's bytes per token."""

    def initial_state(self) -> State:
        """The state before the first step, from the seed and the pretrained model alone.

        Trained leaves are copies, in float32 or wider: small updates would vanish beside numbers of 16 bits.
        """
        start = self.start
        fixed, trained = tree.partition(dict(start.params), False if start.frozen is None else start.frozen)
        params = tree.combine(fixed, tree.map(lambda leaf: leaf.to(accumulator_dtype(leaf.dtype), copy=True), trained))
        return State.create(params, build_optimizer(self.options), start.frozen)


def prepare(options: TrainOptions) -> Setting:
    """Reads text and model and checks everything, before anything is written. Raises what says why it cannot work."""
    options.check()
    path = Path(options.data.text)
    text = read_bytes(path)
    start = read_start(options)
    tokens = to_tokens(path, text, start.encode, options.data.rows)
    training, held_out = split_held_out(tokens, options.data.held_out, options.data.rows)
    build_optimizer(options)  # refuses what cannot work
    if options.execution.plan not in (None, "auto"):
        Plan.parse(options.execution.plan).check(start.model.num_layers)
    notes = {"options": msgspec.json.encode(options).decode(), "text_sha256": hashlib.sha256(text).hexdigest()}
    bits_per_nat = len(tokens) / len(text) / math.log(2)
    return Setting(options, start, training, held_out_batch(held_out, options.data.rows), notes, bits_per_nat)


def restore(setting: Setting, folder: RunFolder) -> State:
    """Returns the state of the run's last checkpoint. Raises CheckpointError, also if the text has changed since."""
    notes = checkpoint.read_notes(folder.checkpoint)
    if notes.get("text_sha256") != setting.notes["text_sha256"]:
        raise CheckpointError(
            f"checkpoint {folder.checkpoint}: {setting.options.data.text} is not the text that the run learnt"
        )
    state = checkpoint.load(folder.checkpoint, setting.initial_state(), frozen=setting.start.frozen)
    try:
        began = _without_text(read_options(notes["options"]))
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"checkpoint {folder.checkpoint}: holds no run's options ({error})") from error
    now = _without_text(setting.options)
    differing = sorted(field.name for field in fields(now) if getattr(began, field.name) != getattr(now, field.name))
    if differing:
        raise CheckpointError(
            f"checkpoint {folder.checkpoint}: was made with other options than {folder.options.name} has now: "
            f"{', '.join(differing)}"
        )
    return state


def _without_text(options: TrainOptions) -> TrainOptions:
    return replace(options, data=replace(options.data, text=""))  # it may move; its bytes are compared


def run(
    setting: Setting, state: State, folder: RunFolder, report: Report, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Trains from `state` to the last step; metrics and checkpoints go to `folder`. Donates `state`.

    After each step `stop` is asked; if it says yes, the run ends with a checkpoint of that step. The parameters, and
    all metrics but those of time, are a function of the options and the text alone, however often the run is stopped
    and resumed.
    """
    options = setting.options
    data, execution = options.data, options.execution
    evaluate = _evaluator(setting)
    rate = learning_rate(options)
    held_out = {record["step"]: record[HELD_OUT] for record in folder.records() if HELD_OUT in record}
    key = random.fold_in(random.key(options.seed), "batches")

    def write(record: dict[str, Any]) -> None:
        folder.append(record)
        report(record)

    def look(state: State) -> None:
        held_out[state.step] = evaluate(state)
        write({"step": state.step, HELD_OUT: held_out[state.step]})

    if state.step == 0:
        checkpoint.save(folder.checkpoint, state, setting.notes, frozen=setting.start.frozen)
    if not held_out:
        look(state)
    steps = train_steps(
        state,
        (
            training_batch(setting.text, key, step, data.examples, data.rows)
            for step in range(state.step, options.steps)
        ),
        model=setting.start.model,
        objective=sft(),
        optimizer=build_optimizer(options),
        asynchronous=options.optimizer.asynchronous,
        plan=execution.plan,
        workers=[Cpu(execution.threads, memory_bytes=execution.worker_memory)] * execution.workers,
        microbatches=execution.microbatches,
        chunk=execution.chunk,
        head_chunk=execution.head_chunk,
        recompute=execution.recompute,
        frozen=setting.start.frozen,
        compute_dtype=getattr(torch, options.precision),
        donate=True,
    )
    recent: deque[Timeline] = deque(maxlen=DRAWN_STEPS)
    # the optimizer's own count, by which it finds the rate: a skipped step is none
    num_updates = max((int(count) for count in tree.leaves(state.optimizer_state.shared)), default=state.step)
    before = time.perf_counter()
    interrupted = False
    try:
        for state, result in steps:
            recent.append(result.timeline)
            now = time.perf_counter()
            write(_record(setting, result, rate(num_updates), data.examples * data.rows / (now - before)))
            num_updates += not result.skipped
            before = now
            interrupted = state.step < options.steps and stop()
            if state.step % options.evaluate_every == 0 or state.step == options.steps:
                look(state)
            if state.step % options.checkpoint_every == 0 or state.step == options.steps or interrupted:
                checkpoint.save(folder.checkpoint, state, setting.notes, frozen=setting.start.frozen)
            if interrupted:
                break
    finally:
        steps.close()  # drops the step that is under way
    events = tuple(event for timeline in recent for event in timeline.events)
    return Outcome(state, held_out, Timeline(events, execution.workers), interrupted)


def _evaluator(setting: Setting) -> Callable[[State], float]:
    batch = setting.held_out
    pieces = math.ceil(batch.num_examples / setting.options.data.examples)
    execution = setting.options.execution
    chunk, head_chunk = execution.chunk, execution.head_chunk
    model = setting.start.model
    # whatever the precision, and whatever a frozen base is stored in
    loss = value(model, sft(), microbatches=pieces, chunk=chunk, head_chunk=head_chunk, compute_dtype=torch.float32)
    return lambda state: loss(state.params, batch)[0].item() * setting.bits_per_nat


def _record(setting: Setting, result: StepResult, rate: float, tokens_per_s: float) -> dict[str, Any]:
    optional: dict[str, Any] = {"loss_scale": result.loss_scale} if setting.options.precision == "float16" else {}
    peaks = [peak for peak in result.peak_bytes if peak is not None]
    if peaks:
        optional["worker_peak_bytes"] = max(peaks)
    return {
        "step": result.step,
        "bits_per_byte": result.loss.item() * setting.bits_per_nat,
        "grad_norm": result.grad_norm,
        "learning_rate": rate,
        "skipped": result.skipped,
        "tokens_per_s": round(tokens_per_s, 1),
        "bubble": round(result.timeline.bubble, 4),
        **optional,
    }
