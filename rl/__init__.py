"""How the model learns: supervised fine-tuning, GRPO, evaluation."""
