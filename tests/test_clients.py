"""The examples in examples/clients run as they are, each against a real server.

They need packages that nothing else here needs: `pip install -e '.[clients]'`, and for JavaScript node with
`npm install openai` in a folder that NODE_CLIENT_FOLDER names. What is not there is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import Served, serving, strict_json
from engine_doubles import byte_tokenizer, tiny_transformer
from transformers import PreTrainedTokenizerFast

CLIENTS = Path(__file__).parents[1] / "examples" / "clients"
NODE_FOLDER = os.environ.get("NODE_CLIENT_FOLDER", "")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_transformer()) as server:
        yield server


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed (pip install -e '.[clients]')")


def run(served: Served, *command: str | Path, **environment: str) -> str:
    """The output of an example, which must end with 0."""
    variables = {"BASE_URL": served.url, "MODEL": "double", "PYTHON": sys.executable, **environment}
    done = subprocess.run(
        list(map(str, command)),
        cwd=CLIENTS,
        env={**os.environ, **variables, "NO_PROXY": "127.0.0.1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def answer_to(served: Served, question: str, **fields: object) -> str:
    return str(served.chat(question, **fields)["choices"][0]["message"]["content"])


FRANCE = "What is the capital of France?"


def test_openai(served: Served) -> None:
    output = run(served, sys.executable, "openai_client.py")
    assert output.count(answer_to(served, FRANCE, max_tokens=24)) == 3  # plain, streamed, with the helper
    assert answer_to(served, "What is the capital of Chile?", max_tokens=16) in output
    served.wait_until_quiet()


@needs("langchain_openai")
def test_langchain(served: Served) -> None:
    messages = [{"role": "system", "content": "You answer shortly."}, {"role": "user", "content": FRANCE}]
    answer = served.ok("/v1/chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0})
    output = run(served, sys.executable, "langchain_client.py")
    assert output.count(answer["choices"][0]["message"]["content"]) == 2
    assert f"'total_tokens': {answer['usage']['total_tokens']}" in output
    served.wait_until_quiet()


@needs("litellm")
def test_litellm(served: Served) -> None:
    # Its table of prices comes with the package; without this it is fetched at each import.
    output = run(served, sys.executable, "litellm_client.py", LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert output.count(answer_to(served, FRANCE, max_tokens=24)) == 2
    assert served.complete("The capital of France is", max_tokens=8)["choices"][0]["text"] in output
    served.wait_until_quiet()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(served: Served) -> None:
    lines = [line for line in run(served, "bash", "curl_client.sh").splitlines() if line]
    plain, *events, refused = lines
    text = served.complete("The capital of France is", max_tokens=8)["choices"][0]["text"]
    assert strict_json(plain)["choices"][0]["text"] == text
    assert events[-1] == "data: [DONE]" and len(events) >= 3
    assert strict_json(refused)["error"]["param"] == "temperature"


@pytest.mark.skipif(not NODE_FOLDER, reason="NODE_CLIENT_FOLDER names no folder with npm's openai")
def test_npm_openai(served: Served) -> None:
    script = Path(NODE_FOLDER) / "mini_vllm_example.mjs"  # node looks for packages beside the program
    shutil.copyfile(CLIENTS / "openai_client.mjs", script)
    try:
        output = run(served, "node", script)
    finally:
        script.unlink()
    assert output.count(answer_to(served, FRANCE, max_tokens=24)) == 3
    assert served.complete("The capital of France is", max_tokens=8)["choices"][0]["text"] in output


@needs("lm_eval")
def test_lm_eval_scores_what_the_server_says(served: Served, tmp_path: Path) -> None:
    """Accuracies are computed here once more, from the server's own log-probabilities and texts."""
    tokenizer = tmp_path / "tokenizer"
    backend = byte_tokenizer()._backend
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(str(tokenizer))
    results = tmp_path / "results"
    run(
        served,
        *("bash", "lm_eval.sh", "--output_path", results),
        TOKENIZER=str(tokenizer),
        MAX_LENGTH="256",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "cache"),
    )
    (file,) = results.rglob("results_*.json")
    scores = json.loads(file.read_text())["results"]
    questions = [json.loads(line) for line in (CLIENTS / "lm_eval_tasks" / "capitals.jsonl").read_text().splitlines()]
    assert scores["capitals_choice"]["acc,none"] == pytest.approx(accuracy_of_choices(served, questions))
    assert "exact_match,none" in scores["capitals_generate"]
    served.wait_until_quiet()


def accuracy_of_choices(served: Served, questions: list[dict[str, object]]) -> float:
    right = 0
    for question in questions:
        context = f"The capital of {question['country']} is"
        likelihoods = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            answer = served.complete(f"{context} {choice}", echo=True, logprobs=0, max_tokens=0)
            logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            likelihoods.append(sum(logprobs[len(context.encode()) :]))
        right += likelihoods.index(max(likelihoods)) == question["label"]
    return right / len(questions)
