"""`LLM`: the engine for scripts. Prompts in, all answers out.

Where it stands: a loop around `LLMEngine.step`; it adds nothing to the engine but the order of the results.

In vLLM: `vllm/entrypoints/llm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.engine.prompts import Prompt, prompts_in
from mini_vllm.errors import InvalidRequestError
from mini_vllm.outputs import RequestOutput
from mini_vllm.sampling_params import SamplingParams


class LLM:
    """A model ready to generate. For one thread; `AsyncLLMEngine` serves many callers at once.

    Args:
        model: a known short name, a local directory, a local `.gguf` file, or a Hugging Face id.
        options: fields of `EngineConfig` by name; or anything `LLMEngine` takes.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.engine = LLMEngine(model, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many. They are batched together.

        Args:
            prompts: one prompt or a list of them: text, token ids, chat messages, `{"prompt": text}`, or
                `{"prompt_token_ids": ids}`.
            sampling_params: one for all, or one for each prompt.

        Returns:
            One finished output a prompt, in the order given.

        Raises:
            InvalidRequestError: a prompt or a parameter is refused; then none of them is answered.

        Requests that `engine` holds of its own are computed beside these; `engine.step` returns their outputs later.
        """
        return self._run(prompts_in(prompts), sampling_params, {})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Continue one conversation or many, each a list of messages (`{"role": ..., "content": ...}`).

        Args:
            template_options: `add_generation_prompt`, `continue_final_message`, `tools`, `template_kwargs`.

        Returns, Raises: as `generate`.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidRequestError("messages must be a non-empty list of messages", param="messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        return self._run(cast("list[Prompt]", conversations), sampling_params, template_options)

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        template_options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        finished: dict[str, RequestOutput] = {}
        of_others: list[RequestOutput] = []  # the engine may hold requests of its own, too
        request_ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                request_ids.append(
                    self.engine.add_request(prompt, one, template_options=template_options, only_final=True)
                )
            waiting = set(request_ids)
            while waiting:
                for output in self.engine.step():
                    if output.request_id in waiting:  # only its final output comes
                        waiting.remove(output.request_id)
                        finished[output.request_id] = output
                    else:
                        of_others.append(output)
        except BaseException:  # also Ctrl-C: nothing of this call may be left in the engine for the next one
            for request_id in request_ids:
                self.engine.abort_request(request_id)
            self.engine.drop_outputs(request_ids)
            raise
        finally:  # not before: the next step of this call would return them at once
            self.engine.return_outputs(of_others)
        return [finished[request_id] for request_id in request_ids]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        raise InvalidRequestError(
            f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}",
            param="sampling_params",
        )
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} prompts and {len(params)} sampling_params; give one for all or one each", param="sampling_params"
        )
    return list(params)
