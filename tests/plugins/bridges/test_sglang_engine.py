"""Engine `sglang` with a real SGLang server, which `make sglang` installs for CPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from rlctl.__main__ import main
from rlctl.cli.usage import corrected
from rlctl.errors import ConfigError, MissingExtraError, ResourceError, RlctlError
from rlctl.plugins.bridges.sglang import SGLangEngine
from rlctl.plugins.bridges.sglang_server import SGLangServer
from rlctl.runtime.rollout.engine import SamplingParams, to_requests
from tests.e2e.command import metrics, train
from tests.generation import STOP, assert_most_probable, engine_spec, prompts, recomputed
from tests.generation import sampling as any_sampling
from tests.models import tiny_model, write_tiny_model
from tests.progress import wait_until
from tests.settings import given

KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
PYTHON = os.environ.get("RLCTL_SGLANG_PYTHON")
STARTS = [f"+{KWARGS}.python={PYTHON}", f"+{KWARGS}.start_timeout_s=1800"]
URL = f"+{KWARGS}.url=http://a:1"
SIZES = {"hidden_size": 128, "head_dim": 32}

real = pytest.mark.skipif(PYTHON is None, reason="SGLang is not installed: make sglang")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    tiny_model(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[SGLangEngine]:
    """Engine that has started the server, which others reach at its address."""
    engine = SGLangEngine.from_spec(engine_spec(folder, *STARTS), None)
    yield engine
    engine.close()
    assert engine.server.process.poll() is not None
    assert not engine.server.log.exists()


def attach(started: SGLangEngine, folder: Path, *overrides: str, **changes: Any) -> SGLangEngine:
    url = f"+{KWARGS}.url={started.server.url}"
    return SGLangEngine.from_spec(engine_spec(folder, url, *overrides, **changes), None)


def sampling(**changes: Any) -> SamplingParams:
    return any_sampling(**({"max_tokens": 12} | changes))


def assert_log_probs_of(
    model: PreTrainedModel, engine: SGLangEngine, temperature: float = 1.0
) -> None:
    """Compare the engine's log-probs with those of `model`."""
    prompt_ids = prompts(9, 1, 40)
    responses = engine.generate(prompt_ids, sampling(temperature=temperature, top_k=40, top_p=0.95))
    assert len(responses.finish) == 9
    expected = recomputed(model, prompt_ids, responses, temperature or 1.0)
    torch.testing.assert_close(responses.log_probs.values, expected, atol=5e-5, rtol=0)


@contextmanager
def stopped(engine: SGLangEngine) -> Iterator[None]:
    """Stop all processes of a started server."""
    root = psutil.Process(engine.server.process.pid)
    processes = [root, *root.children(recursive=True)]
    for process in processes:
        process.suspend()
    yield
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@real
def test_log_probs_match_the_policy_after_each_weight_sync(
    started: SGLangEngine, folder: Path, tmp_path: Path
) -> None:
    engine = attach(started, folder, f"+{KWARGS}.weights_dir={tmp_path}")
    for seed, temperature in ((2, 0.6), (3, 0.0)):
        policy = tiny_model(seed=seed, **SIZES)
        engine.load_weights(policy.named_parameters())
        assert list(tmp_path.iterdir()) == []
        assert_log_probs_of(policy, engine, temperature)
        assert_most_probable(policy, engine, temperature, atol=5e-5)
    assert not engine.sleep(), "a server on a CPU keeps its memory"
    engine.wake()


@real
def test_a_cancelled_request_is_aborted(started: SGLangEngine, folder: Path) -> None:
    engine = attach(started, folder, "actor_rollout_ref.rollout.max_num_seqs=2")
    requests = to_requests(prompts(9, 4), sampling(n=1, stop_token_ids=(), max_tokens=40), 64)
    with stopped(started):  # nothing is generated until the request is cancelled
        engine.submit(requests)
        wait_until(lambda: all(call.running() for call in engine._open), os.getpid(), "the calls")
        sent, aborted = [], engine._abort
        engine._abort = sent.append  # the server cannot reply
        engine.cancel([requests[0].key])
        assert engine.num_open == 1
    aborted(sent[0])
    done = []
    while engine.num_open:
        done += engine.step()
    assert [completion.key for completion in done] == [requests[1].key]


@real
def test_greedy_stop_tokens_limits_and_context(started: SGLangEngine, folder: Path) -> None:
    engine = attach(started, folder, max_length=20)
    once, twice = (
        engine.generate(prompts(4, 7), sampling(temperature=0.0, seed=seed, n=1)) for seed in (1, 2)
    )
    assert torch.equal(once.response_ids.values, twice.response_ids.values)
    stops = (STOP, 5, 6, 7, 8)
    ended = engine.generate(prompts(4, 7, 2), sampling(stop_token_ids=stops, n=8))
    assert set(ended.finish) == {"stop", "length"}
    for response, finish in zip(ended.response_ids.rows(), ended.finish, strict=True):
        assert finish == ("stop" if int(response[-1]) in stops else "length")
    cut = engine.generate(
        prompts(15, 19), sampling(n=2, max_tokens=torch.tensor([3, 9, 4, 4]), stop_token_ids=())
    )
    assert cut.response_ids.lengths.tolist() == [3, 5, 1, 1]
    with pytest.raises(ConfigError, match="1 to 19 leave space"):
        engine.generate(prompts(20), sampling())
    assert engine.generate(prompts(), sampling()).finish == []


