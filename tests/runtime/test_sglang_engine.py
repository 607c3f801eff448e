"""Engine `sglang` over HTTP against a test server with SGLang's endpoints, not SGLang itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlctl.__main__ import main
from rlctl.errors import ConfigError, MissingExtraError, ResourceError, RlctlError
from rlctl.runtime.rollout.engine import SamplingParams, to_requests
from rlctl.runtime.rollout.sglang import SGLangEngine
from tests.generation import STOP, engine_spec, full_forward, prompts
from tests.generation import sampling as any_sampling
from tests.models import tiny_model, write_tiny_model
from tests.progress import wait_until
from tests.sglang_server import Server

KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(AutoModelForCausalLM.from_pretrained(folder)).start()
    yield server
    server.shutdown()


def attach(server: Server, folder: Path, *overrides: str, **changes: Any) -> SGLangEngine:
    return SGLangEngine.from_spec(
        engine_spec(folder, f"+{KWARGS}.url={server.url}", *overrides, **changes), None
    )


def sampling(**changes: Any) -> SamplingParams:
    return any_sampling(**({"max_tokens": 12} | changes))


def assert_log_probs_of(
    model: PreTrainedModel, engine: SGLangEngine, temperature: float = 1.0
) -> None:
    """Compare the engine's log-probs with those of `model`."""
    prompt_ids = prompts(9, 1, 40)
    responses = engine.generate(prompt_ids, sampling(temperature=temperature, top_k=40, top_p=0.95))
    assert len(responses.finish) == 9
    for row, (response, log_probs) in enumerate(
        zip(responses.response_ids.rows(), responses.log_probs.rows(), strict=True)
    ):
        expected = full_forward(model, prompt_ids.rows()[row // 3], response, temperature or 1.0)
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_log_probs_match_the_policy(server: Server, folder: Path) -> None:
    engine = attach(server, folder)
    for temperature in (0.6, 0.0):
        assert_log_probs_of(tiny_model(), engine, temperature)


def test_weight_sync_flushes_the_cache(server: Server, folder: Path, tmp_path: Path) -> None:
    engine = attach(server, folder, f"+{KWARGS}.weights_dir={tmp_path}")
    policy = tiny_model(seed=2)
    engine.load_weights(policy.named_parameters())
    assert server.calls[-2:] == ["/update_weights_from_disk", "/flush_cache"]
    assert list(tmp_path.iterdir()) == []
    assert_log_probs_of(policy, engine)


def test_sleep_releases_weights_and_wake_restores_them(server: Server, folder: Path) -> None:
    engine = attach(server, folder)
    assert engine.sleep()
    with pytest.raises(RlctlError, match="replied 500 to /generate"):
        engine.generate(prompts(4), sampling())
    engine.wake()
    engine.load_weights(tiny_model(seed=3).named_parameters())
    assert_log_probs_of(tiny_model(seed=3), engine)
    kept = attach(server, folder, "actor_rollout_ref.rollout.free_cache_engine=false")
    assert not kept.sleep()
    assert not server.released


def test_a_cancelled_request_is_aborted(server: Server, folder: Path) -> None:
    engine = attach(server, folder, "actor_rollout_ref.rollout.max_num_seqs=2")
    requests = to_requests(prompts(9, 4), sampling(n=1), 64)
    server.lock.acquire()  # nothing is generated until the request is cancelled
    engine.submit(requests)
    wait_until(lambda: all(call.running() for call in engine._open), os.getpid(), "the calls")
    threading.Timer(0.2, server.lock.release).start()
    engine.cancel([requests[0].key])
    assert engine.num_open == 1
    done = []
    while engine.num_open:
        done += engine.step()
    assert [each.key for each in done] == [requests[1].key]
    assert "/abort_request" in server.calls


def test_greedy_stop_tokens_limits_and_context(server: Server, folder: Path) -> None:
    engine = attach(server, folder, max_length=20)
    once, twice = (
        engine.generate(prompts(4, 7), sampling(temperature=0.0, seed=seed, n=1)) for seed in (1, 2)
    )
    assert torch.equal(once.response_ids.values, twice.response_ids.values)
    stops = (STOP, 5, 6, 7, 8)
    stopped = engine.generate(prompts(4, 7, 2), sampling(stop_token_ids=stops, n=8))
    assert set(stopped.finish) == {"stop", "length"}
    for response, finish in zip(stopped.response_ids.rows(), stopped.finish, strict=True):
        assert finish == ("stop" if int(response[-1]) in stops else "length")
    cut = engine.generate(
        prompts(15, 19), sampling(n=2, max_tokens=torch.tensor([3, 9, 4, 4]), stop_token_ids=())
    )
    assert cut.response_ids.lengths.tolist() == [3, 5, 1, 1]
    with pytest.raises(ConfigError, match="1 to 19 leave space"):
        engine.generate(prompts(20), sampling())
    assert engine.generate(prompts(), sampling()).finish == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", "replied 500 to /generate: .*illegal memory access"),
        ("abort", "aborted a response"),
        ("hang", "did not reply to /generate within 0.5 s"),
    ],
)
def test_server_errors_are_reported(server: Server, folder: Path, how: str, message: str) -> None:
    engine = attach(server, folder, timeout_s=0.5 if how == "hang" else 60.0)
    server.broken = how
    with pytest.raises(RlctlError, match=message) as caught:
        engine.generate(prompts(4, 7), sampling(n=1))
    assert caught.value.problems[0].where == server.url


