"""A decoder described as data: everything an executor must know of a model, but its weights.

`families.py` makes a spec from a Hugging Face config; `torch_decoder.py` builds a module from it. A field is added here
when a family needs it (attention sinks, expert routing), with a default that leaves the families before it unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from maitred.core.errors import CheckpointError

SWIGLU_SLOPE = 1.702  # of Activation.CLAMPED_SWIGLU


class NormPlacement(Enum):
    """Places at which a layer's two parts (attention and MLP) are normalised; x is the residual stream."""

    PRE = "pre"  # x + part(norm(x)): Llama
    POST = "post"  # x + norm(part(x)): OLMo 2
    BOTH = "both"  # x + norm(part(norm(x))): Gemma 2 and 3
    GLM4 = "glm4"  # the same, under names of its own in the checkpoint: GLM-4


class QKNorm(Enum):
    """RMS norm of queries and keys before rope."""

    NONE = "none"
    PER_HEAD = "per_head"  # over each head's values, one weight for all heads: Qwen3, Gemma 3
    FULL_WIDTH = "full_width"  # over all heads at once: OLMo 2


class Activation(Enum):
    SILU = "silu"
    GELU = "gelu"  # exact, by erf
    GELU_TANH = "gelu_tanh"  # tanh approximation
    CLAMPED_SWIGLU = "clamped_swiglu"  # of both ways: (up + 1) * gate * sigmoid(1.702 gate), clamped first: gpt-oss


class RopeType(Enum):
    """Rule by which rotary frequencies are stretched to a longer context; `rope.py` has the formulas."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LONGROPE = "longrope"
    LLAMA3 = "llama3"
    PROPORTIONAL = "proportional"  # the whole head, of which the slower pairs stand still


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of a layer. Fields that a type does not use keep their defaults."""

    rope_type: RopeType
    theta: float
    dim: int
    """The first values of a head that are rotated; an odd count (partial rotary) rotates one more."""
    num_moving: int = 0
    """Pairs that `proportional` turns."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context before stretching. For `dynamic` and `longrope` the frequencies depend on whether the served context
    (`max_model_len`) is longer than this."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    """Values 2i and 2i + 1 are a pair (GLM-4), instead of i and i + dim / 2."""
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + query_beta * ln(1 + p // original_max_position_embeddings)."""

    @property
    def num_frequencies(self) -> int:
        return (self.dim + 1) // 2


class Scoring(Enum):
    """Rule by which a router's logits become scores, by which experts are chosen and weighted."""

    SOFTMAX = "softmax"  # over all experts
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"  # over those with the largest logits: gpt-oss
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedSpec:
    """An MLP of experts, each gated: a token's is the weighted sum of those that its router chooses."""

    num_experts: int
    num_active: int
    """Experts of a token."""
    width: int
    """Values between an expert's gate_up and its down."""
    scoring: Scoring = Scoring.SOFTMAX
    correction_bias: bool = False
    """A bias of each expert is added to its score for the choice alone."""
    num_groups: int = 1
    """Experts are chosen from the best `num_active_groups` of so many groups; a group counts by the sum of its
    `best_of_group` best scores."""
    num_active_groups: int = 1
    best_of_group: int = 2
    normalized: bool = False
    """Weights of a token are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights."""
    router_bias: bool = False
    expert_bias: bool = False
    shared_width: int = 0
    """Width of the expert that every token has beside those; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of one more logit (Qwen2-MoE)."""
    beside_dense: bool = False
    """The shared expert is a dense MLP: both have norms of their own, before and behind, and what they give together is
    normed once more. The router reads the stream, normed by one of its own and over sqrt(hidden_size), and weights are
    multiplied by a number of each expert (Gemma 4)."""
    interleaved: bool = False
    """A checkpoint with one tensor for all experts has rows of gate and up in turn (gpt-oss); only the weight map
    differs."""


