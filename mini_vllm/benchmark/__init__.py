"""Benchmarks: what the engine does in a second, what a request waits, and what each idea of it buys.

    workload -> runner (the real engine, step by step) -> throughput | latency | ladder -> report (table, JSON)

Importing any of it loads no torch; running does. In vLLM: `vllm/benchmarks/`.
"""
