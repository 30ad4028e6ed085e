#!/usr/bin/env bash
# lm-evaluation-harness against a running server: log-likelihoods and generation, on the two small tasks beside this file.
#
#     pip install 'lm-eval[api]'
#     ./lm_eval.sh                    # BASE_URL, MODEL, TOKENIZER are read from the environment
#
# TOKENIZER is a Hugging Face id or a directory: the harness counts tokens by itself. Real tasks go the same way:
# TASKS=arc_easy,gsm8k ./lm_eval.sh --limit 20
set -euo pipefail
model="${MODEL:-smollm2-135m-instruct}"
tokenizer="${TOKENIZER:-HuggingFaceTB/SmolLM2-135M-Instruct}"
${PYTHON:-python} -m lm_eval run --model local-completions --include_path "$(dirname "$0")/lm_eval_tasks" \
    --tasks "${TASKS:-capitals_choice,capitals_generate}" \
    --model_args "model=$model,base_url=${BASE_URL:-http://127.0.0.1:8000}/v1/completions,tokenizer=$tokenizer,num_concurrent=4,max_retries=1,max_length=${MAX_LENGTH:-2048}" \
    "$@"