BESIDE = {
    "router_norm": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
}
"""Vectors of `RoutedSpec.beside_dense`, and their names in the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """A gated delta rule behind a short convolution (arXiv:2412.06464): each value head has a matrix
    [key_dim, value_dim] that every token changes. A key head serves several value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens that the convolution sees, the newest included."""
    grouped: bool = False
    """The checkpoint has q, k, v and z of a key head side by side (Qwen3-Next); only the weight map differs."""
    tiled: bool = False
    """Value heads take key heads in turn (GGUF files of Qwen3.5); else consecutive ones have the same."""

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def input_width(self) -> int:
        """Values that a token's input becomes: channels, the output's gate z, and two numbers of each value head, of
        which become beta and the decay."""
        return self.num_channels + self.value_width + 2 * self.num_value_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """A request's state: the convolution's last inputs, and the matrices."""
        return (self.conv_width - 1, self.num_channels), (self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def state_values(self) -> int:
        """Numbers of a request's state."""
        return sum(_product(shape) for shape in self.state_shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form: all heads share one key a token, of
    `rope_dim` rotated values and then `rank` latent ones, which are the token's value too."""

    rank: int
    rope_dim: int
    key_dim: int
    """Values of a head's query that are not rotated; they are multiplied to `rank` of them."""
    value_dim: int
    """Values that the `rank` ones which a head attended to are multiplied to."""
    query_rank: int = 0
    """Values between the two matrices of queries; 0: there is one matrix."""
    norm_eps: float = 1e-6
    """Of the norms of latent values and between the queries' matrices, whatever the model's own is."""

    @property
    def head_dim(self) -> int:
        return self.rope_dim + self.rank

    @property
    def query_dim(self) -> int:
        """Values of a head's query before they are multiplied."""
        return self.key_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Properties that may differ from one layer to the next."""

    attention: RecurrentSpec | LatentSpec | None = None
    """None: softmax over the tokens before. Layers that are not recurrent are all latent, alike, or none is."""
    window: int | None = None
    """Sliding window in tokens: position p attends to (p - window, p]; None attends to all before it."""
    rope: RopeSpec | None = None
    """None leaves positions out (NoPE, arXiv:2305.19466)."""
    heads: tuple[int, int] | None = None
    """K/V heads, and the size of a head, where they are not the decoder's."""
    keys_as_values: bool = False
    """Values are the keys before norm and rope: the checkpoint has one matrix for both."""
    kv_of: int | None = None
    """Keys and values are those of this earlier layer; there are queries alone."""
    mlp: RoutedSpec | int | None = None
    """Routed experts, or a dense MLP of this width; None: of the decoder's `intermediate_size`."""

    @property
    def recurrent(self) -> RecurrentSpec | None:
        return self.attention if isinstance(self.attention, RecurrentSpec) else None

    @property
    def latent(self) -> LatentSpec | None:
        return self.attention if isinstance(self.attention, LatentSpec) else None

    @property
    def routed(self) -> RoutedSpec | None:
        return self.mlp if isinstance(self.mlp, RoutedSpec) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What BERT's kind has beside a decoder (arXiv:1810.04805): tokens see all of their request, those behind them too;
    vectors of a token's position and type are added to its embedding; layer norms stand behind each addition to the
    residual stream; the MLP has no gate, and there is no output matrix. All matrices have biases."""

    num_positions: int
    """Rows of the embedding of positions."""
    first_position: int = 0
    """Row of a prompt's first token."""
    num_types: int = 1
    """0: the model has none (DistilBERT)."""


class AttentionCall(NamedTuple):
    """One call of attention in a module of transformers."""

    module: str  # its part that attends
    place: int  # of its keys and values in the KV cache
    writes: bool  # they are its own, not another's that it reads


class ModuleSpec(NamedTuple):
    """transformers' own module (`transformers_module.py`), where it computes the model."""

    num_parameters: int
    calls: tuple[AttentionCall, ...]
    is_even: bool  # keys and values have the decoder's heads and head size; else those are one as wide as the widest
    identity: str  # of the config and of transformers' version


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One decoder-only transformer with gated MLPs: down(act(gate(x)) * up(x))."""

    architecture: str
    """Hugging Face name, e.g. LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    """Context in tokens that the checkpoint claims."""
    norm_eps: float
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_offset: float = 0.0
    """Added to every norm's stored weight: 1 for Gemma, which stores w - 1."""
    qk_norm: QKNorm = QKNorm.NONE
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    """The output matrix is the embedding."""
    output_gate: bool = False
    """What attention gives is multiplied by the sigmoid of as many values, which are rows of `qkv` behind v
    (Qwen3-Next)."""
    attention_sinks: bool = False
    """Each head has a logit that only adds to the softmax's denominator (gpt-oss)."""
    value_norm: bool = False
    """Values of each head are normalised, without weights (Gemma 4)."""
    per_layer_width: int = 0
    """Values that each layer has of its token beside the residual stream: (embedding + normed projection of the
    stream's beginning) / sqrt(2); after its MLP it adds norm(input(act(input_gate(stream)) * them)) (Gemma 4)."""
    layer_scales: bool = False
    """What a layer leaves on the residual stream is multiplied by a number of its own (Gemma 4)."""
    activation_limit: float = 0.0
    """Clamps gate and up of `Activation.CLAMPED_SWIGLU`."""
    num_mtp_layers: int = 0
    """Layers behind the decoder's that the checkpoint carries for drafting; they are no part of it."""
    fused_weights: bool = False
    """The checkpoint stores q, k, v as one matrix and gate, up as one (Phi-3); only the weight map differs."""
    fused_gate_up: bool = False
    """The same of gate and up alone (GLM-4)."""
    attention_scale: float
    """Multiplies q.k; 1/sqrt(head_dim) for Llama."""
    attention_softcap: float | None = None
    """c: q.k becomes c * tanh(q.k / c) before the mask (Gemma 2)."""
    logit_softcap: float | None = None
    """The same for the final logits."""
    embedding_scale: float = 1.0
    """Multiplies embeddings, rounded to the weights' dtype."""
    residual_scale: float = 1.0
    """Multiplies what each part adds to the residual stream (Granite)."""
    logit_scale: float = 1.0
    """Multiplies the final logits, before the softcap."""
    encoder: EncoderSpec | None = None
    """The model is an encoder."""
    module: ModuleSpec | None = None
    """Another module computes the model: `layers` are those that keep keys and values, and attention alone is told."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    def at(self, layer: int) -> DecoderSpec:
        """The same with the heads of a layer."""
        heads = self.layers[layer].heads
        return self if heads is None else replace(self, num_kv_heads=heads[0], head_dim=heads[1])

    @property
    def kv_heads(self) -> list[tuple[int, int]]:
        """K/V heads and their size of each layer that keeps keys."""
        return [self.layers[i].heads or (self.num_kv_heads, self.head_dim) for i in self.kv_layers]

    @property
    def is_uneven(self) -> bool:
        """Layers keep keys and values of unlike heads."""
        return len(set(self.kv_heads)) > 1

    @property
    def widest_keys(self) -> int:
        """Values of the keys of a token in the layer that has most."""
        return max(heads * size for heads, size in self.kv_heads)

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Rows of a softmax layer's `qkv`."""
        return self.q_width * (1 + self.output_gate) + 2 * self.kv_width

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values; their places here are those in the KV cache."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrent is None and layer.kv_of is None)

    @property
    def latent(self) -> LatentSpec | None:
        return self.layers[self.kv_layers[0]].latent

    @property
    def latent_rank(self) -> int:
        """Values of a key, its last ones, that are the value too; 0: values stand beside keys."""
        return self.latent.rank if self.latent is not None else 0

    @property
    def attended_width(self) -> int:
        """Values that attention gives for a token, of all heads."""
        return self.num_heads * (self.latent_rank or self.head_dim)

    def kv_values_per_token(self) -> int:
        """Numbers the KV cache holds for one token, keys and values of all layers that have them."""
        return sum((1 if self.latent_rank else 2) * heads * size for heads, size in self.kv_heads)

    @property
    def is_routed(self) -> bool:
        """Whether some layers have experts."""
        return any(layer.routed is not None for layer in self.layers)

    @property
    def has_state(self) -> bool:
        """Some layers are recurrent: a request has a slot of states beside its KV blocks."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of a request's states, all layers', in float32."""
        return 4 * sum(layer.recurrent.state_values for layer in self.layers if layer.recurrent is not None)

    def inner_width(self, layer: int) -> int:
        """Values between gate_up and down of a layer's dense MLP; 0 where it is routed."""
        mlp = self.layers[layer].mlp
        return 0 if isinstance(mlp, RoutedSpec) else self.intermediate_size if mlp is None else mlp

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The distinct `inner_width`s of all layers, shared experts' included, ascending."""
        shared = {layer.routed.shared_width for layer in self.layers if layer.routed is not None}
        return tuple(sorted((shared | {self.inner_width(i) for i in range(self.num_layers)}) - {0}))

    def num_parameters(self) -> int:
        """Weights as held in memory; tied embeddings count once."""
        return self.module.num_parameters if self.module else sum(map(_product, parameter_shapes(self).values()))

    def num_active_parameters(self) -> int:
        """The same without the experts that a token does not have."""
        routed = [layer.routed for layer in self.layers if layer.routed is not None]
        idle = sum((each.num_experts - each.num_active) * each.width for each in routed)
        return self.num_parameters() - 3 * self.hidden_size * idle

    @property
    def way(self) -> str:
        """Told of a model that another module computes."""
        return ", through transformers' own module, for there is no native row" if self.module else ""

    def _experts(self) -> str:
        routed = [layer.routed for layer in self.layers if layer.routed is not None]
        if not routed:
            return ""
        return f" ({len(routed)} with {routed[-1].num_active} of {routed[-1].num_experts} experts)"

    def identity(self) -> str:
        """Return one line for logs and messages."""
        active, total = self.num_active_parameters(), self.num_parameters()
        of_token = f" ({active / 1e6:,.1f} M of a token)" if active < total else ""
        return (
            f"{self.architecture}, {total / 1e6:,.1f} M parameters{of_token}, "
            f"{len(self.module.calls if self.module else self.layers)} layers{self._experts()}, "
            f"hidden size {self.hidden_size}, {self.num_heads} heads of "
            f"{self.head_dim} ({self.num_kv_heads} for {'latent ' if self.latent else ''}keys and values), "
            f"context {self.max_position_embeddings}"
        )


def parameter_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter of the decoder, by name, in the order in which a forward pass meets them.

    Matrices are [out, in]. q, k, v are one matrix `qkv` (rows in this order), gate and up are one matrix `gate_up`, in
    every family. `attention_norm` and `mlp_norm` stand before their part, `attention_post_norm` and `mlp_post_norm`
    after it. A routed layer's experts stand one below the other in `experts.gate_up` and `experts.down`.
    """
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (spec.vocab_size, spec.hidden_size)}
    if spec.encoder is not None:
        return shapes | _encoder_shapes(spec, spec.encoder)
    if width := spec.num_layers * spec.per_layer_width:
        shapes["by_layer.embedding.weight"] = (spec.vocab_size, width)
        shapes["by_layer.projection.weight"] = (width, spec.hidden_size)
        shapes["by_layer.norm.weight"] = (spec.per_layer_width,)
    for i in range(spec.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(spec, i).items()}
    shapes["norm.weight"] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        shapes["output.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _encoder_shapes(spec: DecoderSpec, encoder: EncoderSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        **({"types.embedding.weight": (encoder.num_types, hidden)} if encoder.num_types else {}),
        "positions.embedding.weight": (encoder.num_positions, hidden),
        **dict.fromkeys(("embedding_norm.weight", "embedding_norm.bias"), (hidden,)),
    }
    linears = {"qkv": (3 * hidden, hidden), "attention_output": (hidden, hidden), "attention_post_norm": (hidden,)}
    linears |= {"up": (inner, hidden), "down": (hidden, inner), "mlp_post_norm": (hidden,)}
    for i in range(spec.num_layers):
        for name, shape in linears.items():
            shapes |= {f"layers.{i}.{name}.weight": shape, f"layers.{i}.{name}.bias": shape[:1]}
    return shapes


def _layer_shapes(spec: DecoderSpec, layer: int) -> dict[str, tuple[int, ...]]:
    pre = spec.norm_placement is not NormPlacement.POST
    post = spec.norm_placement is not NormPlacement.PRE
    hidden, size = (spec.hidden_size,), spec.per_layer_width
    recurrent, latent = spec.layers[layer].recurrent, spec.layers[layer].latent
    mixer = _attention_shapes(spec.at(layer), layer) if latent is None else latent_shapes(spec, latent)
    shapes: dict[str, tuple[int, ...] | None] = {
        "attention_norm.weight": hidden if pre else None,
        **(mixer if recurrent is None else _recurrent_shapes(recurrent, spec.hidden_size)),
        "attention_post_norm.weight": hidden if post else None,
        "mlp_norm.weight": hidden if pre else None,
        **_mlp_shapes(spec, layer),
        "mlp_post_norm.weight": hidden if post else None,
        "input_gate.weight": (size, *hidden) if size else None,
        "input.weight": (*hidden, size) if size else None,
        "input_norm.weight": hidden if size else None,
        "scale.weight": (1,) if spec.layer_scales else None,
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _attention_shapes(spec: DecoderSpec, layer: int) -> dict[str, tuple[int, ...] | None]:
    full = spec.qk_norm is QKNorm.FULL_WIDTH
    normed, keeps = spec.qk_norm is not QKNorm.NONE, spec.layers[layer].kv_of is None
    width = spec.qkv_width if keeps else spec.q_width
    return {
        "qkv.weight": (width, spec.hidden_size),
        "qkv.bias": (width,) if spec.qkv_bias else None,
        "q_norm.weight": (spec.q_width if full else spec.head_dim,) if normed else None,
        "k_norm.weight": (spec.kv_width if full else spec.head_dim,) if normed and keeps else None,
        "sinks.weight": (spec.num_heads,) if spec.attention_sinks else None,
        "attention_output.weight": (spec.hidden_size, spec.q_width),
        "attention_output.bias": (spec.hidden_size,) if spec.output_bias else None,
    }


def latent_shapes(spec: DecoderSpec, latent: LatentSpec) -> dict[str, tuple[int, ...] | None]:
    """`inputs` has rows for the queries, or for what their second matrix reads, then for latent and for rotated values;
    `absorb` and `expand` are a matrix a head, one below the other."""
    heads, hidden, between = spec.num_heads, spec.hidden_size, latent.query_rank
    return {
        "latent.inputs.weight": ((between or heads * latent.query_dim) + latent.head_dim, hidden),
        "latent.query_norm.weight": (between,) if between else None,
        "latent.query.weight": (heads * latent.query_dim, between) if between else None,
        "latent.norm.weight": (latent.rank,),
        "latent.absorb.weight": (heads * latent.rank, latent.key_dim),
        "latent.expand.weight": (heads * latent.value_dim, latent.rank),
        "attention_output.weight": (hidden, heads * latent.value_dim),
    }


def _recurrent_shapes(recurrent: RecurrentSpec, hidden: int) -> dict[str, tuple[int, ...] | None]:
    return {
        "recurrent.inputs.weight": (recurrent.input_width, hidden),
        "recurrent.conv.weight": (recurrent.num_channels * recurrent.conv_width,),
        "recurrent.step_bias.weight": (recurrent.num_value_heads,),
        "recurrent.rate.weight": (recurrent.num_value_heads,),
        "recurrent.norm.weight": (recurrent.value_dim,),
        "recurrent.output.weight": (hidden, recurrent.value_width),
    }


def _mlp_shapes(spec: DecoderSpec, layer: int) -> dict[str, tuple[int, ...] | None]:
    routed, hidden = spec.layers[layer].routed, spec.hidden_size
    if routed is None:
        inner = spec.inner_width(layer)
        return {
            "gate_up.weight": (2 * inner, hidden),
            "gate_up.bias": (2 * inner,) if spec.mlp_bias else None,
            "down.weight": (hidden, inner),
            "down.bias": (hidden,) if spec.mlp_bias else None,
        }
    experts, inner, shared = routed.num_experts, routed.width, routed.shared_width
    return {
        "router.weight": (experts, hidden),
        "router.bias": (experts,) if routed.router_bias else None,
        "correction.weight": (experts,) if routed.correction_bias else None,
        "experts.gate_up.weight": (experts * 2 * inner, hidden),
        "experts.gate_up.bias": (experts * 2 * inner,) if routed.expert_bias else None,
        "experts.down.weight": (experts * hidden, inner),
        "experts.down.bias": (experts * hidden,) if routed.expert_bias else None,
        "shared_gate.weight": (1, hidden) if routed.shared_gate else None,
        "shared.gate_up.weight": (2 * shared, hidden) if shared else None,
        "shared.down.weight": (hidden, shared) if shared else None,
        **{
            f"beside.{name}.weight": (experts,) if name == "expert_scale" else (hidden,)
            for name in (BESIDE if routed.beside_dense else ())
        },
    }


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _check(spec: DecoderSpec) -> None:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(spec, name) < 1:
            raise CheckpointError(f"{spec.architecture}: {name} is {getattr(spec, name)}; it must be at least 1")
    if not spec.layers:
        raise CheckpointError(f"{spec.architecture}: the model has no layers")
    if spec.head_dim % 2 and spec.module is None:
        raise CheckpointError(f"{spec.architecture}: head_dim is {spec.head_dim}; rope needs an even head size")
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{spec.architecture}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads; "
            f"the second must divide the first"
        )
    for i, layer in enumerate(spec.layers):
        if layer.window is not None and layer.window < 1:
            raise CheckpointError(f"{spec.architecture}: layer {i} has a window of {layer.window} tokens")
        if layer.rope is not None and not 2 <= 2 * layer.rope.num_frequencies <= (layer.heads or (0, spec.head_dim))[1]:
            raise CheckpointError(
                f"{spec.architecture}: layer {i} rotates {layer.rope.dim} values of a head of {spec.head_dim}"
            )
        if layer.routed is not None:
            _check_routed(spec.architecture, i, layer.routed)
        if layer.recurrent is not None:
            _check_recurrent(spec.architecture, i, layer.recurrent)
    if not spec.kv_layers:
        raise CheckpointError(f"{spec.architecture}: all {spec.num_layers} layers are recurrent; one must have keys")
    _check_latent(spec)


def _check_latent(spec: DecoderSpec) -> None:
    if any(spec.layers[i].latent != spec.latent for i in spec.kv_layers):
        raise CheckpointError(f"{spec.architecture}: layers of unlike keys and values beside latent ones")
    if (it := spec.latent) and (min(it.rank, it.rope_dim, it.key_dim, it.value_dim) < 1 or it.rope_dim % 2):
        raise CheckpointError(f"{spec.architecture}: latent attention of sizes that there are not: {it}")


def _check_recurrent(architecture: str, layer: int, recurrent: RecurrentSpec) -> None:
    keys, values = recurrent.num_key_heads, recurrent.num_value_heads
    if min(keys, values, recurrent.key_dim, recurrent.value_dim) < 1 or recurrent.conv_width < 2:
        raise CheckpointError(f"{architecture}: layer {layer} has a size that is too small: {recurrent}")
    if values % keys:
        raise CheckpointError(
            f"{architecture}: layer {layer} has {keys} key heads for {values} value heads; the first must divide the "
            f"second"
        )


def _check_routed(architecture: str, layer: int, routed: RoutedSpec) -> None:
    experts, groups = routed.num_experts, routed.num_groups
    if min(experts, routed.num_active, routed.width, groups, routed.num_active_groups, routed.best_of_group) < 1:
        raise CheckpointError(f"{architecture}: layer {layer} has a number of its experts below 1: {routed}")
    if experts % groups or routed.num_active_groups > groups:
        raise CheckpointError(
            f"{architecture}: layer {layer} chooses {routed.num_active_groups} of {groups} groups of {experts} "
            f"experts; the number of groups must divide theirs"
        )
    eligible = experts // groups * routed.num_active_groups
    if routed.num_active > eligible or (groups > 1 and routed.best_of_group > experts // groups):
        raise CheckpointError(
            f"{architecture}: layer {layer} gives a token {routed.num_active} of {eligible} eligible experts, in "
            f"groups of {experts // groups}; it has too few"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Spec of a head that computes hidden = fc(taps), then a layer that reads token and hidden side by side.

    Parameters beside those of `decoder` (`spec.parameter_shapes`, whose `layers.0.qkv.weight` is twice as wide):
    `fc.weight` [hidden, taps * hidden], `layers.0.hidden_norm.weight` [hidden]; `taps_norm.weight` [taps * hidden]
    where `norms_taps`; `tap_norms.{i}.weight` [hidden] where `norms_each_tap`.
    """

    decoder: DecoderSpec
    """The head's one layer, its norm and its output; `vocab_size` counts the tokens that it can draft.
    `embedding.weight` has a row for each token of the served model.
    """
    taps: tuple[int, ...]
    """Number of layers of the served model after which each tap is taken; 0 is the embedding."""
    num_embeddings: int
    """Tokens of the served model."""
    norms_taps: bool = False
    """Norm over all taps of a token as one vector, before fc (`norm_before_fc`)."""
    norms_each_tap: bool = False
    """Norm over each tap alone (`fc_norm`)."""
    norms_residual: bool = False
    """The layer adds to the normed hidden (`norm_before_residual`)."""
    norms_state: bool = False
    """The state that it reads next is normed as for the output (`norm_output`)."""
    layer: int = 0
    """Number of the layer in `decoder`, which is then the model with an MTP layer of its checkpoint behind the others
    (DeepSeek-V3, arXiv:2412.19437): HIDDEN = fc(token_norm(embedding), state_norm(norm(tap))), the layer as it is,
    and the model's output matrix after `head_norm`, which is also the state that it reads next.
    """

    @property
    def tap_width(self) -> int:
        """Values of all taps of a token."""
        return len(self.taps) * self.decoder.hidden_size
