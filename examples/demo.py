"""Three prompts to the default model, one after another, streaming: what `make demo` runs.

The first run fetches the model (93 MB, unpacked 98 MB) and keeps it; every other one works offline and starts in
seconds.
"""

from __future__ import annotations

import logging
from typing import Any

from mini_vllm import LLMEngine, RequestOutput


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the engine tells what it loads and what it uses
    engine = LLMEngine(model="smollm2-135m-instruct")

    # Messages go through the model's chat template and get an answer; a plain text is continued.
    explain = [{"role": "user", "content": "Explain KV cache in LLM inference."}]
    answer(engine, explain, max_tokens=128, temperature=0.8, top_p=0.9, seed=9)
    answer(engine, "The capital of France is", max_tokens=8, temperature=0)
    answer(engine, [{"role": "user", "content": "Why is the sky blue?"}], max_tokens=96, temperature=0)


def answer(engine: LLMEngine, prompt: Any, **sampling: Any) -> None:
    """The engine's loop: a request goes in, each step computes its next token, and its text comes out at once."""
    print(f"\n> {prompt if isinstance(prompt, str) else prompt[-1]['content']}")
    request_id = engine.add_request(prompt=prompt, **sampling)
    while True:
        for output in engine.step():
            print(output.text, end="", flush=True)  # the text since the last step
        if engine.is_finished(request_id):
            break
    print_figures(output)


def print_figures(output: RequestOutput) -> None:
    """Tokens in and out, time to first token, tokens a second after it."""
    metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    seconds = metrics.last_token_time - metrics.first_token_time
    print(
        f"\n[{len(output.prompt_token_ids)} tokens in, {num_tokens} out, first after "
        f"{metrics.time_to_first_token:.2f} s, {(num_tokens - 1) / seconds:.1f} tokens/s]"
    )


if __name__ == "__main__":
    main()
