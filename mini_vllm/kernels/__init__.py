"""Fast twins of reference functions: the same results, computed by code made for one kind of processor.

Where it stands: below the model, which takes a twin where one fits. Nothing here knows of models, requests or caches.

    cpu/    C++ for x86 and ARM processors, built on the machine at first use

What always holds: every kernel has a plain PyTorch function beside it that says what is right, and a test that holds
the two together.

In vLLM: `csrc/`, and `vllm/_custom_ops.py` above it.
"""
