"""Our attention in the place of the transformers library's own: one function, and what it learns of each layer.

Where it stands: beneath `hf_backend.py`. Every attention layer of that library looks its attention up by name and calls
it with queries, keys and values; under the name "mini_vllm" it finds `attend` below, which hands the call to the
`AttentionPort` that its model carries, and so to the plan of the step.

    transformers layer --attend(module, query, key, value, mask, ...)--> AttentionPort
                                                                         |- while the model is looked at: LayerProbe
                                                                         `- in a step: StepAttention(layer, ...)

The library makes masks apart from attention: a window may stand in the mask alone. The probe therefore runs under a
second name, for which `read_mask` is registered: it is given the rule "may query i see key j" that this layer's mask
would be filled from, and tells the window that the rule amounts to. In a step no mask is made at all.

What always holds: nothing here is shared between models but these functions; a call with anything that would change the
numbers and is not understood is refused by name.

In vLLM: `vllm/model_executor/models/transformers/base.py` (`vllm_flash_attention_forward`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mini_vllm.errors import UnsupportedModelError
from mini_vllm.model.attention import AttentionLayerSpec, StepAttention

IN_A_STEP = "mini_vllm"
WHILE_PROBED = "mini_vllm_probe"

_PORT = "mini_vllm_port"  # the attribute of a module that leads from a layer to its model's port
_FULL, _UNKNOWN = 0, -1  # what `read_mask` says when it finds no window: all is seen, or another rule
_SOME_LENGTH = 4096  # of a model that names no longest context, which is refused later
# Arguments of the library's attention functions that change nothing here: places and caches are the engine's own, and
# there is no dropout in evaluation mode.
_WITHOUT_EFFECT = frozenset(
    {
        *("dropout", "position_ids", "cache_position", "position_embeddings", "layer_idx", "training"),
        *("use_cache", "past_key_value", "past_key_values", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep"),
    }
)


@dataclass(frozen=True)
class LayerCall:
    """What one attention layer asked for when the model was looked at.

    Args:
        module: the layer, which is known by its identity.
        spec: what the attention backend must know of it. Its head_dim is that of queries and keys.
    """

    module: nn.Module
    spec: AttentionLayerSpec


class _Handler(Protocol):
    """What a port hands the calls of the layers to."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """query [T, num_heads, head_dim], key and value [T, num_kv_heads, ...] -> [T, num_heads, width of value]."""
        ...


class AttentionPort:
    """The one way from the layers of a model to whatever attends now. Each model has its own.

    Args:
        model: every module of it is told of the port.
    """

    def __init__(self, model: nn.Module) -> None:
        self.handler: _Handler | None = None
        for module in model.modules():
            setattr(module, _PORT, self)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The library's attention function: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out, and no weights."""
    port: AttentionPort | None = getattr(module, _PORT, None)
    if port is None or port.handler is None:
        raise RuntimeError("attention of a mini vLLM model was called outside of a step")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head_dim]
    return port.handler(module, query, key, value, attention_mask, options)[None], None


class LayerProbe:
    """Looks at each attention layer of a model and lets every token attend to itself alone.

    Args:
        dtype: what the cache will store.

    Attributes:
        calls: one entry a call, in order.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.calls: list[LayerCall] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        if {query.dtype, key.dtype, value.dtype} != {self._dtype}:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends in {query.dtype}, {key.dtype} and {value.dtype} (queries, keys, "
                f"values), but the model runs in {self._dtype}."
            )
        self.calls.append(LayerCall(module, _layer_spec(module, query, key, value, mask, options)))
        return attend_to_self(query, key, value)


def attend_to_self(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A stand-in for attention that mixes no tokens: a token's own value, scaled by its own query and key.

    The scale is not the product of the two, which the rotary embedding leaves as it is: it must show if a model gives
    a token the wrong position.

    Args:
        query: [T, num_heads, head_dim].
        key, value: [T, num_kv_heads, head_dim]; the values may be narrower.

    Returns:
        [T, num_heads, width of value].
    """
    group = query.shape[1] // value.shape[1]
    ramp = torch.linspace(-1, 1, query.shape[2], dtype=query.dtype, device=query.device)
    turned = (query @ ramp).tanh() + (key @ ramp).tanh().repeat_interleave(group, dim=1)  # [T, num_heads]
    return value.repeat_interleave(group, dim=1) * (1 + turned[:, :, None])


