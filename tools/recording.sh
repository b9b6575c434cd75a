#!/usr/bin/env bash
# What the recording shows: a server is started, one answer is streamed through OpenAI's own client, and 32
# requests are served at once. `tools/record.py` runs it in a terminal that is recorded; it also runs by itself.
set -euo pipefail
PORT=${PORT:-8123}
URL=http://127.0.0.1:$PORT
LOG=$(mktemp)

say() { # a command as if somebody typed it
    printf '\033[32m$\033[0m '
    local i
    for ((i = 0; i < ${#1}; i++)); do
        printf '%s' "${1:i:1}"
        sleep 0.03
    done
    sleep 0.4
    printf '\n'
}

say "python -m v0_5_bench.server --port $PORT &"
python -m v0_5_bench.server --port "$PORT" --log-level warning 2> "$LOG" &
SERVER=$!
trap 'kill -TERM $SERVER; wait $SERVER || true; rm -f "$LOG"' EXIT
until grep -q Listening "$LOG"; do
    kill -0 $SERVER || { cat "$LOG"; exit 1; }
    sleep 0.1
done
sed -n '1,4p' "$LOG" | cut -c1-96
sleep 1.2

echo
say "python -m tools.demo_server --base-url $URL --max-tokens 90"
python -m tools.demo_server --base-url "$URL" --max-tokens 90
sleep 1.2

echo
say "python -m v0_5_bench serve --base-url $URL --num-requests 32"
python -m v0_5_bench serve --base-url "$URL" --num-requests 32
sleep 2.5
