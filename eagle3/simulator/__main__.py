"""`python -m eagle3.simulator`: options in, a running simulator out."""

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from eagle3.errors import Eagle3Error
from eagle3.simulator.answers import Answers, load_answers, load_decode
from eagle3.simulator.app import ADMIN, API, App
from eagle3.simulator.chat import LiveModel
from eagle3.simulator.scenario import Scenario, load_scenario
from eagle3.simulator.server import LoopClock, raise_file_limit, serve
from eagle3.simulator.state import State


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3 simulate",
        description="An OpenRouter look-alike: answers from recordings, charges a pretend account, fails by script.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (default %(default)s)")
    parser.add_argument("--scenario", type=Path, required=True, help="models, providers, faults and account (YAML)")
    parser.add_argument("--answers", type=Path, nargs="+", action="extend", default=[], help="recorded answers (JSONL)")
    parser.add_argument("--tokenizer", type=Path, help="model directory: cut answers, and give scripted ones their ids")
    parser.add_argument("--grammar", help="response grammar of scripted answers; needs --tokenizer")
    parser.add_argument("--mode", help="mode of the grammar (default: its first)")
    parser.add_argument("--live", type=Path, help="model directory: answer prompts nobody recorded with the real model")
    parser.add_argument("--state", type=Path, help="file that keeps account, cache and generations over a restart")
    parser.add_argument("--ready-file", type=Path, help="also write the ready line to this file")
    parser.add_argument("--exit-with-stdin", action="store_true", help="exit when standard input closes")
    parser.add_argument("--time-scale", type=float, help="multiplies every simulated duration; overrides the scenario")
    return parser


def _load_answers(options: argparse.Namespace) -> Answers:
    if options.tokenizer is None:
        return load_answers(options.answers)
    if options.grammar is None:
        return load_answers(options.answers, decode=load_decode(options.tokenizer))
    from eagle3.simulator.improvised import Improviser
    from eagle3.simulator.scripted import Script

    script = Script(options.tokenizer, options.grammar, options.mode)
    improviser = Improviser(script)
    return load_answers(options.answers, decode=script.decode, script=script.answer, improvise=improviser.answer)


def _announce(line: str, ready_file: Path | None) -> None:
    if ready_file is not None:
        draft = ready_file.with_name(f".{ready_file.name}.{os.getpid()}.tmp")
        draft.write_text(line, encoding="utf-8")
        draft.replace(ready_file)
    sys.stdout.write(line)
    sys.stdout.flush()


def _run(options: argparse.Namespace) -> None:
    scenario: Scenario = load_scenario(options.scenario)
    if options.time_scale is not None:
        scenario = Scenario.model_validate({**scenario.model_dump(), "time_scale": options.time_scale})
    answers = _load_answers(options)
    state = State(scenario.account, options.state)
    admin_token = secrets.token_urlsafe(24)
    live: LiveModel | None = None
    if options.live is not None:
        from eagle3.simulator.live import load_live_model

        live = load_live_model(options.live)

    def make_app(clock: LoopClock) -> App:
        return App(scenario, answers=answers, state=state, clock=clock, admin_token=admin_token, live=live)

    def ready(port: int) -> None:
        origin = f"http://{options.host}:{port}"
        document = {
            "base_url": origin + API,
            "admin_url": origin + ADMIN,
            "admin_token": admin_token,
            "pid": os.getpid(),
            "scenario": scenario.name,
            "answers": len(answers),
        }
        _announce(json.dumps(document) + "\n", options.ready_file)

    raise_file_limit()
    serving = serve(
        make_app, host=options.host, port=options.port, on_ready=ready, exit_with_stdin=options.exit_with_stdin
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulator until it is told to stop.

    Args:
        argv: Options without the program name; null takes those of the process.

    Returns:
        0 after a clean stop; 2 for wrong options or files; 1 when the address is taken.
    """
    options = _parser().parse_args(argv)
    try:
        _run(options)
    except Eagle3Error as exc:
        sys.stderr.write(f"eagle3 simulate: {exc}\n")
        return exc.exit_code
    except OSError as exc:
        sys.stderr.write(f"eagle3 simulate: {options.host}:{options.port}: {exc.strerror or exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
