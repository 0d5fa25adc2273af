"""The options of a training run: a tree of frozen dataclasses, from a TOML file and flags."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from rpfunc import optim
from rpfunc.checks import count_problems, flag_problems, is_count, is_real, is_word, shown
from rpfunc.errors import OptionsError
from rpfunc.models.decoder import DecoderConfig
from rpfunc.models.lora import LoraConfig
from rpfunc.plan import Plan

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class DataOptions:
    """Where the text is and how it is cut."""

    text: str = ""
    """File whose bytes are learnt; with a config, relative to its folder."""
    held_out: float = 0.1
    """Share of the text, at its end, that is never trained on."""
    examples: int = 16
    """Windows in a batch."""
    rows: int = 256
    """Tokens in a window; a model of bytes has one for each byte."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with a warm-up, a cosine decay to a tenth, and clipping by global norm."""

    learning_rate: float = 3e-3
    """The peak, reached after the warm-up."""
    warmup: int = 20
    """Steps of linear warm-up."""
    b1: float = 0.9
    """Share that Adam's mean of gradients keeps."""
    b2: float = 0.95
    """Share that Adam's mean of squared gradients keeps."""
    weight_decay: float = 0.1
    """On matrices only."""
    clip: float = 1.0
    """Largest global gradient norm."""
    asynchronous: Annotated[bool, Parameter(name="async")] = False
    """Update one step behind, beside the next step's gradient, which is of the parameters one step before."""


@dataclass(frozen=True)
class ExecutionOptions:
    """How the gradient is computed: a matter of speed and memory alone."""

    workers: Annotated[int, Parameter(name=("workers", "--workers"))] = 4
    """CPU worker threads."""
    threads: int = 1
    """Intra-op threads of each worker."""
    worker_memory: Annotated[int | None, Parameter(name=("worker-memory", "--worker-memory"))] = None
    """Bytes that a worker may hold: what its tasks make, and parameters that it casts to the precision (frozen ones). A
    step that needs more is refused. None: no limit."""
    microbatches: int = 4
    """Pieces of a batch that go through the stages one by one."""
    chunk: int | None = None
    """Rows worked on at a time; none: whole rows."""
    head_chunk: int | None = None
    """Rows of logits at a time; none: as `chunk`."""
    plan: str | None = None
    """Stages, as in "F0:4 X4:6 B0:2 B2:4"; "auto": from times that the first steps measure; none: from FLOPs."""
    recompute: bool = True
    """Keep only stage inputs between forward and backward."""


@dataclass(frozen=True)
class TrainOptions:
    """Everything that a run depends on. `check` says what cannot work."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    pretrained: str = ""
    """In place of `model`: a model folder of transformers' or a GGUF file (with a config, relative to its folder), or
    "package:" and the name of an installed package that holds a GGUF file."""
    lora: LoraConfig | None = None
    """Adapters of the pretrained model, which alone are trained then; none: all its weights are."""
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    execution: ExecutionOptions = field(default_factory=ExecutionOptions)
    precision: Precision = "float32"
    """What layers compute in. Parameters are updated, and gradients summed, in float32; float16 scales the loss."""
    steps: int = 200
    """Optimizer steps in all."""
    seed: int = 0
    """Of the initial parameters, the batches and dropout."""
    evaluate_every: int = 50
    """Steps between evaluations on the held-out text."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    sample_tokens: int = 300
    """Tokens of text to write at the end."""

    def check(self) -> None:
        """Raises OptionsError listing every value that cannot work."""
        data, optimizer, execution = self.data, self.optimizer, self.execution
        least = {
            "steps": (self.steps, 1),
            "evaluate-every": (self.evaluate_every, 1),
            "checkpoint-every": (self.checkpoint_every, 1),
            "sample-tokens": (self.sample_tokens, 0),
            "data.examples": (data.examples, 1),
            "data.rows": (data.rows, 2),
            "optimizer.warmup": (optimizer.warmup, 0),
            "execution.workers": (execution.workers, 1),
            "execution.threads": (execution.threads, 1),
            "execution.worker-memory": (1 if execution.worker_memory is None else execution.worker_memory, 1),
            "execution.microbatches": (execution.microbatches, 1),
            "execution.chunk": (1 if execution.chunk is None else execution.chunk, 1),
            "execution.head-chunk": (1 if execution.head_chunk is None else execution.head_chunk, 1),
        }
        problems = [problem for name, (found, low) in least.items() for problem in count_problems({name: found}, low)]
        problems += flag_problems(
            {"optimizer.async": optimizer.asynchronous, "execution.recompute": execution.recompute}
        )
        if not is_count(self.seed):
            problems.append(f"seed is {shown(self.seed)}, it must be a whole number")
        if not is_word(self.precision, get_args(Precision)):
            problems.append(f"precision is {shown(self.precision)}, it must be one of {', '.join(get_args(Precision))}")
        if not (is_real(data.held_out) and 0 < data.held_out < 1):
            problems.append(f"data.held-out is {shown(data.held_out)}, it must be between 0 and 1")
        positive = {"learning-rate": optimizer.learning_rate, "clip": optimizer.clip}
        problems += [
            f"optimizer.{name} is {shown(found)}, it must be positive and finite"
            for name, found in positive.items()
            if not (is_real(found) and 0 < found < math.inf)
        ]
        if not data.text:
            problems.append("data.text is not given: name a text file, or a TOML file that does")
        if self.model.vocabulary != 256:
            problems.append(f"model.vocabulary is {self.model.vocabulary}, bytes need 256")
        if self.pretrained and self.model != DecoderConfig():
            problems.append(f"model is given and pretrained is {self.pretrained!r}, which has a shape of its own")
        if self.lora is not None and not self.pretrained:
            problems.append("lora is given without pretrained: adapters stand on trained weights")
        if problems:
            raise OptionsError.listing("options", problems)
        if execution.plan not in (None, "auto"):
            Plan.parse(execution.plan)


def learning_rate(options: TrainOptions) -> optim.Schedule:
    """Returns the learning rate of each step: a linear warm-up, at most to the last step, then a cosine to a tenth."""
    peak = options.optimizer.learning_rate
    warmup = min(options.optimizer.warmup, options.steps - 1)
    return optim.warmup_cosine(peak / max(1, warmup), peak, warmup, options.steps, end_value=peak / 10)


def build_optimizer(options: TrainOptions) -> optim.Transformation:
    """Returns clipping by global norm, then AdamW, with weight decay on matrices only."""
    given = options.optimizer
    return optim.chain(
        optim.clip_by_global_norm(given.clip),
        optim.adamw(
            learning_rate(options),
            b1=given.b1,
            b2=given.b2,
            weight_decay=given.weight_decay,
            mask=lambda path, leaf: leaf.dim() >= 2,
        ),
    )
