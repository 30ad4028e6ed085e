"""The families of models: one small file for each line of descent.

Where it stands: `architectures.py` lists them all; what they share is in `common.py`.

What always holds: a family is data. It says how its `config.json` is read into a `ModelConfig` and what its checkpoints
call their tensors; the one `Transformer` does the computing.

In vLLM: `vllm/model_executor/models/`, a file a model, each with layers of its own.
"""
