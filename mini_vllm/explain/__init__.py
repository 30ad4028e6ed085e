"""What `mini-vllm explain` shows: the engine's steps as sentences and pictures.

    events of one step --> observer (what stands where) --> story (sentences), lessons (each once), picture (the pool)
                                                     `---> narrator, which prints them

Nothing here changes the engine; it listens to the events and reads the scheduler's public state between steps.

In vLLM: nothing.
"""
