#!/usr/bin/env bash
# curl: an answer, a stream, and how to see which field was wrong. BASE_URL is read from the environment.
set -euo pipefail
url="${BASE_URL:-http://127.0.0.1:8000}"
json='Content-Type: application/json'

curl --silent --show-error --fail "$url/v1/completions" -H "$json" \
     -d '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
echo

# --no-buffer shows each event as it comes.
curl --silent --show-error --fail --no-buffer "$url/v1/chat/completions" -H "$json" \
     -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, "stream": true}'

curl --silent --show-error "$url/v1/completions" -H "$json" -d '{"prompt": "x", "temperature": -1}'
echo
