#!/bin/bash
# Is everything there that a job will need? Ends with 2 and says what is missing. Usage: check_setup.sh [FILE]...
set -uo pipefail
missing=0
say() { echo "missing: $1" >&2; missing=1; }
command -v joulelab >/dev/null || say "joulelab; activate the environment it is installed in"
python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null ||
  say "torch; pip install 'joulelab[train]' in this environment"
[ -n "${SLURM_JOB_ID:-}" ] || command -v sbatch >/dev/null || say "sbatch; call this on the cluster's login node"
for file in "$@"; do [ -e "$file" ] || say "$file"; done
[ "$missing" = 0 ] || exit 2
