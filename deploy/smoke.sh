#!/usr/bin/env bash
# Starts the stack of docker-compose.yml, asks it, kills the broker, cuts the indexer off, and takes all down again.
# Exits with another status than 0 if anything does not come back by itself.
#
#   deploy/smoke.sh [OPTIONS OF docker compose up]     default: --build
#
# COMPOSE_FILE and COMPOSE_PROFILES name other files and profiles, as for every command of Compose:
#   COMPOSE_FILE=docker-compose.yml:override.yml COMPOSE_PROFILES=group,record deploy/smoke.sh --no-build
# The stack is a project of its own, with empty volumes. Its ports must be free.
set -euo pipefail
cd "$(dirname "$0")/.."
export COMPOSE_PROJECT_NAME=kvsight-smoke
url=http://localhost:8000
folder=$(mktemp -d)

finish() {
  local status=$?
  trap - EXIT
  if ((status)); then
    docker compose ps --all || true
    docker compose logs --no-color || true
  fi
  docker compose --progress quiet --profile '*' down --volumes --timeout 5 || status=1
  rm -rf "$folder"
  ((status)) && echo "smoke: FAILED" || echo "smoke: passed in $SECONDS s"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# until_true SECONDS WHAT COMMAND...
until_true() {
  local began=$SECONDS limit=$1 what=$2
  shift 2
  until "$@"; do
    if ((SECONDS - began >= limit)); then
      echo "smoke: not within $limit s: $what"
      exit 1
    fi
    sleep 0.5
  done
  echo "smoke: $what ($((SECONDS - began)) s)"
}

# inside its container, where it answers without a network, too
states() {
  docker compose exec -T indexer python -c '
import json, urllib.request
workers = json.load(urllib.request.urlopen("http://127.0.0.1:8000/workers", timeout=5))
print(*sorted(worker["listeners"]["0"]["state"] for worker in workers))'
}
all_live() { [ "$(states)" = "live live" ]; }
none_live() { local found; found=$(states) && [[ $found && $found != *live* ]]; }
answered() { # the engines are named in any order
  local found
  found=$(curl --silent --max-time 10 "$url/query" --header 'content-type: application/json' --data "@$folder/prompt.json")
  [[ $found == *'"engine-0":{"0":2048}'* && $found == *'"engine-1":{"0":1024}'* ]]
}
all_healthy() {
  local found
  found=$(docker compose ps --all --format '{{.Service}} {{.State}} {{.Health}}') || return
  [ -n "$found" ] && ! grep --quiet --invert-match ' running healthy$' <<<"$found"
}
is_unhealthy() { docker compose ps --format '{{.Health}}' "$1" | grep --quiet '^unhealthy$'; }
is_well() { all_live && answered && all_healthy; }

docker compose up "${@:---build}" --detach --wait --wait-timeout 300
docker compose exec -T indexer kvsight demo --prompt >"$folder/prompt.json"
until_true 180 "the documented query hits the engines differently" answered
until_true 180 "all is healthy and live" is_well

docker compose kill kafka
until_true 180 "without the broker, no view is live" none_live
until_true 180 "without the broker, the query is answered from memory" answered
until_true 180 "without the broker, an engine is unhealthy" is_unhealthy engine-0
docker compose start kafka
until_true 180 "with the broker, all is healthy and live again" is_well

network=${COMPOSE_PROJECT_NAME}_default container=$(docker compose ps --quiet indexer)
docker network disconnect "$network" "$container"
until_true 180 "without a network, no view is live" none_live
docker network connect --alias indexer "$network" "$container"
until_true 180 "with a network, all is healthy and live again" is_well

if docker compose logs --no-color | grep --extended-regexp 'Traceback|never retrieved|ERROR asyncio'; then
  echo "smoke: an error that nobody expects is in the log"
  exit 1
fi
