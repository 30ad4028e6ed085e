"""The commands of `mini-vllm`, one file a command; `mini_vllm/cli.py` puts them together.

    generate.py   chat.py   serve.py   pull.py   models.py   doctor.py   explain.py

and what they share:

    dataclass_flags.py   one flag a field of EngineConfig and SamplingParams
    terminal.py          what stderr shows beside the answers: notes, a spinner, the log
    start_engine.py      from an EngineConfig to a running engine
    prompts.py           where the prompts of `generate` come from
    answers.py           answers on stdout, in the order of their prompts, as text or as JSON lines
    figures.py           the line of figures after an answer

What always holds: stdout carries answers (or what a command was asked for) and nothing else. Importing any of these
loads no torch, so that `mini-vllm --help` is quick; what is heavy is imported inside the functions that need it.

In vLLM: `vllm/entrypoints/cli/`.
"""
