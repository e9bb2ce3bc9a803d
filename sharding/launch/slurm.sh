#!/usr/bin/env bash
# One process a node, each with its GPUs: sbatch sharding/launch/slurm.sh --parallel tp8 --chat "..."
#SBATCH --job-name=minimax-jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
set -euo pipefail

# Every process runs the same command; process 0 prints. SLURM says which process each one is.
srun --kill-on-bad-exit=1 minimax-jax generate --model "${MODEL:-MiniMaxAI/MiniMax-M3.1-Flash}" \
  --distributed "$@"
