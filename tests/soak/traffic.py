"""What the clients of the soak test send: a random mixture that depends on nothing but the seed.

Plan    one HTTP request, how its client behaves, and which statuses are right answers
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

WORDS = ("the", "cache", "of", "keys", "and", "values", "é", "日本", "🫠", "a b", "\n", "0123456789", "{", "stop")
LETTERS = [97 + place for place in range(26)]
CONTEXT = 256  # tokens; the model has one token a byte

COMPLETIONS, CHAT, GENERATE = TEXT_PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")


@dataclass(frozen=True)
class Plan:
    """One request.

    Args:
        path, body: what is sent; bytes are sent as they are.
        expected: statuses that are right.
        leaves_after: seconds, or events of a stream, after which the client closes the connection.
        pause: seconds that a slow reader sleeps between two reads.
        num_prompts, num_choices: of a request for text, else 0.
    """

    path: str
    body: dict[str, Any] | bytes | None = None
    expected: frozenset[int] = frozenset({200})
    leaves_after: float | int | None = None
    pause: float = 0.0
    num_prompts: int = 0
    num_choices: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))


class Traffic:
    """The requests of one client, in order.

    Args:
        seed: of the run.
        client: its number.
    """

    def __init__(self, seed: int, client: int) -> None:
        self._random = random.Random(f"{seed}/{client}")

    def next(self, *, polite: bool = False) -> Plan:
        """The next request; a polite client sends nothing wrong and reads every answer to its end."""
        draw = self._random
        kinds = [(self._text_request, 10)]
        if not polite:
            kinds += [(self._leaving, 3), (self._slow, 1), (self._bad, 3), (self._other, 2)]
        (kind,) = draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        return kind()

    def _text(self, longest: int) -> str:
        """Text of up to so many bytes, half of the time with a beginning that others have too."""
        draw = self._random
        start = "Answer as shortly as you can. " * draw.choice((0, 0, 1, 2))
        text = start + " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))
        return text.encode()[:longest].decode("utf-8", "ignore") or "x"

    def _prompts(self) -> list[Any]:
        draw = self._random
        count = draw.choice((1, 1, 1, 1, 2, 3))
        longest = draw.choice((10, 40, 150))
        if draw.random() < 0.3:
            return [draw.choices(range(256), k=draw.randint(1, longest)) for _ in range(count)]
        return [self._text(longest) for _ in range(count)]

    def _sampling(self) -> dict[str, Any]:
        """Some of the parameters, together such that they are allowed."""
        draw = self._random
        fields: dict[str, Any] = {
            "max_tokens": draw.choice((1, 3, 10, 30, 60)),
            "temperature": draw.choice((0, 0.7, 1)),
        }
        options: list[dict[str, Any]] = [
            {"n": draw.randint(2, 4)},
            {"seed": draw.randrange(2**32)},
            {"top_k": draw.randint(1, 50)},
            {"top_p": draw.uniform(0.1, 1)},
            {"min_p": draw.uniform(0, 0.5)},
            {"repetition_penalty": draw.uniform(0.8, 1.5)},
            {"presence_penalty": draw.uniform(-1, 1), "frequency_penalty": draw.uniform(-1, 1)},
            {"stop": draw.choice(("e", ["a", "bc"], ["zz"]))},
            {"ignore_eos": True},
            {"logit_bias": {str(draw.choice(LETTERS)): draw.uniform(-100, 100)}},
            {"prompt_logprobs": draw.randint(0, 3)},
            {"cache_salt": draw.choice("xyz")},
            {"return_token_ids": True},
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            draw.choice(  # of these no two, which could leave no token to choose
                [
                    {"bad_words": ["a", "the"]},
                    {"allowed_token_ids": LETTERS},
                    {"structured_outputs": {"choice": ["yes", "no"]}},
                    {"structured_outputs": {"regex": "[a-f]{3,40}"}},
                    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
                ]
            ),
        ]
        for option in draw.sample(options, draw.choice((0, 0, 1, 2, 3))):
            fields.update(option)
        return fields

    def _text_request(self) -> Plan:
        draw = self._random
        body = self._sampling()
        path = draw.choices((COMPLETIONS, CHAT, GENERATE), (5, 3, 1))[0]
        prompts: list[Any] = [None]
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": self._text(60)}]
            if draw.random() < 0.2:
                body.update(logprobs=True, top_logprobs=draw.randint(0, 5))
        else:
            prompts = self._prompts()
            body["prompt"] = prompts if len(prompts) > 1 or draw.random() < 0.5 else prompts[0]
            if path == COMPLETIONS and draw.random() < 0.2:
                body.update(logprobs=draw.randint(0, 5), echo=draw.random() < 0.5)
        if draw.random() < 0.5:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return Plan(path, body, num_prompts=len(prompts), num_choices=len(prompts) * body.get("n", 1))

    def _leaving(self) -> Plan:
        """A client that closes its connection at a random time, streaming or not."""
        draw = self._random
        plan = self._text_request()
        assert isinstance(plan.body, dict)
        body = {**plan.body, "max_tokens": 60, "ignore_eos": True}
        after = draw.randint(0, 10) if plan.is_streamed and draw.random() < 0.7 else draw.uniform(0, 0.5)
        return Plan(plan.path, body, leaves_after=after, num_prompts=plan.num_prompts, num_choices=plan.num_choices)

    def _slow(self) -> Plan:
        """A client that reads seldom, of an answer that is large."""
        body = {"prompt": self._text(40), "max_tokens": 100, "n": 2, "ignore_eos": True, "logprobs": 20, "stream": True}
        body["stream_options"] = {"include_usage": True}
        return Plan(COMPLETIONS, body, pause=self._random.uniform(0.01, 0.1), num_prompts=1, num_choices=2)

    def _bad(self) -> Plan:
        """A request that must be refused, whatever else goes on."""
        draw = self._random
        fields: dict[str, Any] = draw.choice(
            [
                {"temperature": -1},
                {"max_tokens": 10**6},
                {"prompt": "x" * 400},
                {"prompt": [9999]},
                {"prompt": ["fine", ""]},
                {"n": 1000},
                {"structured_outputs": {"regex": "(["}},
                {"structured_outputs": {"json": {"type": "nonsense"}}},
                {"logit_bias": {"100000": 1}},
                {"stop": [""]},
                {"stream_options": {"include_usage": True}},
                {"stream": True, "prompt": []},
                {"cache_salt": ""},
            ]
        )
        refused = frozenset({400})
        json_type = {"content-type": "application/json"}
        return draw.choice(
            [
                Plan(COMPLETIONS, {"prompt": "a", **fields}, refused),
                Plan(COMPLETIONS, b"[" * draw.choice((1, 50_000)), refused, headers=json_type),
                Plan(CHAT, b"\xff\xfe" * 10, refused, headers=json_type),
                Plan(CHAT, {"messages": [{"role": "user"}]}, refused),
                Plan(COMPLETIONS, {"prompt": "a", "model": "another"}, frozenset({404})),
                Plan("/v1/nothing", {}, frozenset({404})),
                Plan(COMPLETIONS, b" " * 300_000, frozenset({413}), headers=json_type),
            ]
        )

    def _other(self) -> Plan:
        """What monitors and tools ask."""
        return self._random.choice(
            [
                Plan("/health"),
                Plan("/metrics"),
                Plan("/v1/models"),
                Plan("/tokenize", {"prompt": self._text(150) * 20}),
                Plan("/detokenize", {"tokens": self._random.choices(range(256), k=500)}),
            ]
        )
