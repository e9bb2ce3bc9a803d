"""What a GRPO run leaves behind: `adapter/` in PEFT's form or a complete checkpoint in `model/`,
and `training.json`, which says how it came to be.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from minimax_jax.checkpoint import save_model
from rl.grpo_run import GRPORun
from rl.optimizer import Parameters
from rl.peft_files import write_adapter
from rl.policy import published

ADAPTER, MODEL = "adapter", "model"


def export_trained(run: GRPORun, parameters: Parameters, summary: Mapping[str, Any]) -> None:
    """Writes over what an earlier session left."""
    config, loaded = run.config, run.loaded
    for folder in (run.out / ADAPTER, run.out / MODEL):
        if folder.exists():
            shutil.rmtree(folder)
    if config.trained == "lora":
        write_adapter(
            parameters,
            loaded.config,
            config.model,
            rank=config.rank,
            alpha=config.alpha,
            folder=run.out / ADAPTER,
        )
    else:
        model, _ = published(loaded.model, parameters, config)
        save_model(model, run.out / MODEL, source=loaded.folder)
    text = json.dumps({"config": asdict(config), **summary}, indent=2) + "\n"
    (run.out / "training.json").write_text(text, "utf-8")
