"""A small scheduler, and the ways in which tests drive it."""

from configs.serving import ServingConfig
from serving.scheduling.request import Asked, Request
from serving.scheduling.sampling_params import SamplingParams
from serving.scheduling.scheduler import Scheduler
from tests.serving.fake_device import FakeDevice


def scheduler_of(num_blocks=64, num_ranks=1, **options) -> Scheduler:
    defaults = {
        "block_size": 16,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_scheduler_steps": 1,
        "async_scheduling": False,
    }
    return Scheduler(ServingConfig(**(defaults | options)), num_blocks, num_ranks=num_ranks)


def ask(scheduler: Scheduler, name: str, prompt, *, more=None, **sampling):
    prompt = range(prompt) if isinstance(prompt, int) else prompt
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    return scheduler.add(Asked(request_id=name, prompt=prompt, sampling=params, **(more or {})))


def step(scheduler: Scheduler, device: FakeDevice) -> dict[str, list[int]]:
    """One plan and its result: new tokens by request id."""
    plan = scheduler.plan()
    progress = scheduler.commit(device.run(plan))
    scheduler.check()
    return {request.request_id: tokens for request, tokens in progress if tokens}


def output(request: Request) -> list[int]:
    return request.tokens[request.prompt_length :].tolist()
