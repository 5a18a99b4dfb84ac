#!/bin/bash
# Preprocess, then distil for the seeds 0 to 3: both are submitted now, the second waits for the first to end well.
# Usage: DUMP=data/dump.txt [SEEDS=0-3] bash scripts/slurm/submit_both.sh [options of sbatch, for both]
set -euo pipefail
export SCRIPTS=${SCRIPTS:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}
bash "$SCRIPTS/check_setup.sh" "${DUMP:-data/dump.txt}"
first=$(sbatch --parsable "$@" "$SCRIPTS/preprocess.sbatch")
second=$(sbatch --parsable --dependency="afterok:${first%%;*}" --kill-on-invalid-dep=yes --array="${SEEDS:-0-3}" "$@" \
  "$SCRIPTS/distil.sbatch")
echo "preprocess $first"
echo "distil     $second, after it"
