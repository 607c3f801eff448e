"""Engine `vllm_server` against a test server with vLLM's endpoints; vLLM itself is in the soak."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.errors import ConfigError, RlctlError
from rlctl.plugins.bridges.vllm_server import VLLMServer, VLLMServerEngine
from rlctl.runtime.rollout.engine import EngineSpec, random_streams, to_requests
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.rollout import RolloutSpec
from tests.generation import engine_spec, prompts, recomputed, sampling
from tests.models import tiny_model
from tests.plugins.bridges.vllm_server import Server
from tests.progress import wait_until

KEY = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(AutoModelForCausalLM.from_pretrained(folder))
    server.start()
    yield server
    server.shutdown()


def spec(folder: Path, *overrides: str, **changes: Any) -> EngineSpec:
    return replace(engine_spec(folder, f"{KEY}.name=vllm_server", *overrides), **changes)


def attach(server: Server, folder: Path, *overrides: str, **changes: Any) -> VLLMServerEngine:
    url = f"+{KEY}.engine_kwargs.url={server.url}"
    return VLLMServerEngine.from_spec(spec(folder, url, *overrides, **changes), None)


def test_log_probs_are_those_of_the_synced_weights(server: Server, folder: Path) -> None:
    engine = attach(server, folder)
    for seed in (0, 3):
        policy = tiny_model(seed=seed)
        engine.load_weights(policy.named_parameters())
        prompt_ids = prompts(4, 9)
        params = sampling(max_tokens=6, n=2, temperature=0.7)
        responses = engine.generate(prompt_ids, params)
        again = engine.generate(prompt_ids, params)
        assert torch.equal(responses.response_ids.values, again.response_ids.values)
        wanted = recomputed(policy, prompt_ids, responses, 0.7)
        torch.testing.assert_close(responses.log_probs.values, wanted, atol=1e-4, rtol=0)
    assert server.calls.count("/reset_prefix_cache?reset_running_requests=true") == 2
    engine.close()


def test_requests_carry_the_api_key(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.api_key = "sk-secret"
    with pytest.raises(RlctlError, match="replied 401"):
        attach(server, folder)
    setting = f"+{KEY}.engine_kwargs.api_key_env=ENGINE_KEY"
    with pytest.raises(ConfigError, match="variable ENGINE_KEY with the API key is not set"):
        attach(server, folder, setting)
    monkeypatch.setenv("ENGINE_KEY", "sk-secret")
    engine = attach(server, folder, setting)
    engine.load_weights(tiny_model().named_parameters())
    assert len(engine.generate(prompts(4), sampling(max_tokens=3, n=1)).response_ids) == 1
    engine.close()


def test_cancelled_requests_are_aborted(server: Server, folder: Path) -> None:
    engine = attach(server, folder)
    server.slow_s = 0.3
    params = replace(sampling(max_tokens=3, n=1), seed=random_streams(1, torch.arange(2)))
    first, second = to_requests(prompts(5, 6), params, 64)
    engine.submit([first, second])
    wait_until(lambda: server.calls.count("/inference/v1/generate") == 3, os.getpid(), "requests")
    engine.cancel([first.key])
    found = []
    while engine.num_open:
        found += engine.step()
    assert [each.key for each in found] == [second.key]
    assert [each.startswith("generate-tokens-") for each in server.aborted] == [True]
    engine.close()


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "max_model_len", 32, "--max-model-len 64"),
        ("load_config", "load_format", "dummy", "--load-format auto"),
        ("parallel_config", "worker_extension_cls", "", "--worker-extension-cls rlctl"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ],
)
def test_unsuitable_servers_are_refused(
    server: Server, folder: Path, section: str, key: str, value: object, message: str
) -> None:
    server.config[section][key] = value
    with pytest.raises(ConfigError, match=message):
        attach(server, folder)


def test_closed_endpoints_are_refused(server: Server, folder: Path) -> None:
    server.is_closed = True
    with pytest.raises(RlctlError, match="--enable-scale-out"):
        attach(server, folder)
    server.config = None
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        attach(server, folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("worker_extension_cls", ""), ("data_parallel_size", 2)],
)
def test_servers_that_cannot_join_a_group_get_weights_in_a_folder(
    server: Server, folder: Path, key: str, value: object
) -> None:
    assert server.config is not None
    engine = attach(server, folder)
    here, elsewhere = "127.0.0.1", VLLMServer("http://node7:8000")
    assert engine.num_receivers("cpu", here) == 2
    engine.config["parallel_config"][key] = value
    assert engine.num_receivers("cpu", "10.0.0.1") == 0
    engine.config = server.config
    engine.server = elsewhere
    assert (engine.num_receivers("cpu", here), engine.num_receivers("cpu", "10.0.0.1")) == (0, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "needs the address of a vLLM server"),
        ([f"+{KEY}.engine_kwargs.url=node7"], "is not the address of a server"),
        ([f"+{KEY}.engine_kwargs.url=http://a", f"{KEY}.top_p=0.9"], "after top-k and top-p"),
        ([f"+{KEY}.engine_kwargs={{url: http://a, port: 1}}"], "has no argument 'port'"),
    ],
)
def test_wrong_settings_are_refused_before_the_start(
    folder: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLMServerEngine.check(spec(folder, *overrides).rollout, "cpu", 1)


def test_engines_of_a_pool_have_a_server_each(server: Server, folder: Path) -> None:
    urls = f"+{KEY}.engine_kwargs.url=[http://127.0.0.1:9, {server.url}]"
    engine = VLLMServerEngine.from_spec(spec(folder, urls, number=1), None)
    assert engine.server.url == server.url
    engine.close()
    with pytest.raises(ConfigError, match="engine 2 needs a separate server"):
        VLLMServerEngine.from_spec(spec(folder, urls, number=2), None)
    with pytest.raises(ConfigError, match="engine 0 needs a separate server"):
        VLLMServerEngine.from_spec(spec(folder, urls), None)
    built = spec(folder, urls)
    added = RolloutSpec(built.model, SamplingConfig(built.rollout, 8, (2,)), 8, seed=1, number=5)
    assert added.at("http://b").sampling.rollout.engine_kwargs["url"] == "http://b"
    assert added.at("http://b").number == 0
