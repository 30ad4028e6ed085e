"""An engine without a model, for the listeners: each prompt has a written answer, and a token is a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.config import EngineConfig
from mini_vllm.engine.events import EventListener
from mini_vllm.engine.input_processor import ModelFacts
from mini_vllm.engine.llm_engine import EngineParts, LLMEngine
from mini_vllm.engine.scheduled_batch import ModelOutput, SampledToken, ScheduledBatch
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.outputs import RequestOutput
from mini_vllm.tokenizer.chat_template import ChatTemplate
from mini_vllm.tokenizer.tokenizer import Tokenizer as EngineTokenizer
from mini_vllm.tokenizer.tokenizer_files import TokenizerParts
from mini_vllm.worker.memory import PoolPlan, slot_size

VOCABULARY = [chr(code) for code in range(32, 127)]  # printable ASCII
EOS = len(VOCABULARY)


class FakeClock:
    """Each look at it is a millisecond later."""

    def __init__(self) -> None:
        self.milliseconds = 0

    def __call__(self) -> float:
        self.milliseconds += 1
        return self.milliseconds / 1000


class WrittenAnswers:
    """An executor that says what is written, and then EOS.

    Args:
        answers: prompt -> its answer, or one answer for each sibling.
    """

    def __init__(self, config: EngineConfig, answers: Mapping[str, str | Sequence[str]]) -> None:
        self._config = config
        self._answers = {prompt: [text] if isinstance(text, str) else list(text) for prompt, text in answers.items()}

    def plan_pool(self, max_model_len: int) -> PoolPlan:
        num_blocks = self._config.num_kv_blocks or 12
        size = slot_size(self._config, max_model_len)
        return PoolPlan(num_blocks, size, min(max_model_len, num_blocks * size), block_bytes=8192)

    def allocate(self, plan: PoolPlan, table: SequenceTable) -> None:
        self._table = table

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """There are no keys and values to copy."""

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        tokens = []
        for draw in batch.draws:
            row = batch.sequences[draw.sequence].row
            num_prompt_tokens = int(self._table.num_prompt_tokens[row])
            prompt = "".join(VOCABULARY[token] for token in self._table.token_ids[row, :num_prompt_tokens])
            answer = self._answers[prompt][draw.sample_index]
            place = draw.position - num_prompt_tokens
            tokens.append(SampledToken(VOCABULARY.index(answer[place]) if place < len(answer) else EOS))
        return ModelOutput(tokens, [])

    def shutdown(self) -> None:
        pass


def character_tokenizer() -> EngineTokenizer:
    spelling = {"Ġ" if text == " " else text: token for token, text in enumerate(VOCABULARY)}
    backend = Tokenizer(models.BPE(vocab=spelling, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return EngineTokenizer(TokenizerParts(backend, {"eos_token": "<eos>"}, frozenset(), {}))


def written_engine(
    answers: Mapping[str, str | Sequence[str]], listener: EventListener | None = None, **options: object
) -> LLMEngine:
    """An engine over `answers`; `options` are fields of EngineConfig."""
    config = EngineConfig(**{"block_size": 4, "num_kv_blocks": 12, "debug_checks": True, **options})  # type: ignore[arg-type]
    tokenizer = character_tokenizer()
    parts = EngineParts(
        executor=WrittenAnswers(config, answers),
        tokenizer=tokenizer,
        chat_template=ChatTemplate({}, {}),
        facts=ModelFacts(len(VOCABULARY) + 1, frozenset({EOS}), {}),
        max_model_len=256,
        model_name="written",
    )
    return LLMEngine(config=config, parts=parts, listener=listener)


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the final output of each request."""
    finished = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    return finished
