"""C++ kernels for processors.

    build.py    finds or builds the library, loads it, and says why it cannot be used
    ops.py      the kernels as typed Python functions
    csrc/       vector.h        sixteen lanes, pairs of bfloat16: what the others are written with
                linear.h        y = x W^T with packed weights
                attention.h     PagedAttention, prefill and decode
                elementwise.h   norm, rotary embedding, gate
                decoder.h       layers made of these; share_out.h says which thread computes which sequences
                sampler.h       one pass over a row of logits
                ops.cpp         all of it as operators of PyTorch

In vLLM: `csrc/cpu/`.
"""
