"""Reading the tokenizer files of a model directory, as Hugging Face lays them out.

Where it stands: below `load_tokenizer`. Four kinds of source end in the same `TokenizerParts`: a `tokenizer.json`, a
SentencePiece `tokenizer.model`, a `vocab.json` with `merges.txt`, and a GGUF file (whose metadata `gguf_tokenizer.py`
turns into such a directory first).

    tokenizer.json            the tokenizer itself; its post-processor alone says whether BOS is added
    tokenizer.model           SentencePiece, read when there is no tokenizer.json
    vocab.json, merges.txt    byte-level BPE, read when there is neither
    added_tokens.json         more added tokens, in older models
    tokenizer_config.json     names of special tokens, more added tokens, chat template(s)
    special_tokens_map.json   names of special tokens, in older models
    chat_template.jinja, chat_template.json, additional_chat_templates/*.jinja

What always holds: the ids are those that the transformers library gives for the same directory.

In vLLM: `vllm/tokenizers/hf.py`, which leaves this to `transformers.AutoTokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from mini_vllm.errors import ModelLoadError
from mini_vllm.json_text import parse_json
from mini_vllm.tokenizer.sentencepiece_tokenizer import read_sentencepiece_model
from mini_vllm.tokenizer.vocab_and_merges import has_vocab_and_merges, read_vocab_and_merges

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # one of them is the tokenizer itself
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerParts:
    """All that a `Tokenizer` is made of.

    Args:
        backend: the `tokenizers` object, with all added and special tokens.
        special_tokens: names and texts: {"bos_token": "<s>", ...}.
        eos_token_ids: ids that end a sequence beside the one of "eos_token".
        chat_templates: Jinja sources by name; the usual one is named "default".
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    chat_templates: Mapping[str, str]


def read_tokenizer_directory(directory: Path) -> TokenizerParts:
    """Read a directory's tokenizer.

    Raises:
        ModelLoadError: there is none, or a file is damaged.
        UnsupportedModelError: a tokenizer of a kind that is not implemented.
    """
    config = _read_json_object(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _read_json_object(directory / "special_tokens_map.json"))
    if (directory / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(directory / "tokenizer.json")
    elif (directory / "tokenizer.model").is_file():
        sentencepiece = read_sentencepiece_model(directory / "tokenizer.model", config)
        backend = sentencepiece.backend
        special_tokens = {**sentencepiece.special_tokens, **special_tokens}
    elif has_vocab_and_merges(directory):
        byte_level = read_vocab_and_merges(directory, config, special_tokens)
        backend = byte_level.backend
        special_tokens = {**byte_level.special_tokens, **special_tokens}
    else:
        raise ModelLoadError(
            f"No tokenizer in {directory}: looked for tokenizer.json, tokenizer.model, and vocab.json with merges.txt. "
            "Download the model's tokenizer files into that directory (other formats can be converted to "
            "tokenizer.json with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))."
        )
    if "added_tokens_decoder" not in config:
        config["added_tokens_decoder"] = _older_added_tokens(directory / "added_tokens.json", special_tokens)
    try:
        _add_tokens_of_config(backend, config, special_tokens)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelLoadError(
            f"The added tokens in {directory / 'tokenizer_config.json'} are not of the usual form ({error})."
        ) from error
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=frozenset(int(token_id) for token_id in config.get("eos_token_ids", ())),
        chat_templates=_chat_templates(directory, config),
    )


def decoder_section(backend: Backend) -> Mapping[str, Any] | None:
    """The "decoder" entry of the backend's JSON, without writing out its whole vocabulary."""
    if backend.decoder is None:
        return None
    section: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    return section


def _read_tokenizer_json(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ModelLoadError(
            f"{path} cannot be read ({error}). Download it again, or update the `tokenizers` package if it is newer."
        ) from error


def _read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file's object, or {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}, not an object. Download it again.")
    return content


def _special_tokens(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of special tokens. The map counts only for models from before `added_tokens_decoder`."""
    sources = [special_tokens_map, config] if "added_tokens_decoder" in config else [config, special_tokens_map]
    found: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _add_tokens_of_config(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add the tokens that only `tokenizer_config.json` knows, in the order of their ids, then mark the named ones.

    A token that the backend has already keeps its id and takes the flags of the config.
    """
    known = backend.get_added_tokens_decoder()
    decoder = {
        int(token_id): AddedToken(
            token["content"], **{name: token[name] for name in _ADDED_TOKEN_FLAGS if name in token}
        )
        for token_id, token in config.get("added_tokens_decoder", {}).items()
    }
    for token_id, token in sorted(decoder.items()):
        if repr(known.get(token_id)) != repr(token):
            backend.add_tokens([token])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra_texts = [token["content"] if isinstance(token, dict) else str(token) for token in _values(extra)]
    by_text = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in [*special_tokens.values(), *extra_texts]:
        if text not in by_text or not by_text[text].special:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _older_added_tokens(path: Path, special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """What `added_tokens.json` ({"<tool>": 50257, ...}) says, as `added_tokens_decoder` would."""
    added: dict[str, Any] = {}
    for text, token_id in _read_json_object(path).items():
        is_special = text in special_tokens.values()
        added[str(token_id)] = {"content": text, "special": is_special, "normalized": not is_special}
    return added


def _values(tokens: Any) -> list[Any]:
    return list(tokens.values()) if isinstance(tokens, dict) else list(tokens)


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Separate files come before what the tokenizer's config has, as in transformers."""
    templates: dict[str, str] = {}
    default_file = directory / "chat_template.jinja"
    if default_file.is_file():
        templates["default"] = default_file.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if templates:
        return templates
    from_processor = _read_json_object(directory / "chat_template.json").get("chat_template")
    return templates_by_name(config.get("chat_template") or from_processor, where=str(directory))


def templates_by_name(value: Any, *, where: str) -> dict[str, str]:
    """A template, a list of {"name", "template"}, or an object of templates -> templates by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        pairs = value.items() if isinstance(value, dict) else [(entry["name"], entry["template"]) for entry in value]
        return {str(name): str(template) for name, template in pairs}
    except (TypeError, KeyError) as error:
        raise ModelLoadError(
            f"The chat_template in {where} is neither a string nor a list of objects with name and template."
        ) from error
