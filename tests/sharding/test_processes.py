"""Which process this is, as each launcher says it; and two processes that are one mesh."""

import json
import os
import socket
import subprocess
import sys

import pytest

from sharding.processes import Processes, find_processes, first_host


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"LWS_LEADER_ADDRESS": "a-0.a.ns", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"},
            Processes(coordinator="a-0.a.ns:8476", count=2, index=1),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "gpu[003-006],x"},
            Processes(coordinator="gpu003:8476", count=4, index=3),
        ),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "0",
                "SLURM_PROCID": "0",
            },
            Processes(coordinator="localhost:8476", count=2, index=0),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "x"}, None),
        ({}, None),
    ],
)
def test_a_launcher_says_which_process_this_is(environment, expected):
    assert find_processes(environment) == expected


def test_flags_come_before_the_environment():
    environment = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "x"}
    expected = Processes(coordinator="host:9", count=4, index=0)
    assert find_processes(environment, "host:9", index=0) == expected


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("host:9", 2, None), "nothing says all of --coordinator, --num-processes and --process"),
        (("host:9", 2, 2), "process 2 is not one of 0..1"),
        (("host:x", 2, 0), "coordinator 'host:x' is not a host:port"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_a_sentence(flags, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        find_processes({}, *flags)


@pytest.mark.parametrize(
    ("hosts", "first"), [("a", "a"), ("a1,a2", "a1"), ("n[07,9-11],b", "n07"), ("n[1-3]", "n1")]
)
def test_the_first_of_slurms_hosts(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.slow
def test_two_processes_answer_as_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "minimax_jax", "generate", "--model", "tiny", "--json"]
    command += ["--prompt", "Eva has 52 eggs", "--max-tokens", "4", "--temperature", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    pair = ["--parallel", "tp2", "--coordinator", f"localhost:{port}", "--num-processes", "2"]
    started = [
        subprocess.Popen(
            [*command, *more], env=environment, text=True, stdout=-1, stderr=subprocess.DEVNULL
        )
        for more in ([*pair, "--process-id", "0"], [*pair, "--process-id", "1"], [])
    ]
    outputs = [one.communicate(timeout=600)[0].splitlines() for one in started]
    answers = [[line for line in lines if line.startswith("{")] for lines in outputs]
    assert [len(lines) for lines in answers] == [1, 0, 1]  # process 0 alone prints
    together, alone = (json.loads(answers[i][0])["token_ids"] for i in (0, 2))
    assert together == alone and len(alone) == 4
