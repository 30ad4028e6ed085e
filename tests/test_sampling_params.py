"""SamplingParams: what is valid, what is refused and how, and what an unset field becomes."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import SamplingParams

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]

REFUSED: list[tuple[str, Any]] = [
    # numbers out of range (F45)
    ("temperature", -3),
    ("temperature", -1e-9),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e300),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", -0.1),
    ("top_p", 1.0001),
    ("top_p", 7),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 2**63),
    ("top_k", 1.5),
    ("top_k", 5.0),
    ("min_p", -0.01),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.01),
    ("presence_penalty", -3),
    ("frequency_penalty", 3),
    ("frequency_penalty", math.nan),
    ("n", 0),
    ("n", -1),
    ("n", 10**6),
    ("best_of", 0),
    ("best_of", 2),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 10**5000),
    ("max_tokens", 1.0),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    # wrong types: booleans and strings are no numbers
    *[(name, wrong) for name in ("temperature", "top_p", "min_p", "n", "seed") for wrong in ("0.5", True, [], {})],
    *[(name, wrong) for name in ("top_k", "max_tokens", "min_tokens", "logprobs", "best_of") for wrong in ("2", True)],
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("skip_special_tokens", 0),
    ("include_stop_str_in_output", "no"),
    # texts
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", 5),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", b"bytes"),
    ("stop", ["x"] * 65),
    ("stop", "x" * 1025),
    ("bad_words", "x"),
    ("bad_words", [""]),
    ("bad_words", [5]),
    # token ids
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [True]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1.0]),
    ("allowed_token_ids", [10**30]),
    ("logit_bias", [1, 2]),
    ("logit_bias", "x"),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {True: 1}),
    ("logit_bias", {5: 101}),
    ("logit_bias", {5: -100.5}),
    ("logit_bias", {5: None}),
    ("logit_bias", {5: "x"}),
    ("logit_bias", {5: math.nan}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:30] if value != 10**5000 else "big")
def test_a_bad_value_is_refused_and_its_field_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert name in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [("top_k", 2**63, "from -1 to 2**63 - 1"), ("max_tokens", -1, "from 0 to 2**63 - 1"), ("n", 129, "from 1 to 128")],
)
def test_a_whole_number_out_of_range_is_refused_with_both_bounds(name: str, value: int, bounds: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name} must be a whole number {bounds}; got {value}"


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", 2.5, 2.5),
    ("temperature", 1e-5, 1e-5),
    ("temperature", 9.99e-6, 0.0),
    ("temperature", 1e-38, 0.0),
    ("temperature", Fraction(1, 2), 0.5),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", 0, 0),
    ("top_k", -1, 0),
    ("top_k", np.int64(5), 5),
    ("top_k", 10**6, 10**6),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 1e-6, 1e-6),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("n", 128, 128),
    ("best_of", 1, 1),
    ("seed", -(2**63), -(2**63)),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("seed", 0, 0),
    ("max_tokens", 1, 1),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("prompt_logprobs", 20, 20),
    ("stop", "end", ("end",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", [], ()),
    ("stop", "🥹龜", ("🥹龜",)),
    ("bad_words", ["x y"], ("x y",)),
    ("stop_token_ids", [3, np.int32(4)], (3, 4)),
    ("allowed_token_ids", range(3), (0, 1, 2)),
    ("logit_bias", {"12": 100, 7: -100}, {12: 100.0, 7: -100.0}),
    ("logit_bias", {}, {}),
]


@pytest.mark.parametrize(("name", "value", "kept"), ACCEPTED)
def test_a_good_value_is_kept_in_one_form(name: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize("name", FIELDS)
def test_null_is_the_same_as_leaving_the_field_out(name: str) -> None:
    assert SamplingParams(**{name: None}) == SamplingParams()


def test_best_of_must_equal_n() -> None:
    assert SamplingParams(n=3, best_of=3).best_of == 3
    for best_of in (1, 2, 4):
        with pytest.raises(InvalidRequestError, match=f"best_of={best_of}.*equals n \\(3\\)"):
            SamplingParams(n=3, best_of=best_of)


def test_zero_tokens_are_only_for_prompt_logprobs() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(max_tokens=0)
    assert error.value.param == "max_tokens"


def test_min_tokens_over_max_tokens_is_refused() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidRequestError, match="min_tokens=6 is more than max_tokens=5") as error:
        SamplingParams(min_tokens=6, max_tokens=5)
    assert error.value.param == "min_tokens"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    assert SamplingParams.from_fields({"top_k": 3}).top_k == 3
    with pytest.raises(InvalidRequestError, match=r"'topk'.*top_k") as error:
        SamplingParams.from_fields({"topk": 3})
    assert error.value.param == "topk"


def test_parameters_never_change() -> None:
    params = SamplingParams(logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_the_given_lists_and_objects_are_copied() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 3.0
    assert (params.stop, params.logit_bias) == (("a",), {1: 2.0})


# ---- resolving -----------------------------------------------------------------------------------------------------


def test_unset_fields_take_our_defaults() -> None:
    resolved = SamplingParams().resolve({})
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p) == (1.0, 1.0, 0, 0.0)
    assert (resolved.repetition_penalty, resolved.presence_penalty, resolved.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (resolved.seed, resolved.max_tokens, resolved.logprobs) == (None, None, None)


def test_generation_config_comes_before_our_defaults() -> None:
    resolved = SamplingParams(top_k=5).resolve({"temperature": 0.3, "top_k": 50, "max_tokens": 7})
    assert (resolved.temperature, resolved.top_k, resolved.max_tokens, resolved.top_p) == (0.3, 5, 7, 1.0)


@pytest.mark.parametrize(
    ("name", "explicit", "default"),
    [("temperature", 0, 0.7), ("temperature", 1.0, 0.7), ("top_k", 0, 50), ("top_p", 1.0, 0.9), ("min_p", 0, 0.1)],
)
def test_explicit_neutral_values_beat_generation_config(name: str, explicit: float, default: float) -> None:
    assert getattr(SamplingParams(**{name: explicit}).resolve({name: default}), name) == explicit


def test_a_default_for_max_tokens_is_checked_against_min_tokens() -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(min_tokens=9).resolve({"max_tokens": 8})
    assert error.value.param == "min_tokens"


def test_resolving_leaves_the_original_alone_and_is_stable() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={"3": 1})
    resolved = params.resolve({"top_k": 4})
    assert params.top_k is None
    assert resolved.resolve({"top_k": 9}) == resolved


@pytest.mark.parametrize(
    ("fields", "adjusts", "penalises"),
    [
        ({}, False, False),
        ({"temperature": 0.2, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "logit_bias": {}}, False, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"presence_penalty": 0.1}, True, True),
        ({"frequency_penalty": -0.1}, True, True),
        ({"logit_bias": {1: 0}}, True, False),
        ({"bad_words": ["x"]}, True, False),
        ({"allowed_token_ids": [0]}, True, False),
        ({"min_tokens": 1}, True, False),
    ],
)
def test_what_changes_logits_is_known_beforehand(fields: dict[str, Any], adjusts: bool, penalises: bool) -> None:
    resolved = SamplingParams(**fields).resolve({})
    assert (resolved.adjusts_logits, resolved.has_penalties) == (adjusts, penalises)


# ---- vocabulary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("logit_bias", {"99": 1}, {"100": 1}),
        ("allowed_token_ids", [0, 99], [100]),
        ("stop_token_ids", [99], [3, 10**9]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(name: str, good: Any, bad: Any) -> None:
    SamplingParams(**{name: good}).check_vocabulary(100)
    with pytest.raises(InvalidRequestError, match="0 to 99") as error:
        SamplingParams(**{name: bad}).check_vocabulary(100)
    assert error.value.param == name


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from(FIELDS), value=ANYTHING)
def test_whatever_is_given_is_either_valid_or_refused_with_its_name(name: str, value: Any) -> None:
    try:
        params = SamplingParams(**{name: value})
    except InvalidRequestError as error:
        assert error.param == name  # noqa: PT017
    else:
        assert params.resolve({}).temperature is not None


def test_no_torch_is_loaded() -> None:
    script = "import sys, mini_vllm.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
