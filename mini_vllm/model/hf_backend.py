"""Any decoder of the transformers library as a `LanguageModel`: its layers, our attention and cache (`mini-vllm[hf]`).

Where it stands: beside `transformer.py`. The loader takes it for architectures that are not native, or for any with
`model_impl="transformers"`; it is the only part of the package that needs that library, and is imported late.

    native         checkpoint -> weight map -> Transformer          one forward pass, written here to be read and fast
    transformers   checkpoint -> that library's own class, with `hf_attention.attend` in the place of its attention

The tokens of all sequences go through it flat, as one row without padding, mask or cache of its own; their places come
as `position_ids`. So batching, paging, prefix caching and chunks work as they do for native models.

    [1, T] token ids -> body (embedding, layers, norm) -> hidden [T, hidden]
    [1, R, hidden]   -> the class's own head, whatever it does to the logits -> [R, vocab_size]

What always holds: a model that exists has passed `hf_dry_run.py`, so each attention layer calls our attention exactly
once a step, and tokens meet nowhere else.

In vLLM: `vllm/model_executor/models/transformers/`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mini_vllm.config import LoadFormat
from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
from mini_vllm.model.hf_attention import (
    IN_A_STEP,
    WHILE_PROBED,
    AttentionPort,
    LayerCall,
    StepRunner,
    register_with_transformers,
)
from mini_vllm.model.hf_dry_run import check_halves, check_rows, probe
from mini_vllm.model.hf_rope import context_length, settle_longrope
from mini_vllm.model.language_model import ModelSummary

logger = logging.getLogger(__name__)


@dataclass
class _HiddenStates(MoeModelOutputWithPast):  # type: ignore[misc, unused-ignore]
    """What the body returns, with every field that some head looks at."""

    cross_attentions: Any = None


class TransformersModel:
    """A model of the transformers library behind the `LanguageModel` protocol.

    Args:
        causal_lm: the whole model, in evaluation mode. Its body's `forward` is replaced (see `logits`).
        body: the part of it that gives the hidden states.
        port: the way from its layers to the plan of a step.
        calls: its attention layers, in order.
    """

    def __init__(self, causal_lm: nn.Module, body: nn.Module, port: AttentionPort, calls: Sequence[LayerCall]) -> None:
        self._causal_lm = causal_lm
        self._port = port
        self._layers = {call.module: layer for layer, call in enumerate(calls)}
        self._specs = [call.spec for call in calls]
        self._run_body = body.forward
        body.forward = _give_back_embeddings  # only this model's own object changes

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        """What the attention backend must know of each layer."""
        return list(self._specs)

    def settle_context(self, max_model_len: int) -> None:
        """Choose between the two sets of frequencies of longrope, once and for all (see `rotary.py`).

        The library chooses at each forward by the longest text in it, and keys that are cached cannot follow.
        """
        settle_longrope(self._causal_lm, max_model_len)

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """[T] token ids and positions, flat over all sequences -> [T, hidden_size]."""
        runner = StepRunner(self._layers, attention)
        self._port.handler = runner
        try:
            output = self._run_body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._port.handler = None
        if runner.called != list(range(len(self._specs))):
            raise RuntimeError(f"attention layers were called as {runner.called}, not each once and in order")
        hidden: Tensor = output[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32.

        The whole model runs with a body that gives back what it is given, so what the class does between body and
        logits (a scale, a softcap, one more norm) is done, whatever it is.
        """
        output = self._causal_lm(inputs_embeds=hidden[None], use_cache=False)
        return cast(Tensor, output.logits)[0].to(torch.float32)


def _give_back_embeddings(*unused: Any, inputs_embeds: Tensor, **also_unused: Any) -> _HiddenStates:
    return _HiddenStates(last_hidden_state=inputs_embeds)


