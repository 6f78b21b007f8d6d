#!/usr/bin/env bash
# Nsight Compute on one op: benchmarks/profile.sh OP [--shape N ...] [--dtype D] [--backend B] [--times K]
# Prints the command and, where ncu and a GPU are, runs it. PYTHON, NCU and OUT may be set.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -eq 0 ] || [ "$1" = --help ]; then
    sed -n '2,3s/^# //p' "$0"
    exit 2
fi
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
ncu=${NCU:-ncu}
out=${OUT:-profile-$1}
command=("$ncu" --set full --import-source yes --nvtx --profile-from-start off
    --force-overwrite --export "$out" "$python" -m benchmarks.run_op "$@")
printf '%q ' "${command[@]}"
echo
if ! type "$ncu" > /dev/null 2>&1; then
    echo "profile.sh: $ncu is not on the PATH; the command above runs where it is" >&2
    exit 1
fi
exec "${command[@]}"
