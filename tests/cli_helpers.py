"""A tiny model on disk for the command line, and two ways to run a command on it.

The model is random and its tokenizer has one token a byte: the id of "a" is known, so with --allowed-token-ids it has
to say "aaa".
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_models import build_tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mini_vllm import cli

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
A, B = _ALPHABET.index("a"), _ALPHABET.index("b")
EOS = 256
CONTEXT_SIZE = 2048
CHAT_TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"


def build_cli_model(directory: Path) -> Path:
    """A model directory: random weights, 256 byte tokens and <eos>, a chat template."""
    build_tiny_model(
        directory,
        "LlamaForCausalLM",
        vocab_size=257,
        num_hidden_layers=1,
        max_position_embeddings=CONTEXT_SIZE,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    (directory / "generation_config.json").unlink(missing_ok=True)
    write_byte_tokenizer(directory)
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """The files of a tokenizer of 256 bytes and <eos>, which is 256."""
    tokenizer = Tokenizer(models.BPE(vocab={character: place for place, character in enumerate(_ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[dict[str, object]]:
        """Its output as JSON lines."""
        return [json.loads(line) for line in self.stdout.split("\n")[:-1]]


class CommandLine:
    """Runs `mini-vllm` in this process, with its output in pipes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        self._monkeypatch = monkeypatch
        self._capture = capfdbinary

    def __call__(self, *arguments: str | Path, stdin: bytes = b"") -> Result:
        logger = logging.getLogger("mini_vllm")
        level, handlers = logger.level, logger.handlers
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["mini-vllm", *map(str, arguments)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
            with pytest.raises(SystemExit) as leaving:
                cli.main()
        logger.setLevel(level)  # the command has set up the log for a process of its own
        logger.handlers = handlers
        output = self._capture.readouterr()
        code = leaving.value.code
        return Result(code if isinstance(code, int) else 0, output.out.decode(), output.err.decode())


def start_process(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "mini_vllm", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