def load_transformers_model(
    directory: Path, raw: Mapping[str, Any], *, dtype: torch.dtype, device: str, load_format: LoadFormat
) -> tuple[TransformersModel, ModelSummary]:
    """Load a checkpoint with the transformers library and put our attention into it.

    Args:
        directory: of the checkpoint: config.json and safetensors.
        raw: the parsed config.json.
        dtype, device: of the model.
        load_format: "auto" reads the weights, "dummy" draws them.

    Raises:
        UnsupportedModelError: the library has no such decoder, or it does more than attention over a KV cache.
        ModelLoadError: the checkpoint is damaged or incomplete.
    """
    register_with_transformers()
    model_class, config = _class_and_config(directory, raw)
    causal_lm = _make_model(directory, model_class, config, dtype, load_format).to(device).eval()
    causal_lm.requires_grad_(False)
    model, max_position, notes = _take_apart(causal_lm, dtype)
    summary = ModelSummary(
        architecture=model_class.__name__,
        vocab_size=causal_lm.get_input_embeddings().weight.shape[0],
        max_position_embeddings=max_position,
        eos_token_ids=_token_ids(config.eos_token_id),
        notes=notes,
    )
    return model, summary


def _take_apart(causal_lm: Any, dtype: torch.dtype) -> tuple[TransformersModel, int, tuple[str, ...]]:
    """Put our attention into a model, and see that it fits. Returns: it, its longest context, notes for the log."""
    name, port = type(causal_lm).__name__, AttentionPort(causal_lm)
    probed = probe(causal_lm, port, dtype)
    max_position, notes = context_length(causal_lm.config)
    causal_lm.set_attn_implementation(IN_A_STEP)
    model = TransformersModel(causal_lm, probed.body, port, probed.calls)
    check_halves(name, model, probed, dtype)
    model.settle_context(max_position)
    check_rows(name, model, max_position, causal_lm.device, dtype)
    return model, max_position, notes


def transformers_architectures() -> list[str]:
    """Class names of the decoders that this version of the library has, in alphabetical order."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def _class_and_config(directory: Path, raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """The library's class and configuration for a checkpoint, or a refusal."""
    names, model_type = raw.get("architectures"), raw.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if name not in transformers_architectures():
        more = ""
        if raw.get("auto_map"):
            more = " The checkpoint brings Python code of its own, which is never run."
        raise UnsupportedModelError(
            f"{directory}: {name!r} (model_type={model_type!r}) is no decoder of transformers "
            f"{transformers.__version__}; a newer version may have it.{more}"
        )
    if raw.get("quantization_config"):
        raise UnsupportedModelError(
            f"{directory}: quantization_config in config.json: quantised checkpoints are not read through the "
            "transformers library. Use the model's checkpoint in bfloat16 or float16."
        )
    model_class = getattr(transformers, str(name))
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises what it likes for a value that it does not expect
        raise ModelLoadError(f"transformers cannot read {directory / 'config.json'}: {error}") from error
    if not isinstance(config, model_class.config_class):
        raise UnsupportedModelError(
            f"{directory}: architecture {name} does not go with model_type={model_type!r} in config.json."
        )
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError(
            f"{directory}: {name} is an encoder-decoder or takes more than text; only plain decoders run here."
        )
    return model_class, config


def _make_model(directory: Path, model_class: Any, config: Any, dtype: torch.dtype, load_format: LoadFormat) -> Any:
    """The library's model with its weights, on the CPU."""
    options = {"dtype": dtype, "attn_implementation": WHILE_PROBED}
    try:
        if load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return model_class._from_config(config, **options)
        model, report = model_class.from_pretrained(
            directory, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
        )
    except Exception as error:  # whatever its many classes raise, said with the model's name
        raise ModelLoadError(f"transformers cannot load {directory}: {type(error).__name__}: {error}") from error
    missing = [*sorted(report["missing_keys"]), *(str(entry) for entry in report["mismatched_keys"])]
    if missing:
        raise ModelLoadError(
            f"{directory} lacks {len(missing)} weights of {model_class.__name__}, or has them in another shape "
            f"({missing[0]} is the first). Incomplete download?"
        )
    if report["unexpected_keys"]:
        logger.warning("%s: %d tensors are not used, such as %s", directory, *_count_and_first(report))
    return model


def _count_and_first(report: Mapping[str, Any]) -> tuple[int, str]:
    names = sorted(report["unexpected_keys"])
    return len(names), names[0]


def _token_ids(value: Any) -> frozenset[int]:
    ids = value if isinstance(value, (list, tuple)) else [value]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))
