#!/usr/bin/env bash
# The tests of the transformers adapters under several releases of transformers.
#
#     bench/transformers_matrix.sh [--out FILE] [RELEASE...]
#
# Run it in an environment with seqkv's test extra. Each release is installed, with what it needs, into a temporary
# folder that comes before this environment. Releases: 5.0.0 5.8.0 5.20.0 5.24.0 if none are named. Writes a JSON
# object, release -> what pytest counted, and exits with 1 if a test failed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=""
if [ "${1:-}" = "--out" ]; then
  out="$2"
  shift 2
fi
releases=("$@")
[ ${#releases[@]} -gt 0 ] || releases=(5.0.0 5.8.0 5.20.0 5.24.0)
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
failed=0
lines=()
for release in "${releases[@]}"; do
  python -m pip install --quiet --target "$folder/$release" "transformers==$release"
  rm -rf "$folder/$release"/numpy*  # this environment's
  PYTHONPATH="$folder/$release" python -m pytest -q -rfE -p no:cacheprovider tests/test_attention.py \
    tests/test_compact_cache.py tests/test_compressed_cache.py tests/test_compressed_cache_calls.py \
    tests/test_docs_transformers.py tests/test_huggingface.py tests/test_rope.py > "$folder/log" 2>&1 || failed=1
  found="$(PYTHONPATH="$folder/$release" python -c 'import transformers; print(transformers.__version__)')"
  counted="$(tail -n 1 "$folder/log" | sed 's/ in .*//; s/=//g; s/^ *//; s/ *$//')"
  echo "$found: $counted"
  grep -E '^(FAILED|ERROR)' "$folder/log" || true
  lines+=("\"$found\": \"$counted\"")
  rm -rf "${folder:?}/$release"
done
if [ -n "$out" ]; then
  (IFS=,; echo "{${lines[*]}}") | python -m json.tool --indent 1 > "$out"
fi
exit $failed
