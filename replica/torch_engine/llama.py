"""The forward pass of Llama-like models on a CPU: transformers' weights without its overhead.

Theory of operation. oneDNN multiplies by a weight faster if the weight has the layout that its kernels read: twice as fast for
a single row, the work of one answer. So each weight is packed once, at start, weights that read the same input are packed as
one matrix, and the model gives up its own copy (the embedding stays; if the output weight is tied to it there are two copies).
Between the products are few operations on whole steps, without a module's hooks around each. The residual stream and the inputs
of the norms stay in float32 for every type of model: this costs almost nothing and removes most of bfloat16's error.

Only known models are computed this way: the classes in `SUPPORTED`, with the parts in `PARTS` and no others.
`tests/replica/torch_engine/test_llama.py` compares each with transformers' results.
"""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

from replica.torch_engine.attention import AttentionStep
from replica.torch_engine.loading import multiplies_bfloat16

log = logging.getLogger(__name__)
SUPPORTED = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
PARTS = {
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
    "input_layernorm": set[str](),
    "post_attention_layernorm": set[str](),
}


LEAST_ROWS = 4  # of a product: fewer take oneDNN longer (on an EPYC with avx512_bf16 one row takes a sixth more than four)


class _PackedWeights:
    """One product for several linear layers that read the same input. Their own weights are removed, unless `keep`."""

    def __init__(self, layers: Items[torch.nn.Linear], keep: bool = False) -> None:
        weight = torch.cat([layer.weight for layer in layers]).detach()
        biases = [layer.bias for layer in layers]
        self._bias = None if biases[0] is None else torch.cat(biases).detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        for layer in layers if not keep else ():
            layer.weight = layer.bias = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        if count < LEAST_ROWS:
            rows = functional.pad(rows, (0, 0, 0, LEAST_ROWS - count))
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product[:count]


class _Norm:
    """RMS norm, from float32 to the model's type."""

    def __init__(self, norm: Any) -> None:
        self._weight, self._type, self._epsilon = norm.weight.detach().float(), norm.weight.dtype, norm.variance_epsilon

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, self._weight.shape, self._weight, self._epsilon).to(self._type)


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: _Norm
    query_key_value: _PackedWeights
    output: _PackedWeights
    before_mlp: _Norm
    gate_up: _PackedWeights
    down: _PackedWeights


class PackedLlama:
    """A model's weights, packed. The model is empty afterwards: all of its layers' weights are here. Not thread-safe."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        first = inner.layers[0].self_attn
        self._size = first.head_dim
        self._key_heads = first.k_proj.out_features // self._size
        self._heads = first.q_proj.out_features // self._size
        self._scales = torch.tensor([first.scaling] * self._heads + [1.0] * self._key_heads)[:, None]
        self._embed, self._rotary, self._norm = inner.embed_tokens, inner.rotary_emb, _Norm(inner.norm)
        self._layers = [_layer(layer) for layer in inner.layers]
        self._scores = _PackedWeights([model.lm_head], keep=model.lm_head.weight is self._embed.weight)
        for rest in model.parameters():
            rest.data = rest.data.clone()  # else it keeps the whole file that it was read from in memory

    @staticmethod
    def supports(model: Any) -> bool:
        """Return whether this model and machine are supported; if not, the reason is logged."""
        reason = next(_unsupported(model), None)
        if reason is not None:
            log.info("computing with transformers' own forward pass: %s", reason)
        return reason is None

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Scores of the next token, one row for each of the wanted rows."""
        hidden = self._embed(ids).float()
        angles = [part[0, :, None, : self._size // 2] * self._scales for part in self._rotary(hidden, positions[None])]
        rotations = torch.stack((angles[0], angles[0]), 2), torch.stack((-angles[1], angles[1]), 2)
        heads = self._heads + self._key_heads
        for number, layer in enumerate(self._layers):
            rows = layer.query_key_value(layer.before_attention(hidden)).view(len(ids), -1, self._size)
            rotated = _rotated(rows[:, :heads], *rotations)
            query, key = rotated[:, : self._heads], rotated[:, self._heads :]
            hidden += layer.output(step.attend(number, query, key, rows[:, heads:]))
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, -1)
            hidden += layer.down(functional.silu(gate) * up)
        return self._scores(self._norm(hidden[wanted]))


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        before_attention=_Norm(layer.input_layernorm),
        query_key_value=_PackedWeights([attention.q_proj, attention.k_proj, attention.v_proj]),
        output=_PackedWeights([attention.o_proj]),
        before_mlp=_Norm(layer.post_attention_layernorm),
        gate_up=_PackedWeights([mlp.gate_proj, mlp.up_proj]),
        down=_PackedWeights([mlp.down_proj]),
    )


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[rows, heads, size] with rotary positions. Cosines and sines, of both halves of a head: [rows, heads, 2, size / 2]; the
    sines of the first halves are negative."""
    halves = rows.view(cos.shape)
    return (halves * cos).addcmul_(halves.flip(2), sin).to(rows.dtype).view(rows.shape)


def _unsupported(model: Any) -> Iterator[str]:
    """The reasons why this model cannot be computed here."""
    if model.device.type != "cpu":
        yield f"the model is on {model.device}"
    if not torch.backends.mkldnn.is_available():
        yield "this torch has no oneDNN"
    elif model.dtype == torch.bfloat16 and not multiplies_bfloat16():
        yield "this processor does not multiply bfloat16"
    if type(model) not in SUPPORTED:
        yield f"{type(model).__name__} is not one of the supported classes"
    elif set(group_layers_by_attn_type(model.config)) != {"full_attention"}:
        yield "some of its layers have a sliding window"
    elif model.config.hidden_act != "silu":
        yield f"its activation is {model.config.hidden_act}"
    elif any(_parts(layer) != PARTS for layer in model.model.layers):
        yield "its layers have other parts than the supported ones"
    elif unlike := next(_non_plain_linears(model), None):
        yield unlike


def _parts(layer: Any) -> dict[str, set[str]]:
    return {name: {inner for inner, _ in part.named_children()} for name, part in layer.named_children()}


def _non_plain_linears(model: Any) -> Iterator[str]:
    """Linear layers that compute more than the product with their weight: a quantised layer has scales, an adapter a second
    product.
    """
    for name, layer in model.named_modules():
        if name.endswith(("_proj", "lm_head")):
            plain = type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter
            if not plain or layer.weight.dtype != model.dtype or layer._forward_pre_hooks or layer._forward_hooks:
                yield f"{name} is no plain linear layer of {model.dtype}: {layer}"
