"""What the layers of well-known decoders cost, found from their shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rpfunc.checks import count_problems, rate_problems
from rpfunc.errors import PlanError
from rpfunc.plan.costs import LayerCost

MOST_LAYERS = 10_000
"""Layers that a decoder may have: more is a mistake."""


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a decoder: RMSNorm, grouped-query attention, gated MLP (arXiv 2002.05202), dense or of experts.

    name            that `decoder_shape` finds it by
    layers          transformer layers; embedding and head come on top
    width           of the residual stream
    heads, kv_heads query heads, and key and value heads
    head_size       of a query, key or value
    mlp_width       of the MLP's, or of one expert's, hidden layer
    vocabulary      different tokens
    tied            the head is the embedding
    experts         MLPs a layer of which a router picks `active_experts` for each row; 1 is a dense MLP, no router
    qk_norm         norms on each query and key head
    bias            biases on all products of a transformer layer, router included
    sinks           one learned score a head that takes part in the softmax (arXiv 2309.17453)
    window          rows that a row sees, itself included, in the first and every second layer; None: all before it

    Raises PlanError listing what cannot be.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    vocabulary: int
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    qk_norm: bool = False
    bias: bool = False
    sinks: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        def named(*names: str) -> dict[str, object]:
            return {name: getattr(self, name) for name in names}

        heads, experts = named("heads", "kv_heads"), named("experts", "active_experts")
        problems = count_problems(named("layers"), most=MOST_LAYERS)
        problems += count_problems(named("width") | heads | named("head_size", "mlp_width", "vocabulary") | experts)
        if not count_problems(heads) and self.heads % self.kv_heads:
            problems.append(f"heads is {self.heads}, it must be a multiple of kv_heads {self.kv_heads}")
        if not count_problems(experts) and self.experts < self.active_experts:
            problems.append(f"experts is {self.experts}, it must be at least active_experts {self.active_experts}")
        if self.window is not None:
            problems += [f"{problem}, or None" for problem in count_problems({"window": self.window})]
        if problems:
            raise PlanError.listing(f"decoder {self.name!r}", problems)

    @property
    def layer_parameters(self) -> int:
        """How many numbers a transformer layer has, all experts included."""
        q_width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = 2 * self.width * (q_width + kv_width)
        expert = 3 * self.width * self.mlp_width
        router = self.width
        if self.bias:
            attention += q_width + 2 * kv_width + self.width
            expert += 2 * self.mlp_width + self.width
            router += 1
        mlp = expert if self.experts == 1 else self.experts * (expert + router)
        norms = 2 * self.width + 2 * self.head_size * self.qk_norm
        return attention + mlp + norms + self.heads * self.sinks

    @property
    def num_parameters(self) -> int:
        """How many numbers the model has, a tied table counted once."""
        tables = (1 if self.tied else 2) * self.vocabulary * self.width
        return self.layers * self.layer_parameters + tables + self.width

    def layer_flops(self, rows: int, window: int | None = None) -> int:
        """Returns 2 x the multiply-adds of a transformer layer's products on one sequence, forward.

        Attention counts the pairs of rows that see each other, half a square where all see all before. Norms,
        activations and the router (0.2% of a layer) count nothing.
        """
        seen = rows if window is None else min(window, rows)
        projections = 2 * self.width * (self.heads + self.kv_heads) * self.head_size
        mlp = self.active_experts * 3 * self.width * self.mlp_width
        pairs_twice = 2 * rows * seen - seen * seen
        return 2 * rows * (projections + mlp) + 2 * pairs_twice * self.heads * self.head_size


DECODERS = (
    DecoderShape("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, tied=True, qk_norm=True),
    DecoderShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
    DecoderShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True),
    DecoderShape(
        "gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088,
        experts=32, active_experts=4, bias=True, sinks=True, window=128,
    ),
    DecoderShape(
        "qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151936, experts=128, active_experts=8, qk_norm=True
    ),
)  # fmt: skip
"""The five models that RoundPipe (arXiv 2604.27085) is measured on. Source: their published configurations."""


def decoder_shape(name: str) -> DecoderShape:
    """Returns the shape of that name, in any case of letters. Raises PlanError listing the names.

    >>> decoder_shape("Llama-3.1-8B").num_parameters
    8030261248
    """
    for shape in DECODERS:
        if shape.name == name.lower():
            return shape
    raise PlanError(f"decoder: there is none named {name!r}, there are {', '.join(shape.name for shape in DECODERS)}")


def decoder_costs(
    shape: DecoderShape,
    rows: int,
    examples: int = 1,
    *,
    flops_per_s: float,
    parameter_bytes_each: float = 2,
    gradient_bytes_each: float = 2,
    activation_bytes_each: float = 2,
) -> list[LayerCost]:
    """Returns what each layer costs for a microbatch of `examples` sequences of `rows`: embedding, layers, head.

    Times are in seconds. Each of the two gradients takes as long as the forward; the embedding, a look-up, takes none.
    All experts are moved, the active ones compute. A tied table is moved with the embedding and with the head. What
    backward keeps of each row:
    - transformer layer: the inputs of all products, queries, keys, values, and both halves of the gated MLP:
      2 width + 2 (heads + kv_heads) head_size + active_experts (width + 3 mlp_width)
    - head: the normed row and the cotangents of its logits, width + vocabulary; what it hands on are its logits.
    Raises PlanError for numbers that cannot be. Source: own.

    >>> costs = decoder_costs(decoder_shape("llama-3.1-8b"), 2048, flops_per_s=165e12)
    >>> round(costs[-1].forward / costs[1].forward, 2)
    2.32
    """
    problems = count_problems({"rows": rows, "examples": examples}) + rate_problems({"flops_per_s": flops_per_s})
    if problems:
        raise PlanError.listing("decoder", problems)

    def cost(flops: float, parameters: int, out_width: int, kept_width: int) -> LayerCost:
        return LayerCost.of_forward(
            examples * flops / flops_per_s,
            parameter_bytes=parameters * parameter_bytes_each,
            gradient_bytes=parameters * gradient_bytes_each,
            output_bytes=examples * rows * out_width * activation_bytes_each,
            residual_bytes=examples * rows * kept_width * activation_bytes_each,
        )

    width, vocabulary, table = shape.width, shape.vocabulary, shape.width * shape.vocabulary
    attention_width = 2 * (shape.heads + shape.kv_heads) * shape.head_size
    kept_width = 2 * width + attention_width + shape.active_experts * (width + 3 * shape.mlp_width)
    layers = [
        cost(shape.layer_flops(rows, None if index % 2 else shape.window), shape.layer_parameters, width, kept_width)
        for index in range(shape.layers)
    ]
    head = cost(2 * rows * table, table + width, vocabulary, width + vocabulary)
    return [cost(0, table, width, 0), *layers, head]


def unit_costs(shape: DecoderShape, rows: int = 2048) -> list[LayerCost]:
    """Returns costs in which the forward of a transformer layer takes 1, and nothing has a size.

    The cost model for research on schedules: all layers are the same (windows are left out), backward takes 3, the
    head what it takes relative to a layer, the embedding nothing.

    >>> [round(cost.forward, 2) for cost in unit_costs(decoder_shape("gpt-oss-20b"))[-2:]]
    [1.0, 4.31]
    """
    full = replace(shape, window=None)
    costs = decoder_costs(full, rows, flops_per_s=full.layer_flops(rows))
    return [LayerCost.of_forward(cost.forward) for cost in costs]
