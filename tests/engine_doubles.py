"""Engines made of small parts: a scripted model, a byte tokenizer, a tiny random transformer.

ScriptedModel   returns chosen logits, so that an exact token sequence goes through the real engine
byte_tokenizer  256 bytes, <bos> 256, <eos> 257, <tool> 258: every string has known ids
tiny_parts      the engine's parts around a random transformer in float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from mini_vllm.config import EngineConfig
from mini_vllm.engine.input_processor import ModelFacts
from mini_vllm.engine.llm_engine import EngineParts, LLMEngine
from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
from mini_vllm.model.config import ModelConfig, RopeConfig
from mini_vllm.model.language_model import LanguageModel
from mini_vllm.model.transformer import Transformer, init_random_weights
from mini_vllm.outputs import RequestOutput
from mini_vllm.tokenizer.chat_template import ChatTemplate
from mini_vllm.tokenizer.tokenizer import Tokenizer
from mini_vllm.tokenizer.tokenizer_files import TokenizerParts
from mini_vllm.worker.executor import InProcessExecutor

BOS, EOS, TOOL = 256, 257, 258
BYTE_VOCAB_SIZE = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Script = Callable[[int, int], Mapping[int, float] | Tensor]


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """A byte-level tokenizer without merges: byte b of the UTF-8 text is id b."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: _byte_of(c))
    backend = Backend(models.BPE(vocab={c: _byte_of(c) for c in characters}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<tool>")])
    templates = {} if chat_template is None else {"default": chat_template}
    return Tokenizer(TokenizerParts(backend, {"bos_token": "<bos>", "eos_token": "<eos>"}, frozenset(), templates))


def _byte_of(character: str) -> int:
    """Undo the byte-level alphabet: printable bytes are themselves, the other 68 count up from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(character) < 256:
        return ord(character)
    return [b for b in range(256) if b not in printable][ord(character) - 256]


class ScriptedModel:
    """A model whose logits are a function of (newest token id, its position); attention runs, and adds nothing."""

    def __init__(self, script: Script, vocab_size: int = BYTE_VOCAB_SIZE) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self.layer_specs = [AttentionLayerSpec(num_heads=2, num_kv_heads=1, head_dim=2, scale=1.0)]
        self.num_computed_tokens = 0
        self.num_logits_rows = 0

    def settle_context(self, max_model_len: int) -> None:
        """Nothing here depends on it."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        self.num_computed_tokens += len(input_ids)
        key = torch.stack([input_ids, positions], -1).float()[:, None]
        attention(0, key.expand(-1, 2, -1), key, key)
        return torch.stack([input_ids, positions], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_logits_rows += len(hidden)
        rows = []
        for token_id, position in hidden.tolist():
            chosen = self._script(token_id, position)
            if not isinstance(chosen, Tensor):
                row = torch.full((self._vocab_size,), -20.0)
                for wanted, logit in chosen.items():
                    row[wanted] = logit
                chosen = row
            rows.append(chosen.float())
        return torch.stack(rows)


def says(token_ids: Sequence[int], prompt_len: int) -> Script:
    """The script that answers a prompt of `prompt_len` tokens with `token_ids`, then <eos> for ever."""

    def script(_: int, position: int) -> Mapping[int, float]:
        place = position - (prompt_len - 1)
        return {token_ids[place] if 0 <= place < len(token_ids) else EOS: 10.0}

    return script


TINY_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=BYTE_VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    norm_eps=1e-5,
    ropes=(RopeConfig(), RopeConfig()),
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=None,
    sliding_windows=(None, None),
    eos_token_ids=frozenset({EOS}),
)


def tiny_transformer(seed: int = 0, scale: float = 12.0) -> Transformer:
    """A random transformer whose answers differ from prompt to prompt (its weights are not small)."""
    model = Transformer(TINY_CONFIG).eval().requires_grad_(False)
    init_random_weights(model, seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(scale)
    return model


def parts_for(
    model: LanguageModel,
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = BYTE_VOCAB_SIZE,
    eos_token_ids: frozenset[int] = frozenset({EOS}),
    generation_defaults: Mapping[str, Any] | None = None,
    max_model_len: int = 256,
    dtype: torch.dtype = torch.float32,
    kernels: bool = False,
) -> EngineParts:
    tokenizer = tokenizer or byte_tokenizer()
    return EngineParts(
        executor=InProcessExecutor(config, model, dtype, torch.device("cpu"), kernels),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens),
        facts=ModelFacts(vocab_size, eos_token_ids, generation_defaults or {}),
        max_model_len=max_model_len,
        model_name="double",
    )


def make_engine(model: LanguageModel, *, parts: Mapping[str, Any] | None = None, **options: Any) -> LLMEngine:
    """An engine over a double, with every invariant checked at each step. `parts` are arguments of `parts_for`."""
    config = EngineConfig(**{"num_kv_blocks": 128, "debug_checks": True, **options})
    return LLMEngine(config=config, parts=parts_for(model, config, **(parts or {})))


def run_to_end(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; the outputs of each request in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def assert_quiet(engine: LLMEngine) -> None:
    """Nothing runs or waits, and no block is in use."""
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.blocks.used) == (0, 0, 0)
    assert not engine.has_unfinished_requests()
    engine.scheduler.check()
