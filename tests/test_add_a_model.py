"""A model of one's own: `examples/add_a_model.py` against the transformers library, and how the engine is told of it.

To test a model of yours, copy the first test: name your class and architecture, and build a tiny random model of it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import write_byte_tokenizer
from paged_helpers import decode_greedily
from tiny_models import TinyModel, build_tiny_model, some_tokens
from torch import Tensor, nn

from mini_vllm.errors import InvalidConfigError, ModelLoadError, UnsupportedModelError
from mini_vllm.model import registry
from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
from mini_vllm.model.loader import LoadedModel, load_model
from mini_vllm.model.registry import register_model
from mini_vllm.model.weight_map import WeightSpec
from mini_vllm.store.model_store import ModelFiles

EXAMPLES = Path(__file__).parents[1] / "examples"
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def build_opt(directory: Path, **changes: Any) -> TinyModel:
    sizes = {"word_embed_proj_dim": 32, "ffn_dim": 48, "vocab_size": 257, "pad_token_id": 0, "eos_token_id": 256}
    return build_tiny_model(directory, "OPTForCausalLM", **{**sizes, **changes})


def load(directory: Path, model_impl: str = "add_a_model:OPT", **options: Any) -> LoadedModel:
    return load_model(ModelFiles("tiny", directory, "safetensors"), dtype="float32", model_impl=model_impl, **options)


def test_prefill_in_chunks_and_40_decodes_give_the_logits_and_tokens_of_transformers(tmp_path: Path) -> None:
    tiny = build_opt(tmp_path)  # a random model of the transformers library, saved to disk
    model = load(tmp_path).model  # yours, with those weights
    prompts = [some_tokens(length, vocab_size=257, seed=length) for length in (1, 9, 24)]
    for prompt, sequence in zip(prompts, decode_greedily(model, prompts, num_tokens=40, chunk_size=7), strict=True):
        expected = tiny.logits(sequence.token_ids)[:-1]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=TOLERANCE, rtol=0)
        assert sequence.token_ids[len(prompt) :] == expected[len(prompt) - 1 :].argmax(dim=-1).tolist()


def test_the_example_has_under_100_lines_and_answers(tmp_path: Path) -> None:
    assert len((EXAMPLES / "add_a_model.py").read_text().splitlines()) < 100
    build_opt(tmp_path)
    write_byte_tokenizer(tmp_path)
    command = [sys.executable, "add_a_model.py", str(tmp_path), "Hello"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_what_the_example_does_not_do_it_refuses(tmp_path: Path) -> None:
    build_opt(tmp_path, word_embed_proj_dim=16)
    with pytest.raises(UnsupportedModelError, match="projected embeddings"):
        load(tmp_path)


# ---- how the engine is told ------------------------------------------------------------------------------------------


def test_a_class_that_an_installed_package_brings_is_found_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_opt(tmp_path)
    installed = EntryPoint("OPTForCausalLM", "add_a_model:OPT", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda *, group, name: [installed] if name == installed.name else [])
    example = importlib.import_module("add_a_model")
    assert isinstance(load(tmp_path, model_impl="auto").model, example.OPT)
    assert not isinstance(load(tmp_path, model_impl="transformers").model, example.OPT)


def test_without_being_told_the_engine_does_not_take_it(tmp_path: Path) -> None:
    build_opt(tmp_path)
    example = importlib.import_module("add_a_model")
    assert not isinstance(load(tmp_path, model_impl="auto").model, example.OPT)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_module:OPT", "No module named 'no_such_module'"),
        ("add_a_model:Nothing", "has no attribute 'Nothing'"),
        ("add_a_model:Layer", "the class marked with @register_model"),
        (":OPT", "Empty module name"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error(tmp_path: Path, reference: str, message: str) -> None:
    build_opt(tmp_path)
    with pytest.raises(InvalidConfigError, match=message):
        load(tmp_path, model_impl=reference)


def test_a_class_for_another_architecture_is_refused(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(InvalidConfigError, match=r"registered for OPTForCausalLM, but .*LlamaForCausalLM"):
        load(tmp_path)


def test_the_decorator_refuses_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="needs names of architectures"):
        register_model()
    with pytest.raises(TypeError, match=r"Empty must be a torch\.nn\.Module .*; it lacks forward, logits, layer_specs"):

        @register_model("EmptyForCausalLM")
        class Empty:
            pass


# ---- loading ---------------------------------------------------------------------------------------------------------


@register_model("LlamaForCausalLM")
class Counting(nn.Module):
    """One joined matrix, and a table that is computed."""

    table_device = "cpu"

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.both = nn.Parameter(
            torch.zeros(2 * config["vocab_size"], config["hidden_size"], dtype=dtype, device=device)
        )
        self.register_buffer("table", torch.arange(4.0, device=self.table_device), persistent=False)

    def weight_map(self) -> list[WeightSpec]:
        return [WeightSpec("both", ("model.embed_tokens.weight", "lm_head.weight"), ((97, 32), (97, 32)))]

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        return []

    def forward(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        return self.both[input_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.both[97:].T


class OnMeta(Counting):
    """The table on the device of the parameters, where it has no values."""

    table_device = "meta"


def test_a_weight_map_joins_tensors_and_tables_keep_their_values(tmp_path: Path) -> None:
    tiny = build_tiny_model(tmp_path, "LlamaForCausalLM")
    model: Any = load(tmp_path, model_impl=f"{__name__}:Counting").model
    expected = [tiny.reference.model.embed_tokens.weight, tiny.reference.lm_head.weight]
    assert torch.equal(model.both, torch.cat(expected))
    assert model.table.tolist() == [0, 1, 2, 3]
    assert not model.both.requires_grad and not model.training


def test_a_table_without_values_is_an_error(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ModelLoadError, match=r"table of OnMeta was not filled .* device=\"cpu\""):
        load(tmp_path, model_impl=f"{__name__}:OnMeta")


def test_a_tensor_that_the_checkpoint_lacks_is_an_error(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    with pytest.raises(ModelLoadError, match=r"lacks the tensor lm_head\.weight"):
        load(tmp_path, model_impl=f"{__name__}:Counting")


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    build_opt(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, load_format="dummy").model
    assert decode_greedily(model, [[1]], num_tokens=1, chunk_size=1)[0].logits[0].std() > 0