@real
def test_a_server_that_hangs_costs_the_deadline(started: SGLangEngine, folder: Path) -> None:
    engine = attach(started, folder)
    late = replace_timeout(engine, 0.5)
    with stopped(started), pytest.raises(RlctlError, match=r"within 0\.5 s") as caught:
        late.generate(prompts(4, 7), sampling(n=1))
    assert caught.value.problems[0].where == started.server.url
    assert len(engine.generate(prompts(4), sampling(n=1)).finish) == 1


def replace_timeout(engine: SGLangEngine, timeout_s: float) -> SGLangEngine:
    """Return a client of the same server with another time limit of calls."""
    spec = engine_spec(Path(engine.spec.model.path), timeout_s=timeout_s)
    return SGLangEngine(engine.server, spec, None)


def attached(url: str, folder: Path) -> SGLangEngine:
    """Return a client that has not asked the server for its settings."""
    return SGLangEngine(SGLangServer(url), engine_spec(folder), None)


@real
def test_another_model_is_named_at_the_start(started: SGLangEngine, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", "llama")
    with pytest.raises(ConfigError, match=r"has the model .*, and the run trains .*Llama"):
        attach(started, other)


@real
def test_a_tensor_parallel_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU its ranks need cores by name, unless each has a NUMA node."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{first}|{last}")
    engine = SGLangEngine.from_spec(
        engine_spec(folder, *STARTS, f"+{KWARGS}.server_args=[--tp-size,2]"), None
    )
    assert engine.server.call("GET", "/server_info", None, 60)["tp_size"] == 2
    policy = tiny_model(seed=4, **SIZES)
    engine.load_weights(policy.named_parameters())
    assert_log_probs_of(policy, engine)
    assert_most_probable(policy, engine, 1.0, atol=5e-5)
    engine.close()


@real
@pytest.mark.parametrize("recipe", ["grpo", "tools"])
def test_training_run(tmp_path: Path, recipe: str) -> None:
    """After an update the server has the new weights: engine and trainer agree."""
    own = given(engine="sglang", batch=4, mini_batch=4, n=2, steps=2, validate_first=False)
    words = ("--recipe", recipe, "--inline", *STARTS, *own)
    for row in metrics(train("grpo", "x", *words, cwd=tmp_path)):
        assert row["training/rollout_probs_diff_max"] < 1e-4
        if recipe == "tools":
            assert sum(row[name] for name in row if name.endswith("/calls")) > 0


@real
def test_a_killed_server_is_named(folder: Path) -> None:
    engine = SGLangEngine.from_spec(engine_spec(folder, *STARTS), None)
    process, log = engine.server.process, engine.server.log
    assert len(engine.generate(prompts(4), sampling(n=1)).finish) == 1
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(RlctlError, match="lost the connection to the SGLang server") as caught:
        engine.generate(prompts(4), sampling(n=1))
    assert "last lines of its log" in str(caught.value)
    engine.close()
    assert process.poll() == -signal.SIGKILL
    assert not log.exists()


@real
def test_failed_server_start_is_reported(folder: Path) -> None:
    wrong = f"+{KWARGS}.server_args=[--no-such-argument]"
    with pytest.raises(ResourceError, match="exited during startup with code 2") as caught:
        SGLangEngine.from_spec(engine_spec(folder, *STARTS, wrong), None)
    assert "--no-such-argument" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "ranks", "kind", "message"),
    [
        ([], 1, MissingExtraError, "needs the package sglang"),
        ([f"+{KWARGS}.ulr=http://a:1"], 1, ConfigError, "no argument 'ulr'"),
        ([f"+{KWARGS}.url=localhost"], 1, ConfigError, "not the address of a server"),
        ([URL], 2, ConfigError, "1 servers for 2 ranks"),
        ([f"+{KWARGS}.python=/no/python"], 1, ConfigError, "'/no/python' is not a program"),
        ([f"+{KWARGS}.python=sh", URL], 1, ConfigError, "url names running ones"),
        ([URL, *given(tensor=2)], 2, ConfigError, "one server per rank"),
    ],
)
def test_check_refuses_unsupported_settings(
    folder: Path, overrides: list[str], ranks: int, kind: type[RlctlError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        SGLangEngine.check(engine_spec(folder, *overrides).rollout, "cpu", ranks)


def test_the_tensor_parallelism_of_one_rank_is_corrected(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangEngine.check(engine_spec(folder, URL, *given(tensor=2)).rollout, "cpu", 2)
    words = ["train", "ppo", *given(tensor=2)]
    assert corrected(words, caught.value.problems) == f"rlctl train ppo {given(tensor=1)[0]}"


@pytest.mark.parametrize("served", [None, [], ["Qwen2ForCausalLM"], ["LlamaForCausalLM"]])
def test_the_model_of_a_server(
    folder: Path, served: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reports no architecture of some models."""
    reply = {"architectures": served, "model_path": "other", "device": "cpu"}
    reply |= {"enable_deterministic_inference": True}
    monkeypatch.setattr(SGLangServer, "call", lambda *_: reply)
    engine = attached("http://127.0.0.1:1", folder)
    assert engine.architectures == ["Qwen2ForCausalLM"]
    if served != ["LlamaForCausalLM"]:
        engine._check_server()
        return
    with pytest.raises(ConfigError, match=r"has the model other \(LlamaForCausalLM\)"):
        engine._check_server()


def test_a_run_without_sglang_ends_before_it_begins(here: Path) -> None:
    assert main(["train", "ppo", "--inline", "actor_rollout_ref.rollout.name=sglang"]) == 6
    assert not (here / "runs").exists()
