"""Structured output: the answer has the form that was asked for, whatever the model says.

The models are a tiny random transformer, which knows nothing of any form, and scripted ones. The oracle of JSON is the
`jsonschema` library.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jsonschema
import pytest
from engine_doubles import (
    BYTE_VOCAB_SIZE,
    EOS,
    TOOL,
    ScriptedModel,
    assert_quiet,
    byte_tokenizer,
    make_engine,
    run_to_end,
    says,
    tiny_transformer,
)
from torch import Tensor

from mini_vllm import SamplingParams, StructuredOutputsParams
from mini_vllm.engine.grammar import GrammarCompiler
from mini_vllm.errors import InvalidRequestError
from mini_vllm.outputs import CompletionOutput, FinishReason, RequestOutput
from mini_vllm.structured_outputs import MAX_FORM_DEPTH, MAX_FORM_LENGTH

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {}
for _ in range(200):
    NESTED = {"type": "array", "items": NESTED}


def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), BYTE_VOCAB_SIZE, frozenset({EOS}))


def allowed(mask: Any) -> set[int]:
    return {token_id for token_id in range(32 * len(mask)) if mask[token_id // 32] >> (token_id % 32) & 1}


def letters(text: str) -> set[int]:
    return set(text.encode())


def final(
    model: Any = None, prompt: str = "Say it", parts: Mapping[str, Any] | None = None, **params: Any
) -> RequestOutput:
    """One request through a fresh engine, to the end."""
    engine = make_engine(model or tiny_transformer(), parts=parts)
    request_id = engine.add_request(prompt, **{"max_tokens": 120, "temperature": 1, "seed": 1, **params})
    outputs = run_to_end(engine)[request_id]
    assert_quiet(engine)
    assert "".join(output.text for output in outputs) == outputs[-1].outputs[0].text or params.get("n", 1) > 1
    return outputs[-1]


def answer(form: Mapping[str, Any], model: Any = None, **params: Any) -> CompletionOutput:
    return final(model, structured_outputs=form, **params).outputs[0]


def wanting(text: str, ending: int = EOS) -> ScriptedModel:
    """A model that writes exactly this, if it may."""
    return ScriptedModel(says([*text.encode(), ending], len("Say it")))


# ---- the compiler and its states ----------------------------------------------------------------------------------


def test_an_end_of_sequence_is_allowed_exactly_where_the_answer_is_complete() -> None:
    state = compiler().compile(StructuredOutputsParams(regex="ab?")).new_state()
    assert allowed(state.mask()) == letters("a") and not state.is_finished
    state.advance(ord("a"))
    assert allowed(state.mask()) == letters("b") | {EOS} and not state.is_finished
    state.advance(ord("b"))
    assert allowed(state.mask()) == {EOS} and state.is_finished


def test_states_of_one_grammar_do_not_move_each_other() -> None:
    grammar = compiler().compile(StructuredOutputsParams(choice=["ax", "by"]))
    first, second = grammar.new_state(), grammar.new_state()
    first.advance(ord("a"))
    assert allowed(first.mask()) == letters("x") and allowed(second.mask()) == letters("ab")


def test_a_token_that_is_not_allowed_is_an_error_and_allows_nothing() -> None:
    state = compiler().compile(StructuredOutputsParams(regex="ab")).new_state()
    state.advance(ord("z"))
    assert state.error is not None and allowed(state.mask()) == set() and not state.is_finished


def test_special_tokens_and_ids_without_text_are_never_allowed() -> None:
    wide = GrammarCompiler(byte_tokenizer(), BYTE_VOCAB_SIZE + 50, frozenset({EOS}))
    state = wide.compile(StructuredOutputsParams(regex="(?s:.*)")).new_state()
    assert max(allowed(state.mask())) == EOS and TOOL not in allowed(state.mask())


def test_every_end_of_sequence_ends_an_answer() -> None:
    both = GrammarCompiler(byte_tokenizer(), BYTE_VOCAB_SIZE, frozenset({EOS, TOOL}))
    state = both.compile(StructuredOutputsParams(regex="a*")).new_state()
    assert allowed(state.mask()) == letters("a") | {EOS, TOOL}


def test_the_same_form_is_compiled_once() -> None:
    one = compiler()
    assert one.compile(StructuredOutputsParams(json=PERSON)) is one.compile(
        StructuredOutputsParams(json=json.dumps(PERSON, ensure_ascii=False))
    )


def test_a_client_cannot_lift_the_bounds_of_white_space() -> None:
    form = StructuredOutputsParams(json={"type": "array", "x-guidance": {"whitespace_pattern": r"\s*"}})
    state = compiler().compile(form).new_state()
    for character in "[  ":
        state.advance(ord(character))
    assert not letters(" \n\t") & allowed(state.mask())


def test_a_model_without_an_end_of_sequence_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        GrammarCompiler(byte_tokenizer(), BYTE_VOCAB_SIZE, frozenset()).compile(StructuredOutputsParams(regex="a"))


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({}, "exactly one"),
        ({"choice": ["a"], "regex": "b"}, "regex and choice"),
        ({"nonsense": 1}, "unknown field"),
        ({"json": {"type": "not-a-type"}}, "not-a-type"),
        ({"json": "{not json"}, "not a JSON schema"),
        ({"json": "[" * 50_000}, "nested deeper|not a JSON schema"),
        ({"json": 5}, "an object"),
        ({"json": ""}, "not empty"),
        ({"json": {"const": object()}}, "not a JSON schema"),
        ({"json": NESTED}, f"deeper than {MAX_FORM_DEPTH}"),
        ({"json": {"description": "x" * MAX_FORM_LENGTH}}, f"at most {MAX_FORM_LENGTH}"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "zzz"}}, "zzz"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "no text satisfies"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"regex": "(["}, "unclosed"),
        ({"regex": 5}, "a text"),
        ({"regex": ""}, "not empty"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 1000 + "a" + ")" * 1000}, f"deeper than {MAX_FORM_DEPTH}"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": "root ::= ((("}, "Expected"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "root ::= root"}, "no text satisfies"),
        ({"grammar": ""}, "not empty"),
        ({"grammar": "no grammar at all"}, "Expected"),
        ({"grammar": 'root ::= ""'}, "but the empty one"),
        ({"grammar": "root ::= "}, "but the empty one"),
        ({"grammar": "start: "}, "but the empty one"),
        ({"grammar": "start: a\na:"}, "but the empty one"),
        ({"regex": "()"}, "but the empty one"),
        ({"choice": []}, "at least one"),
        ({"choice": "yes"}, "a list"),
        ({"choice": [1]}, "only texts"),
        ({"choice": [""]}, "not empty"),
        ({"choice": ["a"] * 1025}, "at most 1024"),
        ({"json_object": False}, "must be true"),
        ({"json_object": 1}, "must be true"),
    ],
    ids=range(39),
)
def test_a_form_that_cannot_be_had_is_refused_with_the_reason(form: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        compiler().compile(StructuredOutputsParams.from_fields(form))
    assert refused.value.param == "structured_outputs" and len(str(refused.value)) < 600


@pytest.mark.parametrize("form", ["json", 5, ["a"]])
def test_what_is_no_form_is_refused(form: Any) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs must be"):
        SamplingParams(structured_outputs=form)


def test_a_refused_form_leaves_the_engine_as_it_was() -> None:
    engine = make_engine(tiny_transformer())
    with pytest.raises(InvalidRequestError):
        engine.add_request("x", structured_outputs={"regex": "*("})
    assert_quiet(engine)


# ---- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice",
    [["yes", "no"], ["1", "10", "100"], ["é 🫠", "世界"], ['say "hi"', "back\\slash", "new\nline"], ["only"]],
    ids=range(5),
)
def test_choice(choice: list[str]) -> None:
    one = answer({"choice": choice})
    assert one.text in choice and one.finish_reason is FinishReason.STOP and one.stop_reason is None


@pytest.mark.parametrize("text", ["1", "10", "100"])
def test_the_model_chooses_among_choices_that_begin_alike(text: str) -> None:
    assert answer({"choice": ["1", "10", "100"]}, wanting(text), temperature=0).text == text


@pytest.mark.parametrize("pattern", [r"\d{1,3}", r"^\d{2}$", "(ab|cd){1,4}e", "[A-Z][a-z]{2,5} [0-9]{4}", "[^a-z ]{4}"])
def test_regex(pattern: str) -> None:
    one = answer({"regex": pattern})
    assert one.finish_reason is FinishReason.STOP and re.fullmatch(pattern, one.text)


def test_grammar_in_ebnf_and_in_lark() -> None:
    ebnf = 'root ::= "SELECT " column " FROM " table\ncolumn ::= "name" | "age"\ntable ::= "users" | "orders"'
    lark = 'start: "SELECT " column " FROM " table\ncolumn: "name" | "age"\ntable: "users" | "orders"'
    for grammar in (ebnf, lark):
        one = answer({"grammar": grammar})
        assert re.fullmatch("SELECT (name|age) FROM (users|orders)", one.text)
        assert one.finish_reason is FinishReason.STOP


def test_json_schema() -> None:
    one = answer({"json": PERSON})
    assert one.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(one.text), PERSON)


def test_json_object_is_an_object() -> None:
    one = answer({"json_object": True}, wanting('{"a": [1, "é"]}'), temperature=0)
    assert (one.text, one.finish_reason) == ('{"a": [1, "é"]}', FinishReason.STOP)
    assert answer({"json_object": True}, wanting("[1]"), max_tokens=5, temperature=0).text.startswith("{")


def test_a_model_that_wants_only_blanks_writes_few() -> None:
    schema = {"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"], "additionalProperties": False}
    blanks = ScriptedModel(lambda *_: {10: 10.0, 32: 9.0})
    one = answer({"json": schema}, blanks, temperature=0)
    assert one.finish_reason is FinishReason.STOP and json.loads(one.text) == {"ok": 1}


def test_an_answer_cut_by_max_tokens_says_length() -> None:
    assert answer({"json": PERSON}, max_tokens=3).finish_reason is FinishReason.LENGTH


def test_the_last_token_within_max_tokens_still_says_stop() -> None:
    one = answer({"choice": ["abc"]}, max_tokens=3)
    assert (one.text, one.finish_reason) == ("abc", FinishReason.STOP)


KINDS = ["boolean", "null", "integer", "multiple", "string", "format", "enum", "anyOf", "allOf", "tuple", "reference"]
NUMBERS = {"multipleOf": [2, 3, 7], "exclusiveMinimum": [-9, 0], "exclusiveMaximum": [50, 99]}


def _random_schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = choose.choice([*KINDS, *["object", "array"] * 3 * (depth < 2)])
    inner = partial(_random_schema, choose, depth + 1)
    if kind == "integer":
        low = choose.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + choose.randint(0, 300)}
    if kind == "multiple":
        return {"type": "integer", "minimum": 1, **{name: choose.choice(values) for name, values in NUMBERS.items()}}
    if kind == "string":
        pattern = choose.choice([None, "^[a-c]{1,3}$", "^é+世$"])
        length = {"maxLength": choose.randint(1, 4)}
        return {"type": kind, **(length if pattern is None else {"pattern": pattern})}
    if kind == "format":
        return {"type": "string", "format": choose.choice(["date", "ipv4", "uuid"])}
    if kind == "enum":
        return {"enum": choose.sample(["x", 5, None, True, "é🫠", 'quo"te', 1.5], 3)}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(2)]}
    if kind == "allOf":
        return {"allOf": [{"enum": ["a", "bb", "ccc", 4]}, {"type": "string"}, {"minLength": choose.randint(1, 3)}]}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), {"const": "end"}], "items": False, "minItems": 2}
    if kind == "reference" and depth == 0:
        return {"$defs": {"c": inner()}, "type": "array", "items": {"$ref": "#/$defs/c"}, "maxItems": 2}
    if kind == "array":
        return {"type": kind, "items": inner(), "minItems": 1, "maxItems": choose.randint(1, 3)}
    if kind == "object":
        properties = {name: inner() for name in choose.sample(["a", "b", "ñ", "d"], 2)}
        required = choose.sample(list(properties), choose.randint(0, 2))
        return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind if kind in ("boolean", "null") else "boolean"}


def test_every_finished_answer_of_two_hundred_random_schemas_is_valid() -> None:
    engine = make_engine(tiny_transformer(), max_num_seqs=200, num_kv_blocks=3300, debug_checks=False)
    schemas = {}
    for seed in range(200):
        schema = _random_schema(random.Random(seed))
        params = SamplingParams(max_tokens=200, temperature=1.0, seed=seed, structured_outputs={"json": schema})
        schemas[engine.add_request(f"JSON {seed}:", params)] = schema
    num_finished = 0
    for request_id, outputs in run_to_end(engine).items():
        one = outputs[-1].outputs[0]
        assert outputs[-1].error is None
        if one.finish_reason is FinishReason.STOP:
            num_finished += 1
            jsonschema.validate(json.loads(one.text), schemas[request_id], format_checker=jsonschema.FormatChecker())
    assert num_finished >= 170
    assert_quiet(engine)


def test_a_form_that_takes_too_long_to_compile_is_refused_in_time_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mini_vllm.engine.grammar_trial.COMPILE_SECONDS", 0.5)
    one = compiler()
    patterns = [{"type": "string", "pattern": f"(a|b)*c{{{count}}}.*"} for count in range(1, 30)]  # minutes of work
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="to compile; make it simpler"):
            one.compile(StructuredOutputsParams(json={"allOf": patterns}))
    assert one.compile(StructuredOutputsParams(regex="a+b")).new_state().error is None  # the compiler lives on


def test_a_trial_whose_process_is_gone_begins_another() -> None:
    one = compiler()
    one.compile(StructuredOutputsParams(regex="a+"))
    trial = one._trial
    assert trial is not None and trial._process is not None
    trial._process.kill()
    trial._process.wait()
    assert one.compile(StructuredOutputsParams(regex="b+")).new_state().error is None


@pytest.mark.parametrize(
    "keyword",
    [
        *({"not": {}}, {"if": {}, "then": False}, {"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {}}}),
        *(
            {"uniqueItems": True},
            {"contains": {}},
            {"minContains": 2},
            {"propertyNames": {}},
            {"minProperties": 1, "properties": {"a": {}}},
        ),
        *({"unevaluatedProperties": False}, {"unevaluatedItems": False}, {"$dynamicRef": "#x"}, {"$ref": "http://x/"}),
    ],
    ids=str,
)
def test_a_keyword_that_cannot_be_enforced_is_refused(keyword: dict[str, Any]) -> None:
    for schema in (keyword, {"type": "array", "items": keyword}):
        with pytest.raises(InvalidRequestError) as refused:
            compiler().compile(StructuredOutputsParams(json=schema, origin="response_format"))
        assert refused.value.param == "response_format"


def test_a_keyword_that_asks_for_nothing_is_let_through_and_a_name_or_a_value_like_it_stays() -> None:
    idle = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
    assert StructuredOutputsParams(json={"allOf": [{"items": {**idle, "type": "string"}}], **idle}).json == (
        '{"allOf": [{"items": {"type": "string"}}]}'
    )
    schema = {"type": "object", "properties": {"uniqueItems": False, "a": {"type": "array", **idle}}, "const": idle}
    kept = StructuredOutputsParams(json=schema).json
    assert isinstance(kept, str)
    assert json.loads(kept) == {**schema, "properties": {"uniqueItems": False, "a": {"type": "array"}}}
    form = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "uniqueItems": False})
    assert compiler().compile(form).new_state().error is None


def test_annotations_are_let_through() -> None:
    notes = {"title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True, "$comment": "c"}
    form = StructuredOutputsParams(json={"type": "integer", **notes, "x-own": 1, "readOnly": True})
    assert compiler().compile(form).new_state().error is None


# ---- together with everything else --------------------------------------------------------------------------------


def test_each_of_n_answers_has_a_state_of_its_own() -> None:
    outputs = final(structured_outputs={"choice": ["alpha", "beta", "gamma"]}, n=3, temperature=1.5).outputs
    assert all(one.text in ("alpha", "beta", "gamma") for one in outputs)
    assert all(one.finish_reason is FinishReason.STOP for one in outputs)
    seen = {
        one.text
        for seed in range(5)
        for one in final(structured_outputs={"choice": ["a", "b", "c"]}, n=3, seed=seed, temperature=50.0).outputs
    }
    assert len(seen) > 1


def test_preemption_changes_nothing() -> None:
    forms: list[dict[str, Any]] = [{"json": PERSON}, {"regex": "[a-z]{60}"}, {"json": PERSON}, {"regex": "(ab|cd){30}"}]

    def answers(num_kv_blocks: int) -> tuple[list[str], int]:
        engine = make_engine(tiny_transformer(), num_kv_blocks=num_kv_blocks, block_size=8)
        ids = [
            engine.add_request("Say it", temperature=1, seed=i, max_tokens=80, structured_outputs=form)
            for i, form in enumerate(forms)
        ]
        finals = {request_id: outputs[-1] for request_id, outputs in run_to_end(engine).items()}
        assert_quiet(engine)
        return [finals[i].outputs[0].text for i in ids], sum(finals[i].metrics.num_preemptions for i in ids)

    roomy, tight = answers(128), answers(20)
    assert roomy[1] == 0 < tight[1]
    assert roomy[0] == tight[0]


def test_rows_without_a_grammar_are_unaffected_to_the_bit() -> None:
    def free_answers(*, mixed: bool) -> list[tuple[list[int], Any]]:
        engine = make_engine(tiny_transformer())
        ids = []
        for index, temperature in itertools.product(range(2), (0.0, 1.0)):
            free = {"temperature": temperature, "seed": index, "logprobs": 2, "min_tokens": 5 * index}
            ids.append(engine.add_request(f"Free {index}", max_tokens=30, **free))
            form = {"regex": "[0-9]{30}"} if mixed else None
            # In both cases the neighbour has 30 tokens, so that the batches have the same shapes.
            engine.add_request(f"Bound {index}", max_tokens=30, seed=index, structured_outputs=form, ignore_eos=True)
        outputs = run_to_end(engine)
        return [(outputs[i][-1].outputs[0].token_ids, outputs[i][-1].outputs[0].logprobs) for i in ids]

    assert free_answers(mixed=True) == free_answers(mixed=False)


def test_a_step_without_grammars_has_no_mask() -> None:
    engine = make_engine(tiny_transformer())
    engine.add_request("free", temperature=1)
    assert [draw.grammar_mask for draw in engine.scheduler.schedule().draws] == [None]


def test_a_stop_string_ends_an_answer_inside_its_form() -> None:
    one = answer({"json": {"type": "string"}}, wanting('"abc STOP def"'), temperature=0, stop=["STOP"])
    assert (one.text, one.finish_reason, one.stop_reason) == ('"abc ', FinishReason.STOP, "STOP")


def test_the_form_ends_before_min_tokens_and_with_ignore_eos() -> None:
    for params in ({"min_tokens": 50}, {"ignore_eos": True}):
        one = answer({"choice": ["abc"]}, **params)
        assert (one.text, one.finish_reason) == ("abc", FinishReason.STOP)


def test_min_tokens_keeps_an_answer_that_can_go_on_from_ending() -> None:
    assert answer({"regex": "a*"}, wanting("a"), min_tokens=7, temperature=0).text == "a" * 7


def test_ignore_eos_does_not_go_on_after_the_form() -> None:
    one = answer({"regex": "a*"}, wanting("aa"), ignore_eos=True, temperature=0)
    assert (one.text, one.finish_reason) == ("aa", FinishReason.STOP)


def test_logprobs_are_those_of_the_model_and_their_texts_join_to_the_answer() -> None:
    one = answer({"choice": ["yes"]}, wanting("zzz"), temperature=0, logprobs=1)
    assert one.logprobs is not None and one.token_texts is not None
    assert "".join(one.token_texts) == "yes"
    assert [entry.token_id for entry in one.logprobs] == list(b"yes")
    assert [entry.top_token_ids[0] for entry in one.logprobs] == list(b"zzz")  # raw: before the mask


def test_a_mask_that_leaves_no_token_fails_that_request_and_no_other() -> None:
    engine = make_engine(tiny_transformer())
    bad = engine.add_request("x", structured_outputs={"choice": ["yes"]}, allowed_token_ids=[ord("n")])
    good = engine.add_request("x", structured_outputs={"choice": ["yes"]})
    outputs = run_to_end(engine)
    assert outputs[bad][-1].outputs[0].finish_reason is FinishReason.ERROR
    assert "structured_outputs" in (outputs[bad][-1].error or "")
    assert outputs[good][-1].outputs[0].text == "yes"
    assert_quiet(engine)


def test_logits_wider_than_the_tokenizer_never_give_an_id_beyond_it() -> None:
    width = BYTE_VOCAB_SIZE + 41

    def beyond(_: int, position: int) -> Mapping[int, float] | Tensor:
        return {width - 1: 50.0, ord("b"): 1.0}

    parts = {"vocab_size": width}
    one = final(ScriptedModel(beyond, width), parts=parts, structured_outputs={"regex": "[ab]{3}"}, temperature=0)
    assert one.outputs[0].text == "bbb"


def test_penalties_and_bias_work_inside_the_form() -> None:
    form = {"choice": ["red", "blue"]}
    for text in ("red", "blue"):
        assert answer(form, wanting("?"), temperature=0, logit_bias={text.encode()[0]: 50}).text == text


def test_the_default_model_answers_in_the_form(smollm2_files: Any) -> None:
    from mini_vllm import LLM

    llm = LLM(num_kv_blocks=32, max_model_len=256)
    form = StructuredOutputsParams(json=PERSON)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=form)
    one = llm.chat([[{"role": "user", "content": "Give me a person as JSON."}]], params)[0].outputs[0]
    assert one.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(one.text), PERSON)


@pytest.mark.parametrize("schema", ['{"minimum": 1e999}', '{"const": NaN}', f'{{"enum": [{10**400}]}}'])
@pytest.mark.parametrize("as_text", [True, False])
def test_numbers_that_no_json_text_can_hold_are_refused(schema: str, as_text: bool) -> None:
    """Such a number is a valid value for Python's parser, and none for the compiler of grammars."""
    with pytest.raises(InvalidRequestError, match="structured_outputs: "):
        compiler().compile(StructuredOutputsParams(json=schema if as_text else json.loads(schema)))