def test_weights_of_another_model_are_refused(server: Server, folder: Path) -> None:
    with pytest.raises(
        RlctlError, match=r"replied 400 to /update_weights_from_disk: .*does not fit"
    ):
        attach(server, folder).load_weights(tiny_model(hidden_size=16).named_parameters())


@pytest.mark.parametrize(
    ("overrides", "ranks", "kind", "message"),
    [
        ([], 1, MissingExtraError, "needs the package sglang"),
        ([f"+{KWARGS}.ulr=http://a:1"], 1, ConfigError, "no argument 'ulr'"),
        ([f"+{KWARGS}.url=localhost"], 1, ConfigError, "not the address of a server"),
        ([f"+{KWARGS}.url=http://a:1"], 2, ConfigError, "1 servers for 2 ranks"),
        (
            [f"+{KWARGS}.url=http://a:1", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            2,
            ConfigError,
            "one server per rank",
        ),
    ],
)
def test_check_refuses_unsupported_settings(
    folder: Path, overrides: list[str], ranks: int, kind: type[RlctlError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        SGLangEngine.check(engine_spec(folder, *overrides).rollout, "cpu", ranks)


# Passes requests on to the server of this process, which has imported torch.
LAUNCHED = """
import os, sys, urllib.error, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if "--refuse" in sys.argv:
    sys.exit("server_args: no such model")
broken = False

class Proxy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.pass_on(None)

    def do_POST(self):
        global broken
        if broken and self.path == "/generate":
            print("the device is gone", flush=True)
            os._exit(3)
        broken |= self.path == "/break"
        self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def pass_on(self, body):
        try:
            reply = urllib.request.urlopen(urllib.request.Request("URL" + self.path, body))
        except urllib.error.HTTPError as error:
            reply = error
        content = reply.read()
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Proxy).serve_forever()
"""


@pytest.fixture
def installed(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package `sglang` whose `launch_server` starts a process for the test server."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(LAUNCHED.replace("URL", server.url))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_started_server_is_ended(folder: Path) -> None:
    engine = SGLangEngine.from_spec(engine_spec(folder), None)
    process, log = engine.server.process, engine.server.log
    assert process is not None
    assert log is not None
    assert {"--load-format", "dummy", str(folder)} <= {*map(str, process.args)}
    policy = tiny_model(seed=4)
    engine.load_weights(policy.named_parameters())
    assert_log_probs_of(policy, engine)
    engine.server.call("POST", "/break", {"how": "error"}, 10)
    with pytest.raises(
        RlctlError, match="lost the connection to the SGLang server during /generate"
    ) as caught:
        engine.generate(prompts(4), sampling(n=1))
    assert "the device is gone" in str(caught.value)
    engine.close()
    assert process.poll() == 3
    assert not log.exists()


@pytest.mark.usefixtures("installed")
def test_failed_server_start_is_reported(folder: Path) -> None:
    with pytest.raises(ResourceError, match="exited during startup with code 1") as caught:
        SGLangEngine.from_spec(engine_spec(folder, f"+{KWARGS}.server_args=[--refuse]"), None)
    assert "no such model" in str(caught.value)


def test_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update the server has the new weights: engine and trainer agree."""
    from rlctl.data_prep.arithmetic import train_and_validation
    from rlctl.data_prep.rows import write_rows
    from tests.e2e.command import metrics

    model = write_tiny_model(tmp_path / "model")
    write_rows(
        tmp_path / "train.parquet", train_and_validation(16, 4, seed=1, level=1, careless=0.0)[0]
    )
    monkeypatch.chdir(tmp_path)
    settings = [
        "data.train_files=train.parquet",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=sglang",
        "data.max_prompt_length=160",
        "data.max_response_length=8",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "trainer.total_training_steps=2",
    ]
    assert main(["train", "ppo", "--inline", *settings]) == 6
    assert not (tmp_path / "runs").exists()
    server = Server(AutoModelForCausalLM.from_pretrained(model)).start()
    assert (
        main(["train", "ppo", "--inline", "--name", "x", *settings, f"+{KWARGS}.url={server.url}"])
        == 0
    )
    server.shutdown()
    second = metrics(next(tmp_path.glob("runs/*/x")))[-1]
    assert second["training/global_step"] == 2
    assert second["training/rollout_probs_diff_max"] < 1e-4
    assert server.calls.count("/update_weights_from_disk") == 2