class StepRunner:
    """Hands the calls of one step on to its plan.

    Args:
        layers: the index of each layer.
        attention: the plan of the step.
    """

    def __init__(self, layers: Mapping[nn.Module, int], attention: StepAttention) -> None:
        self._layers, self._attention = layers, attention
        self.called: list[int] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        layer = self._layers[module]
        self.called.append(layer)
        width = value.shape[-1]
        query, key = query.contiguous(), key.contiguous()
        if width < query.shape[-1]:  # DeepSeek's latent attention: the cache stores both as wide as the keys
            value = F.pad(value, (0, query.shape[-1] - width))
        return self._attention(layer, query, key, value.contiguous())[..., :width]


def _layer_spec(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> AttentionLayerSpec:
    """What a layer's call says of it.

    Raises:
        UnsupportedModelError: it says something that our attention does not do.
    """
    name = type(module).__name__
    head_dim = query.shape[-1]
    if value.shape[-1] > head_dim or query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise UnsupportedModelError(
            f"{name} attends with shapes that are not those of grouped-query attention: queries "
            f"{list(query.shape)}, keys {list(key.shape)}, values {list(value.shape)} ([tokens, heads, width])."
        )
    understood = {"scaling", "sliding_window", "softcap", "is_causal", *_WITHOUT_EFFECT}
    unknown = sorted(key for key, value in options.items() if key not in understood and value is not None)
    if options.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModelError(
            f"{name} asks its attention for {', '.join(unknown)}, which mini vLLM does not do for models of the "
            "transformers library."
        )
    scaling = options.get("scaling")
    return AttentionLayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=head_dim,
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=_window(name, mask, options.get("sliding_window")),
        softcap=options.get("softcap"),
    )


def _window(name: str, mask: Tensor | None, argument: int | None) -> int | None:
    """The sliding window of a layer, on which mask and argument (where it is given) must agree."""
    if mask is None or mask.dtype != torch.int64 or mask.numel() != 1 or mask.item() == _UNKNOWN:
        raise UnsupportedModelError(
            f"{name} attends under a mask that is not the plain causal one or a sliding window (chunks, both "
            "directions, position biases ...)."
        )
    window = int(mask.item())
    if window != _FULL and argument is not None and argument != window:
        raise UnsupportedModelError(f"{name} has a sliding window of {window} in its mask but asks for {argument}.")
    return None if window == _FULL else window


def read_mask(mask_function: Callable[..., Tensor], config: Any, device: Any, **unused: Any) -> Tensor:
    """The library's mask function: the window that a mask's rule amounts to, as one number instead of a mask.

    The rule is asked what two queries see, the last of the longest context and one in its middle::

        causal, context 8    query 4:  x x x x x . . .     query 7:  x x x x x x x x
        window 3             query 4:  . . x x x . . .     query 7:  . . . . . x x x
        chunks of 3          query 4:  . . . x x . . .     query 7:  . . . . . . x x     refused: two different widths

    Returns:
        [1, 1, 1, 1] int64: the window in tokens, `_FULL`, or `_UNKNOWN` for another rule.
    """
    length = getattr(config, "max_position_embeddings", None) or _SOME_LENGTH
    keys = torch.arange(length, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    widths = []
    for position in (length // 2, length - 1):
        query = torch.tensor(position, device=device)
        sees = torch.as_tensor(mask_function(zero, zero, query, keys), device=device).expand(length)
        width = int(sees.sum())
        is_suffix = bool(sees[position + 1 - width : position + 1].all()) and 0 < width <= position + 1
        widths.append((width, position + 1) if is_suffix else (_UNKNOWN, 0))
    (middle, to_middle), (last, to_last) = widths
    window = _UNKNOWN
    if last == to_last and middle == to_middle:
        window = _FULL
    elif last > 0 and middle == min(last, to_middle):
        window = last
    return torch.full((1, 1, 1, 1), window, dtype=torch.int64, device=device)


def register_with_transformers() -> None:
    """Make the two names known to the library. Doing it again changes nothing."""
    AttentionInterface.register(IN_A_STEP, attend)
    AttentionInterface.register(WHILE_PROBED, attend)
    AttentionMaskInterface.register(WHILE_PROBED, read_mask)
