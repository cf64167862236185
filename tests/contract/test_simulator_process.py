"""The simulator as a process: how it starts, ends, and comes back."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle3.simulator.__main__ import main
from eagle3.simulator.process import SimulatorProcess

SCENARIO = """
name: process
time_scale: 0
generation_lag_s: 0
models: [{id: acme/tiny, suffix: "1"}]
providers: [{name: Solo, tag: solo, prompt_usd_per_mtok: 1, completion_usd_per_mtok: 2}]
"""
BODY: dict[str, Any] = {"model": "acme/tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    scenario, answers = tmp_path / "scenario.yaml", tmp_path / "answers.jsonl"
    scenario.write_text(SCENARIO)
    record = {**BODY, "prompt_ids": [1], "output_ids": [3, 2], "text": "Hello.", "finish_reason": "stop"}
    answers.write_text(json.dumps(record) + "\n")
    return scenario, answers


def ask(base_url: str) -> httpx.Response:
    url = f"{base_url}/chat/completions"
    return httpx.post(url, json=BODY, headers={"Authorization": "Bearer k"}, trust_env=False)


def launch(files: tuple[Path, Path], *options: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    command = [sys.executable, "-m", "eagle3.simulator", "--scenario", str(files[0]), "--answers", str(files[1])]
    child = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    return child, json.loads(child.stdout.readline())


@pytest.mark.parametrize("ending", ["stdin", "SIGTERM", "SIGINT"])
def test_it_ends_cleanly(files, tmp_path, ending):
    ready_file = tmp_path / "ready.json"
    child, ready = launch(files, "--exit-with-stdin", "--ready-file", str(ready_file))
    try:
        assert json.loads(ready_file.read_text()) == ready
        assert ask(ready["base_url"]).status_code == 200
        if ending == "stdin":
            child.stdin.close()
        else:
            child.send_signal(getattr(signal, ending))
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()


def test_a_killed_simulator_comes_back_with_its_books(files, tmp_path):
    state = tmp_path / "state.jsonl"
    with SimulatorProcess(*files[:1], [files[1]], state=state) as first:
        port = int(first.base_url.split(":")[2].split("/")[0])
        generation_id = ask(first.base_url).headers["x-generation-id"]
        deadline_s = time.monotonic() + 30
        while not state.exists() or generation_id not in state.read_text():
            assert time.monotonic() < deadline_s, "the state file was never written"
        billed = first.stats()["billed_usd"]
        first.kill()
    with SimulatorProcess(*files[:1], [files[1]], state=state, port=port) as second:
        assert second.stats()["billed_usd"] == billed != "0"
        assert second.truth()[generation_id]["output_ids"] == [3, 2]


@pytest.mark.parametrize("option", ["--scenario", "--answers"])
def test_wrong_files_exit_with_2(files, tmp_path, capsys, option):
    arguments = ["--scenario", str(files[0]), "--answers", str(files[1]), option, str(tmp_path / "absent")]
    assert main(arguments) == 2
    assert "absent" in capsys.readouterr().err


def test_a_taken_port_exits_with_1(files, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--scenario", str(files[0]), "--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err


def test_it_costs_no_torch(files):
    code = "import sys, eagle3.simulator.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_live_model_answers_what_nobody_recorded(files, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<end>": 0, "<unk>": 1, **{f"word{i}": i for i in range(2, 32)}, "hi": 32}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    directory = tmp_path / "model"
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    with SimulatorProcess(files[0], live=directory, ready_timeout_s=300) as running:
        first, second = ask(running.base_url), ask(running.base_url)
        texts = {reply.json()["choices"][0]["message"]["content"] for reply in (first, second)}
        truth = running.truth()[first.headers["x-generation-id"]]
    assert len(texts) == 1, "the same seed gives the same answer"
    assert 1 <= len(truth["output_ids"]) <= 9
    assert first.json()["usage"]["completion_tokens"] == len(truth["output_ids"])
    assert truth["prompt_tokens"] == 1
