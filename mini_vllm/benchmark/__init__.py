"""Benchmarks: what the engine does in a second, what a request waits, and what each idea of it buys.

    options -> workload -> runner (the real engine, step by step)      -> throughput | latency | ladder -> report
                        -> load_client (HTTP, any server)              -> serving                       -> report
                        -> peers (a fresh process for each engine)     -> compare                       -> report

A report is a dictionary: its header says what was measured and on what; it becomes a table, JSON or Markdown.

Importing any of it loads no torch; running does, except for `serving`. In vLLM: `vllm/benchmarks/`.
"""
