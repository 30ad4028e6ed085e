"""Text to token ids and back: tokenizers, chat templates, incremental detokenisation. No torch in here.

    chat_messages -> chat_template -> text -> tokenizer.encode -> ids ... sampled ids -> detokenizer -> streamed text

`tokenizer.py` is where to begin; `tokenizer_files.py`, `sentencepiece_tokenizer.py` and `gguf_tokenizer.py` read the
three kinds of files that models come with, and `decoding.py` holds how token strings spell text.

In vLLM: `vllm/tokenizers/`, `vllm/renderers/` and `vllm/v1/engine/detokenizer.py`.
"""
